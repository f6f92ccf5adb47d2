"""Decode images with Pillow, and convert them to RGB.

Pillow would clip 16-bit images, so their high byte is used instead.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmload.formats.images.jpeg_header import OTHER_DECODERS
from shmload.formats.images.libjpeg import HINT
from shmload.formats.images.opened_image import OpenedImage, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def open_picture(data: bytes) -> Picture:
    """Open an image file with Pillow, without decoding it.

    Raises:
        ValueError: Pillow does not recognize the format.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"decoding this image needs Pillow: {HINT}") from error
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError(f"Pillow does not recognize this image: {len(data)} bytes, beginning with {data[:8]!r}") from None


def rgb_picture(picture: Picture) -> Picture:
    """Return the picture in Pillow's mode RGB.

    Raises:
        ValueError: the range of its values is unknown.
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


def orientation_of(picture: Picture) -> int:
    """Return the orientation that EXIF, or else XMP, contains according to Pillow: 1 to 8; 1 without one."""
    found = picture.getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


@dataclass
class PillowImage(OpenedImage):
    """An image that Pillow decodes."""

    picture: Any = None
    is_lossless: bool = False

    def orientation(self) -> int:
        if self.picture.format not in ("JPEG", "MPO"):  # JPEG has it in its header, and `draft` works only before loading
            self.picture.load()  # as `exif_transpose` does: a TIFF is turned by that, and a PNG may have its EXIF at the end
        return orientation_of(self.picture)

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        if reduction > 1:
            self.picture.draft(None, (self.width // reduction, self.height // reduction))
        try:
            found = np.asarray(rgb_picture(self.picture))
        except OSError as error:
            if not self.is_lossless:
                raise
            raise ValueError(f"a lossless JPEG, which this Pillow does not decode ({error}). {OTHER_DECODERS}") from error
        if found.shape != (*self.size(reduction), 3):
            raise ValueError(f"an image decoded to {found.shape}, where its header makes it {(*self.size(reduction), 3)}")
        if into is None:
            return np.ascontiguousarray(found)
        into[...] = found
        return into
