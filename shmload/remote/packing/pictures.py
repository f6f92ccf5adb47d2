"""An image as the bytes of a file: those it came from where it is surely unchanged, else encoded without loss.

| image | becomes |
|---|---|
| Pillow's, not changed since it was opened from a file | the file's bytes |
| Pillow's, mode 1, L, LA, P, RGB, RGBA, I;16 | PNG |
| Pillow's, mode CMYK, F, I, LAB, YCbCr | TIFF, which keeps them |
| array or tensor, uint8, one, three or four channels | PNG |
| the same of uint16, one channel | PNG of 16 bits |
| the same of floats that are all k / 255 | PNG: what ToTensor made of a picture |
| any other array or tensor | .npy |

With three dimensions, an array is height, width, channels if its last extent is 1, 3 or 4, else channels first; a tensor is
channels first if its first extent is 1, 3 or 4, else channels last: each as its library has it where both could be meant.

With a quality, what would have been PNG of 8 bits in L or RGB is JPEG instead. That is a loss, so nothing does it unasked.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmload.formats.tar.encoders import encode
from shmload.remote.packing.kinds import PEEK, image_extension

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
TIFF_MODES = frozenset({"CMYK", "F", "I", "LAB", "YCbCr"})
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
_COMPRESSION = 6  # zlib's own default, named so that a library's other default changes no byte


def picture_member(picture: Picture, quality: int | None) -> tuple[str, bytes]:
    """(extension, bytes) of an image of Pillow's.

    Raises:
        ValueError: no format keeps its mode.
    """
    if (data := _file_of(picture)) is not None:
        return image_extension(data[:PEEK]), data
    if picture.mode in TIFF_MODES:
        return "tif", _saved(picture, "TIFF")
    if picture.mode not in PNG_MODES:
        kept = ", ".join(sorted(PNG_MODES | TIFF_MODES))
        raise ValueError(
            f"an image of mode {picture.mode} is kept by no format; those of {kept} are: return image.convert('RGB'), say"
        )
    if quality is not None and picture.mode in ("L", "RGB"):
        return "jpg", _saved(picture, "JPEG", quality=quality)
    return "png", _saved(picture, "PNG", compress_level=_COMPRESSION)


def array_member(array: NDArray[Any], quality: int | None, *, is_tensor: bool) -> tuple[str, bytes]:
    """(extension, bytes) of an image that is an array or was a tensor."""
    straight = _height_width_channels(array, is_tensor=is_tensor)
    pixels = None if straight is None else _pixels(straight)
    if pixels is None:
        return "npy", encode("npy", array)
    from PIL import Image

    if pixels.dtype == np.uint16:
        return "png", _saved(Image.fromarray(pixels), "PNG", compress_level=_COMPRESSION)
    picture = Image.fromarray(pixels)
    if quality is not None and picture.mode in ("L", "RGB"):
        return "jpg", _saved(picture, "JPEG", quality=quality)
    return "png", _saved(picture, "PNG", compress_level=_COMPRESSION)


def _height_width_channels(array: NDArray[Any], *, is_tensor: bool) -> NDArray[Any] | None:
    """The image with its channels last, or without if it has one; None if it is no image."""
    if 0 in array.shape or array.ndim not in (2, 3):
        return None
    if array.ndim == 2:
        return array
    first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
    if first and (is_tensor or not last):
        array = array.transpose(1, 2, 0)
    elif not last:
        return None
    return array[:, :, 0] if array.shape[2] == 1 else array


def _pixels(array: NDArray[Any]) -> NDArray[Any] | None:
    """What PNG keeps of it: uint8, or uint16 of one channel; None if that is not all of it."""
    if array.dtype == np.uint8 or (array.dtype == np.uint16 and array.ndim == 2):
        return np.ascontiguousarray(array)
    if array.dtype not in (np.float32, np.float64):
        return None
    if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
        return None
    levels = np.rint(array * 255).astype(np.uint8)
    again = levels.astype(array.dtype) / array.dtype.type(255)
    return np.ascontiguousarray(levels) if np.array_equal(again, array) else None


def _saved(picture: Picture, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format=format, **options)
    return file.getvalue()


def _file_of(picture: Picture) -> bytes | None:
    """The bytes of the file that an image was opened from, if it is surely the same still.

    An operation makes an image that knows no format, but one in place (paste, putpixel, thumbnail, seek) leaves what the image
    says of its file. So one that has not been read yet is compared by size and mode with the file opened anew, and one that has
    by its pixels.
    """
    from PIL import Image, ImageFile

    if not isinstance(picture, ImageFile.ImageFile) or not picture.format or picture.tell():
        return None
    try:
        data = _read_of(picture)
        if data is None or not image_extension(data[:PEEK]):
            return None
        with Image.open(io.BytesIO(data)) as again:
            if (again.format, again.size, again.mode) != (picture.format, picture.size, picture.mode):
                return None
            if getattr(picture, "_im", None) is None and picture.tile:
                return data if again.tile == picture.tile else None
            is_same = again.tobytes() == picture.tobytes() and again.getpalette() == picture.getpalette()
            return data if is_same else None
    except (OSError, ValueError, SyntaxError):  # what cannot be read again is encoded as it is
        return None


def _read_of(picture: Any) -> bytes | None:
    filename = getattr(picture, "filename", "")
    if isinstance(filename, (str, bytes)) and filename:
        with open(filename, "rb") as file:
            return file.read()
    fp = getattr(picture, "fp", None)  # of bytes in memory; closed once the pixels are read
    if fp is None or not isinstance(fp, io.BytesIO):
        return None
    return fp.getvalue()
