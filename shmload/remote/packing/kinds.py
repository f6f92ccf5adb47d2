"""What the bytes of a file are, by how they begin: names say little, and a reader chooses its decoder by the extension."""

from __future__ import annotations

_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"\0\0\0\x0cjP  \r\n", "jp2"),
    (b"P5", "pgm"),
    (b"P6", "ppm"),
)
PEEK = 16  # bytes that are enough to tell


def image_extension(begin: bytes) -> str:
    """The extension of an encoded image, by its first bytes; "" if it is none that is known here."""
    if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP":
        return "webp"
    for magic, extension in _BEGINNINGS:
        if begin.startswith(magic):
            return extension
    return ""
