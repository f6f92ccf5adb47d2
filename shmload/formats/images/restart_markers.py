"""Recode a JPEG with restart markers, so that a crop costs little more to decode than its own bits.

Entropy decoding is most of the work of decoding a JPEG, and Huffman codes can only be decoded from the start of a scan or from a
restart marker (src/jpeg_cut.h). The recoded file has new Huffman tables and is usually smaller, and every decoder returns the same
pixels for it. Files are recoded once, when they are packed.
"""

from __future__ import annotations

import re
from typing import Literal

from shmload._core.jpeg import recode
from shmload.formats.images.jpeg_header import JPEG, jpeg_header
from shmload.formats.images.libjpeg import HINT, unbound
from shmload.formats.images.open_image import MAX_PIXELS

_MPF = re.compile(rb"\xff\xe2..MPF\0", re.DOTALL)  # the segment with the offsets of further pictures (CIPA DC-007)
# Least number of pixels between two markers. Measured at 95 kB, as fractions of the CPU time of a random crop and of the file's
# size without markers: one row 0.94 and 0.954, 48 pixels 0.79 and 0.961, 32 pixels 0.78 and 0.967.
_LEAST_WIDTHS: dict[str, int] = {"tile": 48, "row": 0}


def with_restart_markers(data: bytes, *, every: Literal["tile", "row"] = "tile") -> bytes:
    """Recode a JPEG without loss, so that a crop can be decoded without the pixels next to it.

    The coefficients do not change, so every decoder returns the same pixels. EXIF, profiles and all other metadata are copied byte
    by byte. The new file is sequential and has its own Huffman tables. With the same libjpeg-turbo, the same file always becomes
    the same bytes. A file that is not a JPEG, or that cannot be recoded without loss, is returned unchanged.

    Args:
        data: an encoded image.
        every: the distance of restart markers: "tile", the smallest one of at least 48 pixels that divides a row of MCUs (minimum
            coded units, of 8 or 16 pixels) evenly; "row", one after each row of MCUs.
    Returns:
        The new file, or `data`.
    Raises:
        ImportError: no suitable libjpeg-turbo is available.
        ValueError: `every` has another value.
    Cost: 28 ms per megabyte; the GIL is released.
    Thread/process safety: any number of callers.
    Example:
        >>> from pathlib import Path
        >>> import shmload
        >>> from shmload.formats import with_restart_markers
        >>> photo = (Path(shmload.__file__).parent / "data" / "coffee.jpg").read_bytes()
        >>> with_restart_markers(photo).count(bytes([0xFF, 0xD0]))
        24
        >>> with_restart_markers(b"GIF89a")
        b'GIF89a'
    """
    return recoded(data, every=every)[0]


def recoded(data: bytes, *, every: Literal["tile", "row"] = "tile") -> tuple[bytes, str]:
    """Return (result of `with_restart_markers`, the reason why the file is unchanged, or "" if it was recoded)."""
    if every not in _LEAST_WIDTHS:
        raise ValueError(f"every needs to be one of {tuple(_LEAST_WIDTHS)}; got {every!r}")
    if not data.startswith(JPEG):
        return data, "no JPEG"
    if why := unbound():
        raise ImportError(f"restart markers: {why}; {HINT}")
    try:
        header = jpeg_header(data)
        if header.height * header.width > MAX_PIXELS:
            return data, f"{header.height} x {header.width} pixels, more than {MAX_PIXELS}"
        if _MPF.search(data):
            return data, "several pictures in one file (MPF), whose offsets would change"
        return recode(data, least_width=_LEAST_WIDTHS[every]), ""
    except ValueError as error:
        return data, str(error)
