"""Open an image file: parse its header, and choose the library that decodes it.

JPEGs are decoded with the libjpeg-turbo that Pillow uses, called directly so that a part of an image can be decoded (libjpeg.py).
If it is not available, they are decoded with simplejpeg (which contains a libjpeg-turbo of its own) or Pillow, which decode the
whole image to the same pixels. All other formats are decoded with Pillow. The format is recognized by the first bytes of a file,
not by its name.

libjpeg-turbo and simplejpeg report damage within a scan; Pillow does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload._core.jpeg import decode, is_remark
from shmload.formats.images.jpeg_header import JPEG, jpeg_header, jpeg_is_whole
from shmload.formats.images.libjpeg import HINT, unbound
from shmload.formats.images.opened_image import Box, OpenedImage, Part, Pixels, memory
from shmload.formats.images.pillow_image import PillowImage, open_picture, orientation_of
from shmload.formats.images.png_header import PNG, PngDamage, check_pixels, png_header

MAX_PIXELS = 89_478_485  # of an image, Pillow's limit: 256 MiB decoded
LIBRARIES = ("auto", "libjpeg", "simplejpeg", "pillow")
_BAD_PROFILE = "bad ICC marker"  # part of libjpeg-turbo's warning
T = TypeVar("T")


@dataclass
class _LibraryJpeg(OpenedImage):
    """A JPEG decoded by a library that does not report its orientation."""

    scan_at: int = 0

    def orientation(self) -> int:
        if all(self.data.find(sign, 0, self.scan_at) < 0 for sign in (b"Exif", b"tiff:Orientation")):
            return 1  # Pillow takes longer to open a file, and would not find an orientation either
        return orientation_of(open_picture(self.data))


class LibJpeg(_LibraryJpeg):
    """A JPEG of which Pillow's libjpeg-turbo decodes only the needed part."""

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        height, width = self.size(reduction)
        if into is None:
            into = memory(height * width * 3).reshape(height, width, 3)
        self._decode(into.reshape(-1), reduction, (0, 0, height, width))
        return into

    def part(self, reduction: int, needed: Box) -> Part:
        top, _, bottom, _ = needed
        into = memory((bottom - top) * self.size(reduction)[1] * 3)
        left, right = self._decode(into, reduction, needed)
        pixels = into[: (bottom - top) * (right - left) * 3].reshape(bottom - top, right - left, 3)
        return Part(pixels, (top, left))

    def _decode(self, into: NDArray[np.uint8], reduction: int, needed: Box) -> tuple[int, int]:
        if why := unbound():
            raise ImportError(f"decoder='libjpeg': {why}; {HINT}")
        whole = self.size(reduction)
        quality: dict[str, Any] = {"is_strict": self.is_strict, "is_fast": self.is_fast}
        first, end, num_passed_over = decode(self.data, into, whole, needed, reduction=reduction, **quality)
        self.is_irregular |= num_passed_over > 0
        return first, end


def open_image(data: bytes, library: str, max_pixels: int, *, is_strict: bool | None, is_fast: bool) -> OpenedImage:
    """Parse the header of an image file and choose the library that decodes it.

    Args:
        data: the file.
        library: one of `LIBRARIES`. Images that are not usual JPEGs are always decoded by Pillow.
        max_pixels: limit on height times width.
        is_strict, is_fast: `strict` and `fast` of `ImageDecoder`.
    Raises:
        ValueError: the file is empty, damaged, not an image, or larger than `max_pixels`.
        ImportError: no library for this format is installed.
    """
    if not data:
        raise ValueError("an empty file")
    if data.startswith(JPEG):
        header = jpeg_header(data, is_strict=is_strict)
        _check_size(header.height, header.width, max_pixels)
        given: dict[str, Any] = {"is_strict": is_strict, "is_fast": is_fast, "is_irregular": header.has_junk}
        is_lossless = header.is_lossless
        is_usual = header.num_components in (1, 3) and not is_lossless  # only Pillow converts other images to RGB
        chosen = _jpeg_library(library) if is_usual else "pillow"
        if is_strict is not False and not jpeg_is_whole(data, header):
            raise ValueError(f"a JPEG cut off: {len(data)} bytes without an end marker")
        if chosen != "pillow":
            opened = SimpleJpeg if chosen == "simplejpeg" else LibJpeg
            return opened(data, header.height, header.width, scan_at=header.scan_at, **given)
    else:
        given, is_lossless = {"is_strict": is_strict, "is_fast": is_fast}, False
        if data.startswith(PNG):
            try:
                _check_size(*png_header(data), max_pixels)
            except PngDamage:
                if is_strict:
                    raise
                check_pixels(data)
                given["is_irregular"] = True
    picture = open_picture(data)
    width, height = picture.size
    _check_size(height, width, max_pixels)
    reductions = (8, 4, 2, 1) if picture.format == "JPEG" and not is_lossless else (1,)
    return PillowImage(data, height, width, reductions=reductions, picture=picture, is_lossless=is_lossless, **given)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(
            f"{height} x {width} pixels are more than max_pixels={max_pixels}; raise max_pixels if the file is correct"
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


def checked(read: Callable[[], T]) -> T:
    """Return `read()`. Any error that a library raises about a file becomes a ValueError."""
    try:
        return read()
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and errors of its own
        raise ValueError(f"{type(error).__name__}: {error}") from error


class SimpleJpeg(_LibraryJpeg):
    """A JPEG that simplejpeg decodes."""

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        try:
            import simplejpeg
        except ImportError as error:
            raise ImportError(f"decoder='simplejpeg' needs simplejpeg: {HINT}") from error
        height, width = self.size(reduction)
        if into is None:
            into = memory(height * width * 3).reshape(height, width, 3)
        options: dict[str, Any] = {"buffer": into, "fastdct": self.is_fast, "fastupsample": self.is_fast}
        if reduction > 1:
            options |= {"min_height": height, "min_width": width}
        try:
            found: Pixels = simplejpeg.decode_jpeg(self.data, "RGB", strict=True, **options)
        except ValueError as error:
            is_of_profile = _BAD_PROFILE in str(error)  # the other libraries ignore the profile
            if not is_of_profile:
                if self.is_strict or (self.is_strict is None and not is_remark(str(error))):
                    raise
                self.is_irregular = True
            # simplejpeg raises this even without `strict`, and a later warning may report real damage
            if is_of_profile or is_remark(str(error)):
                library = "pillow" if unbound() else "libjpeg"
                other = open_image(self.data, library, self.height * self.width, is_strict=self.is_strict, is_fast=self.is_fast)
                found = other.pixels(reduction, into=into)
                self.is_irregular |= other.is_irregular
                return found
            into.fill(0)  # simplejpeg gives up silently and leaves the previous image in this memory
            found = simplejpeg.decode_jpeg(self.data, "RGB", strict=False, **options)
        if found.shape != into.shape:
            raise ValueError(f"a JPEG decoded to {found.shape[:2]}, where its header makes it {into.shape[:2]}")
        return into
