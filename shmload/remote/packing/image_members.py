"""Encode images as members of a tar file.

An image that is certainly unchanged keeps the bytes of its file; otherwise it is encoded without loss:

| image | becomes |
|---|---|
| Pillow image, unchanged since it was opened from a file | the file's bytes |
| Pillow image, mode 1, L, LA, P, RGB, RGBA, I;16 | PNG |
| Pillow image, mode CMYK, F, I, LAB, YCbCr | TIFF, which supports these modes |
| array or tensor, uint8, one, three or four channels | PNG |
| array or tensor, uint16, one channel | PNG of 16 bits |
| array or tensor, floats that are all k / 255, in all images of the dataset | PNG: the picture that ToTensor converted |
| any other array or tensor | .npy |

An array with three dimensions is (height, width, channels) if its last extent is 1, 3 or 4, otherwise channels first. A tensor is
channels first if its first extent is 1, 3 or 4, otherwise channels last. Where both are possible, this is the convention of the
library.

If a quality is given, images in mode L or RGB that would become 8-bit PNG become JPEG instead. This loses information, so it is
never the default.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmload.batch.collate import is_tensor
from shmload.formats.tar.encoders import encode
from shmload.remote.packing.image_signatures import PEEK, image_extension, is_format

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FloatImages = Literal["png", "npy"] | None  # how a dataset stores its images of floats; None decides for each image
PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
TIFF_MODES = frozenset({"CMYK", "F", "I", "LAB", "YCbCr"})
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
_COMPRESSION = 6  # zlib's default, given explicitly, so that another default of a library changes no byte


class NotPixelsError(ValueError):
    """An image of floats that is not a PNG's, in a dataset that stores images of floats as PNG."""


def picture_member(picture: Picture, quality: int | None) -> tuple[str, bytes]:
    """Return (extension, bytes) of a Pillow image; `quality` is as for `members_of`.

    Raises:
        ValueError: no format supports its mode.
    """
    if (data := file_of_picture(picture)) is not None:
        return image_extension(data[:PEEK]), data
    if picture.mode in TIFF_MODES:
        return "tif", _saved(picture, "TIFF")
    if picture.mode not in PNG_MODES:
        kept = ", ".join(sorted(PNG_MODES | TIFF_MODES))
        raise ValueError(
            f"an image of mode {picture.mode} cannot be stored, only one of {kept}: return image.convert('RGB'), for example"
        )
    return _picture_encoded(picture, quality)


def array_member(
    array: NDArray[Any], quality: int | None, *, is_tensor: bool, float_images: FloatImages = None
) -> tuple[str, bytes]:
    """Return (extension, bytes) of an image given as an array. Whether it was a tensor decides the order of axes.

    Raises:
        NotPixelsError: `float_images` is "png", and the image is of floats that are not all k / 255.
    """
    straight = _height_width_channels(array, is_tensor=is_tensor)
    is_float = straight is not None and array.dtype in (np.float32, np.float64)
    pixels = None if straight is None or (is_float and float_images == "npy") else _pixels(straight)
    if pixels is None:
        if is_float and float_images == "png":
            raise NotPixelsError(
                f"field 'image': this image of {array.dtype} has values that are not k / 255, but the images of the samples that "
                "were read first are stored as pictures (png), and a dataset stores its images in one format. Give every sample as "
                "a dict with {'image.npy': array} to store arrays, or as uint8 to store pictures"
            )
        return "npy", encode("npy", array)
    from PIL import Image

    return _picture_encoded(Image.fromarray(pixels), quality)


def _picture_encoded(picture: Picture, quality: int | None) -> tuple[str, bytes]:
    if quality is not None and picture.mode in ("L", "RGB"):
        return "jpg", _saved(picture, "JPEG", quality=quality)
    return "png", _saved(picture, "PNG", compress_level=_COMPRESSION)


def _height_width_channels(array: NDArray[Any], *, is_tensor: bool) -> NDArray[Any] | None:
    """Return the image with channels last, or without that dimension if it has one channel; None if it is not an image."""
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
    """Return the image as PNG can store it without loss: uint8, or uint16 with one channel; None if that is not possible."""
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


def file_of_picture(picture: Picture) -> bytes | None:
    """Return the bytes of the file that an image was opened from, if the image is certainly unchanged.

    Operations return an image without a format. But in-place operations (paste, putpixel, thumbnail, seek) keep the information
    about the file. The file is therefore opened again and compared: by size and mode if the image has not been loaded yet,
    otherwise by its pixels.
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
    except (OSError, ValueError, SyntaxError):  # encode the image if the file cannot be read again
        return None


def _read_of(picture: Any) -> bytes | None:
    filename = getattr(picture, "filename", "")
    if isinstance(filename, (str, bytes)) and filename:
        return Path(os.fsdecode(filename)).read_bytes()
    fp = getattr(picture, "fp", None)  # of bytes in memory; closed once the pixels are loaded
    return fp.getvalue() if isinstance(fp, io.BytesIO) else None


def named_image(extension: str, value: Any, quality: int | None) -> bytes:
    """Encode an image in the format of its name; a file that has this format is used unchanged."""
    if isinstance(value, (str, os.PathLike)):
        data = Path(value).read_bytes()
        if (found := image_extension(data[:PEEK])) and not is_format(found, extension):
            raise ValueError(f"{os.fspath(value)} is a file of {found}: end the name in that, or in nothing")
        return data
    if isinstance(value, np.ndarray) or is_tensor(value):
        was_tensor = is_tensor(value)
        array = array_of_tensor(value) if was_tensor else value
        straight = _height_width_channels(array, is_tensor=was_tensor)
        if straight is None:
            raise ValueError(f"an array of shape {array.shape} is not an image: it has 2 extents, or 3 of which one is 1, 3 or 4")
        from PIL import Image

        pixels = _pixels(straight)
        value = straight if pixels is None else Image.fromarray(pixels)
    file = file_of_picture(value) if hasattr(value, "getbands") else None
    if file is not None and is_format(image_extension(file[:PEEK]), extension):
        return file  # no second generation
    if quality is not None and extension in ("jpg", "jpeg") and getattr(value, "mode", "") in ("L", "RGB"):
        return _saved(value, "JPEG", quality=quality)
    return encode(extension, value)


def array_of_tensor(tensor: Any) -> Any:
    """Return a tensor as an array.

    Raises:
        TypeError: numpy has no such dtype.
    """
    try:
        return tensor.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"a tensor of {tensor.dtype} has no numpy type: return tensor.float(), for example") from error
