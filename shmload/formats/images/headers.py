"""What the head of a file says of the image in it, read before any library makes room for the pixels.

Source: ITU-T T.81 (JPEG), annex B; W3C Portable Network Graphics (third edition), 5.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END, _SCAN = 0xD9, 0xDA


class JpegHeader(NamedTuple):
    """A JPEG file's frame, and at which byte its first scan begins."""

    height: int
    width: int
    num_components: int
    scan_at: int


def jpeg_header(data: bytes) -> JpegHeader:
    """Reads the markers of a JPEG file up to its first scan.

    Raises:
        ValueError: they are damaged or cut off, or no image of 8 bits a channel follows; with the byte where that shows.
    """
    at, frame = 2, None
    while True:
        if at + 4 > len(data):
            raise ValueError(f"a JPEG that ends at byte {len(data)}, before its image begins")
        if data[at] != 0xFF:
            raise ValueError(f"a damaged JPEG: byte {at} is {data[at]:#04x}, where a marker has to begin")
        marker = data[at + 1]
        if marker == 0xFF:  # markers may be padded
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker == _END or length < 2 or at + 2 + length > len(data):
            raise ValueError(
                f"a damaged JPEG: the segment at byte {at} does not end within the {len(data)} bytes of the file"
            )
        if marker in _FRAMES:
            if length < 8:
                raise ValueError(f"a damaged JPEG: the frame at byte {at} has {length} bytes, needs 8")
            precision, height, width, num_components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8:
                raise ValueError(f"a JPEG of {precision} bits a channel; those of 8 can be decoded")
            if not height or not width:
                raise ValueError(f"a JPEG of {height} x {width} pixels, as the frame at byte {at} says")
            frame = (height, width, num_components)
        if marker == _SCAN:
            if frame is None:
                raise ValueError(f"a damaged JPEG: its scan at byte {at} has no frame before it")
            return JpegHeader(*frame, at)
        at += 2 + length


def jpeg_is_whole(data: bytes, header: JpegHeader) -> bool:
    """Whether the end marker is there. Within a scan its two bytes cannot occur."""
    return data.rfind(b"\xff\xd9") > header.scan_at


def png_header(data: bytes) -> tuple[int, int]:
    """Height and width of a PNG file, every chunk of which has the checksum it says.

    Raises:
        ValueError: one has not, or the file ends before its last; with the byte where that shows.
    """
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise ValueError("a damaged PNG: byte 8 begins no header")
    view = memoryview(data)
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        if at + 12 + length > len(data):
            break
        if zlib.crc32(view[at + 4 : at + 8 + length]) != int.from_bytes(data[at + 8 + length : at + 12 + length]):
            raise ValueError(f"a damaged PNG: the chunk at byte {at} has another checksum than it says")
        if data[at + 4 : at + 8] == b"IEND":
            width, height = struct.unpack_from(">II", data, 16)
            return height, width
        at += 12 + length
    raise ValueError(f"a PNG cut off: the chunk at byte {at} does not end within the {len(data)} bytes of the file")
