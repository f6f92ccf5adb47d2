"""The format of an encoded image, recognized by its first bytes.

Names of files are unreliable, and readers choose the decoder by the extension.
"""

from __future__ import annotations

import re

# two letters are too short to identify a format, so more of the header is matched
_BEGINNINGS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\xff\xd8\xff"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"BM.{4}\0{4}.{2}\0\0", re.DOTALL), "bmp"),  # reserved bytes, and the offset of the pixels
    (re.compile(rb"II\*\0|MM\0\*"), "tif"),
    (re.compile(rb"\0\0\0\x0cjP  \r\n"), "jp2"),
    (re.compile(rb"P5\s+(#|\d+\s)"), "pgm"),  # a comment, or the width
    (re.compile(rb"P6\s+(#|\d+\s)"), "ppm"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "webp"),
)
PEEK = 16  # number of bytes that suffices to recognize a format


def image_extension(begin: bytes) -> str:
    """Return the extension of an encoded image, from its first bytes; "" if the format is unknown."""
    return next((extension for pattern, extension in _BEGINNINGS if pattern.match(begin)), "")


def is_format(found: str, extension: str) -> bool:
    """Return whether an extension names the format that `image_extension` has found."""
    return found == extension or {found, extension} <= {"jpg", "jpeg"} or {found, extension} <= {"tif", "tiff"}
