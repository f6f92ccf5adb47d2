"""Check a PNG file before it is decoded: its header, its checksums and its compressed pixels.

Source: W3C Portable Network Graphics (third edition), 5.
"""

from __future__ import annotations

import struct
import zlib

PNG = b"\x89PNG\r\n\x1a\n"


class PngDamage(ValueError):
    """The chunks of a PNG file are damaged. Pillow may be able to read the picture anyway."""


def png_header(data: bytes) -> tuple[int, int]:
    """Return height and width of a PNG file after verifying the checksum of every chunk.

    Raises:
        PngDamage: a checksum does not match, or the file ends before its last chunk; the message names the byte.
    """
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise PngDamage("a damaged PNG: no header begins at byte 8")
    view = memoryview(data)
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        if at + 12 + length > len(data):
            break
        if zlib.crc32(view[at + 4 : at + 8 + length]) != int.from_bytes(data[at + 8 + length : at + 12 + length]):
            raise PngDamage(f"a damaged PNG: the chunk at byte {at} does not match its checksum")
        if data[at + 4 : at + 8] == b"IEND":
            width, height = struct.unpack_from(">II", data, 16)
            return height, width
        at += 12 + length
    raise PngDamage(f"a PNG cut off: the chunk at byte {at} does not end within the {len(data)} bytes of the file")


def check_pixels(data: bytes) -> None:
    """Verify the compressed pixels of a damaged PNG file with the checksum inside the zlib stream.

    Pillow ignores the chunk checksums of such a file, and it may stop at the last row, before the checksum of the stream.

    Raises:
        PngDamage: the pixels are damaged. Truncated pixels pass here, because Pillow rejects a file unless all rows are there.
    """
    stream, at, is_sound = zlib.decompressobj(), len(PNG), True
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        end = at + 8 + length
        if data[at + 4 : at + 8] == b"IDAT":
            if end + 4 <= len(data):
                is_sound &= zlib.crc32(data[at + 4 : end]) == int.from_bytes(data[end : end + 4])
            rest = data[at + 8 : end]
            try:
                while rest and not stream.eof:
                    stream.decompress(rest, 1 << 16)  # in pieces, because the decompressed size is unknown
                    rest = stream.unconsumed_tail
            except zlib.error as error:
                raise PngDamage(f"a damaged PNG: the pixels in the chunk at byte {at}: {error}") from None
        at = end + 4
    if not (is_sound or stream.eof):
        raise PngDamage("a damaged PNG: a chunk of pixels does not match its checksum, and the pixels have no end")
