"""The header of a JPEG file, parsed before any library allocates memory for pixels.

Pillow silently invents the missing pixels of a truncated file, so the end marker is checked here, too.

Source: ITU-T T.81, annex B.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

JPEG = b"\xff\xd8\xff"
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length field
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END, _SCAN = 0xD9, 0xDA
_LOSSLESS = 0xC3
_UNREADABLE = {  # kinds of JPEG that no libjpeg decodes, by the marker of the frame
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    0xCB: "a lossless JPEG with arithmetic coding",
}
OTHER_DECODERS = "Convert the file, or decode it with a function of your own, for example with imagecodecs"


class JpegHeader(NamedTuple):
    """The size of a JPEG file's image, and the byte at which its first scan begins.

    Attributes:
        height, width: size in pixels, as stored.
        num_components: number of color components: 1 for gray, 3 for YCbCr or RGB, 4 for CMYK.
        scan_at: offset of the marker of the first scan.
        is_lossless: the file is JPEG Lossless, as in DICOM files, which not every libjpeg decodes.
        has_junk: there are bytes between two segments that belong to neither.
    """

    height: int
    width: int
    num_components: int
    scan_at: int
    is_lossless: bool = False
    has_junk: bool = False


def jpeg_header(data: bytes, *, is_strict: bool | None = None) -> JpegHeader:
    """Parse the markers of a JPEG file up to its first scan.

    Args:
        data: the file.
        is_strict: reject bytes between two segments; otherwise they are skipped, as Pillow and libjpeg do.
    Raises:
        ValueError: the markers are damaged or truncated, or do not describe an image of 8 bits per channel; the message names the
            byte.
    """
    at, frame, is_lossless, has_junk = 2, None, False, False
    while True:
        if at + 4 > len(data):
            raise ValueError(f"a JPEG that ends at byte {len(data)}, before its image begins")
        if data[at] != 0xFF or data[at + 1] == 0:
            if is_strict:
                raise ValueError(f"a damaged JPEG: byte {at} is {data[at]:#04x}, where a marker has to begin")
            has_junk = True
            next_at = data.find(b"\xff", at + 1)
            at = len(data) if next_at < 0 else next_at
            continue
        marker = data[at + 1]
        if marker == 0xFF:  # markers may be padded
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker == _END or length < 2 or at + 2 + length > len(data):
            raise ValueError(f"a damaged JPEG: the segment at byte {at} does not end within the {len(data)} bytes of the file")
        if marker in _FRAMES:
            if marker in _UNREADABLE:
                raise ValueError(f"{_UNREADABLE[marker]}, a kind that libjpeg does not decode. {OTHER_DECODERS}")
            if length < 8:
                raise ValueError(f"a damaged JPEG: the frame at byte {at} has {length} bytes, needs 8")
            precision, height, width, num_components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8:
                raise ValueError(f"a JPEG of {precision} bits per channel; only 8 can be decoded. {OTHER_DECODERS}")
            if not height or not width:
                raise ValueError(f"a JPEG of {height} x {width} pixels, as the frame at byte {at} says")
            frame, is_lossless = (height, width, num_components), marker == _LOSSLESS
        if marker == _SCAN:
            if frame is None:
                raise ValueError(f"a damaged JPEG: its scan at byte {at} has no frame before it")
            return JpegHeader(*frame, at, is_lossless, has_junk)
        at += 2 + length


def jpeg_is_whole(data: bytes, header: JpegHeader) -> bool:
    """Return whether a file with this header has its end marker. The marker's two bytes cannot occur within a scan."""
    return data.rfind(b"\xff\xd9") > header.scan_at
