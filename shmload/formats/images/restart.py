"""JPEGs with restart markers, of which a crop is decoded without the bits beside it: files are coded so once, when they are packed.

Entropy decoding is most of the work of decoding, and Huffman codes can only be read from where nothing before matters: behind a
restart marker. With a marker after every 48 pixels or more a crop costs its own bits and few more (`src/jpeg_cut.h`), and the
file, whose Huffman tables are made anew for it, is smaller than most were. Every decoder makes the same pixels of it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shmload._core.jpeg import recode
from shmload.formats.images.decoder import MAX_PIXELS
from shmload.formats.images.libraries import HINT, JPEG, jpeg_header, unbound

# Pixels between two markers. Measured at 95 kB, CPU of a random crop and size of the file: a row 0.94 and 0.954 of what they were,
# 48 pixels 0.79 and 0.961, 32 pixels 0.78 and 0.967.
_LEAST_WIDTHS: dict[str, int] = {"tile": 48, "row": 0}


class Recoded(NamedTuple):
    """A file to keep, and why it is still the one that was given; "" if it is not."""

    data: bytes
    why_not: str


def with_restart_markers(data: bytes, *, every: Literal["tile", "row"] = "tile") -> bytes:
    """A JPEG coded anew without loss, so that crops of it are decoded without what lies beside them.

    The coefficients stay what they are, and so do the pixels in every decoder; EXIF, profiles and all else that describes the
    image are kept byte by byte. The new file is sequential, its Huffman tables are its own, and the same file always becomes the
    same bytes with the same libjpeg-turbo. What cannot be done without loss, and what is no JPEG, is returned as it was given.

    Args:
        data: an encoded image.
        every: where restart markers stand: "tile", as near to each other as a row of MCUs divides, but at least 48 pixels apart;
            "row", after each row of MCUs.
    Returns:
        The new file, or `data`.
    Raises:
        ImportError: there is no libjpeg-turbo that could do it.
        ValueError: `every` is neither.
    Cost: 28 ms a megabyte; the GIL is released.
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
    return recoded(data, every=every).data


def recoded(data: bytes, *, every: Literal["tile", "row"] = "tile") -> Recoded:
    """`with_restart_markers`, and why a file is returned as it was given."""
    if every not in _LEAST_WIDTHS:
        raise ValueError(f"every needs to be one of {tuple(_LEAST_WIDTHS)}; got {every!r}")
    if not data.startswith(JPEG):
        return Recoded(data, "no JPEG")
    if why := unbound():
        raise ImportError(f"restart markers: {why}; {HINT}")
    try:
        header = jpeg_header(data)
        if header.height * header.width > MAX_PIXELS:
            return Recoded(data, f"{header.height} x {header.width} pixels, more than {MAX_PIXELS}")
        return Recoded(recode(data, least_width=_LEAST_WIDTHS[every]), "")
    except ValueError as error:
        return Recoded(data, str(error))
