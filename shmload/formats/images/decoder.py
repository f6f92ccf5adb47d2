"""ImageDecoder: decode image files into rows of a batch, with crop, resize, flip and normalization.

An image is decoded in two steps:

1. A library decodes the pixels (open_image.py), and only those that the crop needs if it can. Large JPEGs are shrunk to a half, a
   quarter or an eighth while they are decoded, where that is accurate enough.
2. `_core.resample` crops, resizes, mirrors and normalizes these pixels and writes them to the row in the requested layout.
   Coordinates are always pixels of the whole image, so decoding only a part changes no byte of the result.

Random parameters are drawn from the sample's own generator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

import shmload
from shmload._core.resample import resample
from shmload.formats.images.crops import Crop, Size, Whole, Window, centered_slices, check_choices
from shmload.formats.images.encoded_bytes import Encoded, file_bytes
from shmload.formats.images.open_image import LIBRARIES, MAX_PIXELS, checked, open_image
from shmload.formats.images.opened_image import Box, OpenedImage, Part, Pixels
from shmload.formats.images.shared_choices import generator_for
from shmload.introspect.abilities import overrides
from shmload.metrics import irregular_files

Shape = tuple[int | None, ...]
Place = Callable[[tuple[int, ...]], NDArray[Any]]  # shape -> the array that the image is written to
_MARGIN = 2  # a shrunk crop is at least this many times as large as the result, so libjpeg and the triangle filter nearly agree
_LEAST_SHRUNK = 16  # least side of a shrunk image in pixels: for smaller ones, the library's rounding chooses another reduction
_STRAIGHT: dict[int, Callable[[Pixels], Pixels]] = {  # turns a stored image upright, by EXIF orientation
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels.swapaxes(0, 1)[:, ::-1],
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels.swapaxes(0, 1)[::-1],
}


@dataclass(frozen=True)
class ImageDecoder:
    """A decoder of image files: `decoder(data)` returns an array. Immutable: can be compared, pickled, and shared by threads.

    Random parameters are drawn from `sample_rng()`, and outside a ShmLoader from Python's `random`, which torch's DataLoader seeds.
    Decoders that a dataset applies to several fields of a sample make the same random choices if their crops and flips are equal,
    so that a mask stays aligned with its image.

    Args:
        crop: RandomResizedCrop, CenterCrop, Resize or your own Crop; None keeps the image as it is.
        flip: probability of mirroring the image, left to right.
        normalize: (mean, standard deviation), each three numbers on the scale from 0 to 1; the result is float32.
        layout: "CHW", as torch's layers expect it, or "HWC".
        dtype: "uint8", or "float32": from 0 to 1, or normalized. Default: float32 if normalized.
        decoder: "auto", "libjpeg" (Pillow's, which decodes only what the crop needs), "simplejpeg" or "pillow".
        scaled: let the JPEG decoder shrink large images to a half, a quarter or an eighth, as long as the crop stays twice as large
            as the result: mean deviation below 2 levels of 255. Otherwise, and for smaller images, each level differs from that of
            Pillow's BILINEAR by at most one.
        fast: use the fast DCT and chroma upsampling, which take a tenth less time: mean deviation 1 to 2 levels.
        upright: turn images according to their EXIF or XMP orientation, in every format, as Pillow's `ImageOps.exif_transpose`
            does; otherwise they stay as stored, as in torchvision.
        strict: how to treat invalid files. None (default) accepts a file that violates its format if Pillow reads it and its
            picture is complete (bytes between the segments of a JPEG, a PNG without its end), and counts it in
            `stats()["num_irregular"]`; it rejects JPEG files that are damaged or truncated, as far as the library can tell. True
            rejects all of these. False also reads damaged JPEG files; the library invents the missing pixels. Damage below the
            crop, and next to it in a file with restart markers, is not noticed because it is not read.
        max_pixels: largest size of an image; a larger one is rejected before any memory is allocated.
    Raises:
        TypeError: `crop` is not a Crop.
        ValueError: an option is invalid; (when called) a file is not a valid image.
    Thread/process safety: any number of callers.
    Example:
        >>> from shmload.formats import ImageDecoder, RandomResizedCrop
        >>> ImageDecoder(RandomResizedCrop(224), flip=0.5, layout="HWC").spec
        ('uint8', (224, 224, 3))
    """

    shares_choices: ClassVar[bool] = True

    crop: Crop | None = None
    flip: float = 0.0
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    layout: Literal["CHW", "HWC"] = "CHW"
    dtype: Literal["uint8", "float32"] | None = None
    decoder: Literal["auto", "libjpeg", "simplejpeg", "pillow"] = "auto"
    scaled: bool = True
    fast: bool = False
    upright: bool = False
    strict: bool | None = None
    max_pixels: int = MAX_PIXELS
    _crop: Crop = field(init=False, repr=False, compare=False)
    _levels: NDArray[np.float32] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choices(self.crop, self.flip)
        for name, choices in (("layout", ("CHW", "HWC")), ("dtype", (None, "uint8", "float32")), ("decoder", LIBRARIES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} needs to be one of {choices}; got {getattr(self, name)!r}")
        if self.normalize is not None and self.dtype == "uint8":
            raise ValueError("normalize makes float32; leave out dtype, or pass dtype='float32'")
        object.__setattr__(self, "_crop", self.crop or Whole())
        object.__setattr__(self, "_levels", self._table())

    @property
    def spec(self) -> tuple[str, Shape]:
        """Return type and shape of the result, as in a schema: ("uint8", (3, 224, 224)). None depends on the image."""
        height, width = self._crop.shape
        shape = (3, height, width) if self.layout == "CHW" else (height, width, 3)
        return "uint8" if self._levels is None else "float32", shape

    def __call__(self, data: Encoded) -> NDArray[Any]:
        """Return the decoded image as a new array of the shape and dtype that `spec` describes. `data` is as for `decode`."""
        return self.decode(data, lambda shape: np.empty(shape, self.spec[0]))

    def decode(self, data: Encoded, place: Place) -> NDArray[Any]:
        """Decode an image file into the array that `place` returns. It is called once the header is valid and the shape is known.

        Args:
            data: an encoded image: bytes, another buffer of them, or a dict that has them as "bytes", as Hugging Face's
                `datasets.Image` stores pictures.
            place: shape -> a writable array of that shape and of the dtype that `spec` describes.
        Returns:
            The array that `place` returned.
        Raises:
            ValueError: the file is not a valid image, or `data` is not a file.
            ImportError: no library for this format is installed.
        """
        content = file_bytes(data)
        image = checked(lambda: open_image(content, self.decoder, self.max_pixels, is_strict=self.strict, is_fast=self.fast))
        out = self._decoded(image, place)
        if image.is_irregular:
            irregular_files.add()
        return out

    def _decoded(self, image: OpenedImage, place: Place) -> NDArray[Any]:
        turned = checked(image.orientation) if self.upright else 1
        stored = (image.height, image.width)
        height, width = stored if turned < 5 else stored[::-1]
        rng = generator_for((self._crop, self.flip), generator)
        window = self._crop.window(height, width, rng)
        is_flipped = self.flip > 0 and rng.random() < self.flip
        size = tuple(side or n for side, n in zip(self._crop.shape, window.size, strict=True))
        out = place((3, *size) if self.layout == "CHW" else (*size, 3))
        middle = out if size == window.size else self._middle(out, window.size, is_flipped=is_flipped)
        is_all = window.size == stored and window.box == (0.0, 0.0, *map(float, stored))
        is_plain = self.layout == "HWC" and self._levels is None and turned == 1 and not is_flipped
        if is_all and is_plain and middle.flags.c_contiguous:  # the decoded pixels are the result
            checked(lambda: image.pixels(1, into=middle))
            return out
        room = min(window.box[2] / window.size[0], window.box[3] / window.size[1]) / _MARGIN
        room = min(room, image.height / _LEAST_SHRUNK, image.width / _LEAST_SHRUNK)
        reduction = next((n for n in image.reductions if n <= room), 1) if self.scaled else 1
        whole = -(-height // reduction), -(-width // reduction)
        window = _shrunk(window, reduction, whole)
        if turned > 1:
            part = Part(np.ascontiguousarray(_STRAIGHT[turned](checked(lambda: image.pixels(reduction)))), (0, 0))
        else:
            part = checked(lambda: image.part(reduction, _needed(window)))
        self._resample(part, whole, middle, window, is_flipped=is_flipped)
        return out

    def _middle(self, out: NDArray[Any], size: tuple[int, int], *, is_flipped: bool) -> NDArray[Any]:
        """Fill the result with black. Return a view of the part of it that a window of this smaller `size` fills."""
        height, width = out.shape[1:] if self.layout == "CHW" else out.shape[:2]
        rows, columns = centered_slices((height, width), size, is_flipped=is_flipped)
        black = np.zeros(3, out.dtype) if self._levels is None else self._levels[:, 0]
        out[...] = black[:, None, None] if self.layout == "CHW" else black
        return out[:, rows, columns] if self.layout == "CHW" else out[rows, columns]

    def _resample(self, part: Part, whole: Size, out: NDArray[Any], window: Window, *, is_flipped: bool) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        resample(
            part.pixels,
            target,
            *window,
            origin=part.origin,
            whole=whole,
            is_flipped=is_flipped,
            is_planar=self.layout == "CHW",
            levels=self._levels,
        )
        if target is not out:
            out[...] = target

    def _table(self) -> NDArray[np.float32] | None:
        """Return the output value of each level of each channel, shape (3, 256); None if the result is uint8."""
        if self.normalize is None and self.dtype != "float32":
            return None
        mean, deviation = ((0,) * 3, (1,) * 3) if self.normalize is None else self.normalize
        if len(mean) != 3 or len(deviation) != 3 or not all(each > 0 for each in deviation):
            raise ValueError(f"normalize needs three means and three standard deviations above 0; got {self.normalize}")
        return levels_of(mean, deviation)


def decodes_in_place(decoder: Any) -> TypeGuard[ImageDecoder]:
    """Return whether `decoder.decode` writes what a call returns: for an ImageDecoder, unless a subclass overrides `__call__`."""
    return isinstance(decoder, ImageDecoder) and not overrides(decoder, ("__call__",), ("decode",))


def levels_of(mean: Sequence[float], deviation: Sequence[float]) -> NDArray[np.float32]:
    """Return the normalized value of each of the 256 levels, by torchvision's arithmetic: float32, shape (channels, 256).

    `mean` and `deviation` have one number per channel, on the scale from 0 to 1.
    """
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    return (levels - np.array(mean, np.float32)[:, None]) / np.array(deviation, np.float32)[:, None]


def generator() -> np.random.Generator:
    """Return the sample's own generator; outside a ShmLoader, one seeded from `random`."""
    try:
        return shmload.sample_rng()
    except RuntimeError:
        return np.random.default_rng(random.getrandbits(128))


def _shrunk(window: Window, reduction: int, whole: Size) -> Window:
    """Scale a window to an image shrunk by the factor `reduction`, whose (height, width) is `whole`."""
    if reduction == 1:
        return window
    top, left, box_height, box_width = (each / reduction for each in window.box)
    clip = (
        window.clip[0] // reduction,
        window.clip[1] // reduction,
        min(whole[0], -(-window.clip[2] // reduction)),
        min(whole[1], -(-window.clip[3] // reduction)),
    )
    return Window(window.size, (top, left, box_height, box_width), clip)


def _needed(window: Window) -> Box:
    """Return the pixels that resampling a window reads: its box and half a triangle filter around it, within its clip."""
    found = []
    for axis in (0, 1):
        start, length, low, high = window.box[axis], window.box[axis + 2], window.clip[axis], window.clip[axis + 2]
        radius = max(1.0, length / window.size[axis])
        found.append((max(low, math.floor(start - radius)), min(high, math.ceil(start + length + radius))))
    return found[0][0], found[1][0], found[0][1], found[1][1]
