"""From the bytes of a file to RGB pixels: which library decodes, and what it is not given.

JPEG goes to Pillow's libjpeg-turbo, called directly so that a part of an image can be decoded, else to simplejpeg. Both decode into
memory of ours and report damage within a scan; Pillow and OpenCV make something up for what is damaged and say nothing. simplejpeg
reads every file to its end; the others are kept from files that are cut off. PNG and all others go to Pillow. What a file is, its
bytes say, not its name. Conversions to RGB are Pillow's, except that of 16 bits, which there is a clipping: the high byte is taken.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shmload.formats.images.headers import JPEG, PNG, jpeg_header, jpeg_is_whole, png_header
from shmload.formats.images.libjpeg import LibJpeg, unbound
from shmload.formats.images.opened import HINT, Box, Opened, Part, Pixels, scratch

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

T = TypeVar("T")
LIBRARIES = ("auto", "libjpeg", "simplejpeg", "pillow", "opencv")


def open_image(data: bytes, library: str, max_pixels: int, *, is_strict: bool, is_fast: bool) -> Opened:
    """Looks at a file's head.

    Raises:
        ValueError: it is empty, damaged, no image, or larger than `max_pixels`.
        ImportError: there is no library for it.
    """
    if not data:
        raise ValueError("an empty file")
    if data.startswith(JPEG):
        header = jpeg_header(data)
        _check_size(header.height, header.width, max_pixels)
        chosen = _jpeg_library(library) if header.num_components in (1, 3) else "pillow"
        if chosen == "simplejpeg":
            return _Jpeg(data, header.height, header.width, is_strict=is_strict, is_fast=is_fast)
        if is_strict and not jpeg_is_whole(data, header):
            raise ValueError(f"a JPEG cut off: {len(data)} bytes without an end marker")
        if chosen == "libjpeg":
            return LibJpeg(data, header.height, header.width, is_strict=is_strict, is_fast=is_fast)
        if chosen == "opencv":
            return _OpenCv(data, header.height, header.width)
    elif data.startswith(PNG):
        height, width = png_header(data)
        _check_size(height, width, max_pixels)
        if library == "opencv":
            return _OpenCv(data, height, width)
    return _Pillow(open_picture(data), max_pixels)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(
            f"{height} x {width} pixels are more than max_pixels={max_pixels}; give a larger one if the file is meant to be so"
        )


def _jpeg_library(library: str) -> str:
    if library != "auto":
        return library
    if not unbound():
        return "libjpeg"
    try:
        import simplejpeg  # noqa: F401  # only whether it is there
    except ImportError:
        return "pillow"
    return "simplejpeg"


def open_picture(data: bytes) -> Picture:
    """Pillow's image of a file, not decoded yet.

    Raises:
        ValueError: Pillow knows no such format.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"decoding this image needs Pillow: {HINT}") from error
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError(f"no image that Pillow knows: {len(data)} bytes, the first are {data[:8]!r}") from None


def rgb_picture(picture: Picture) -> Picture:
    """The image in Pillow's mode RGB.

    Raises:
        ValueError: its values have no range that could be told.
    """
    mode = picture.mode
    if mode.startswith("I;16"):
        from PIL import Image

        high = (np.asarray(picture) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if mode in ("I", "F"):
        raise ValueError(f"an image of mode {mode!r}, 32 bits without a range; convert it to 8 bits beforehand")
    if mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def orientation(data: bytes) -> int:
    """The EXIF orientation, 1 to 8; 1 if there is none."""
    if b"Exif" not in data[:65536] and b"eXIf" not in data:
        return 1
    found = open_picture(data).getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


def checked(read: Callable[[], T]) -> T:
    """What `read` gives; whatever a library raises about a file is a ValueError."""
    try:
        return read()
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Pillow has OSError, SyntaxError, struct.error, its own; OpenCV cv2.error
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _all_of(image: Opened, reduction: int, needed: Box) -> Part:
    """The part of those whose library decodes an image whole or not at all."""
    return Part(image.pixels(reduction), (0, 0))


class _Jpeg:
    """A JPEG that simplejpeg decodes."""

    part = _all_of
    reductions: tuple[int, ...] = (8, 4, 2, 1)

    def __init__(self, data: bytes, height: int, width: int, *, is_strict: bool, is_fast: bool) -> None:
        self._data, self.height, self.width = data, height, width
        self._is_strict, self._is_fast = is_strict, is_fast

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import simplejpeg
        except ImportError as error:
            raise ImportError(f"decoder='simplejpeg' needs simplejpeg: {HINT}") from error
        height, width = -(-self.height // reduction), -(-self.width // reduction)
        if into is None:
            into = scratch(height, width)
        if not self._is_strict:
            into.fill(0)  # where it gives up it says nothing, and leaves what was in the memory: an image before
        found: Pixels = simplejpeg.decode_jpeg(
            self._data,
            "RGB",
            fastdct=self._is_fast,
            fastupsample=self._is_fast,
            min_height=height if reduction > 1 else 0,
            min_width=width if reduction > 1 else 0,
            buffer=into,
            strict=self._is_strict,
        )
        if found.shape != into.shape:
            raise ValueError(f"a JPEG decoded to {found.shape[:2]}, where its header makes it {into.shape[:2]}")
        return into


class _Pillow:
    """An image that Pillow decodes."""

    part = _all_of

    def __init__(self, picture: Picture, max_pixels: int) -> None:
        self._picture = picture
        self.width, self.height = picture.size
        self.reductions: tuple[int, ...] = (8, 4, 2, 1) if picture.format == "JPEG" else (1,)
        _check_size(self.height, self.width, max_pixels)

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        if reduction > 1:
            self._picture.draft(None, (self.width // reduction, self.height // reduction))
        found = np.asarray(rgb_picture(self._picture))
        return _given(found, -(-self.height // reduction), -(-self.width // reduction), into)


class _OpenCv:
    """An image that OpenCV decodes."""

    part = _all_of

    reductions: tuple[int, ...] = (1,)

    def __init__(self, data: bytes, height: int, width: int) -> None:
        self._data, self.height, self.width = data, height, width

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import cv2
        except ImportError as error:
            raise ImportError(f"decoder='opencv' needs OpenCV: {HINT}") from error
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        found: Any = cv2.imdecode(np.frombuffer(self._data, np.uint8), flags)
        if found is None:
            raise ValueError(f"no image that OpenCV could decode: {len(self._data)} bytes")
        return _given(found, self.height, self.width, into)


def _given(found: Pixels, height: int, width: int, into: Pixels | None) -> Pixels:
    if found.shape != (height, width, 3):
        raise ValueError(f"an image decoded to {found.shape}, where its header makes it {(height, width, 3)}")
    if into is None:
        return np.ascontiguousarray(found)
    into[...] = found
    return into
