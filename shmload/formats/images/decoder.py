"""ImageDecoder: from the bytes of an image file to a row of a batch, in two passes over the pixels.

The library decodes, at a half, a quarter or an eighth where that is exact enough, and if it can only what the window needs;
`_core.resample` takes the window out of that and resizes, mirrors, normalises and lays it out where it is delivered. It reckons in
pixels of the whole image either way, so that what was left out changes no byte. Parameters are drawn from the sample's own
generator.

Which part of an image becomes the result, and of what size: torchvision's crops as windows.

A window says everything that resampling needs to know, in pixels of the image as it is stored. A crop that torchvision makes in two
steps (resize, then cut) is one window here: no pixel is computed that is not wanted.

Source: torchvision.transforms v1, RandomResizedCrop.get_params, Resize, CenterCrop; after C. Szegedy et al., Going deeper with
convolutions, 2015.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import shmload
from shmload._core.resample import resample
from shmload.formats.images.libraries import LIBRARIES, Box, Opened, Part, Pixels, checked, open_image, orientation

Size = tuple[int, int]
_ATTEMPTS = 10


class Window(NamedTuple):
    """`box` (top, left, height, width), resampled to `size`; pixels outside `clip` (top, left, bottom, right) do not count."""

    size: Size
    box: tuple[float, float, float, float]
    clip: tuple[int, int, int, int]


class Crop(Protocol):
    """What chooses a window of an image: what a crop of one's own has, a value that can be pickled."""

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(height, width) of every result; None where it depends on the image."""

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The window of an image. Where it is smaller than `shape`, the result has black around it (`middle_of`).

        Args:
            height, width: of the image, in pixels.
            rng: the sample's generator.
        Returns:
            `Window(size, box, clip)`: the box (top, left, height, width) of the image is resampled to the size (height, width);
            pixels outside the clip (top, left, bottom, right) do not count.
        """


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of the image, of random area and aspect, resized: torchvision's definition and distribution.

    The part is cut out before it is resized, as there: what lies beside it leaves no trace.

    Args:
        size: of the result, (height, width) or one number for both.
        scale: share of the image's area, least and most.
        ratio: width over height, least and most; drawn evenly in its logarithm.
    Raises:
        ValueError: a number is outside its bounds.
    """

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _pair(self.size, "RandomResizedCrop")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"RandomResizedCrop: scale needs 0 < least <= most <= 1; got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"RandomResizedCrop: ratio needs 0 < least <= most; got {self.ratio}")

    @property
    def shape(self) -> Size:
        """(height, width) of every result."""
        return _pair(self.size, "RandomResizedCrop")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The part of an image of this `height` and `width` that becomes the result, drawn from `rng`."""
        top, left, box_height, box_width = self._box(height, width, rng)
        clip = (top, left, top + box_height, left + box_width)
        return Window(self.shape, (float(top), float(left), float(box_height), float(box_width)), clip)

    def _box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        least, most = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = height * width * _between(*self.scale, rng)
            aspect = math.exp(_between(least, most, rng))
            box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(_between(0, height - box_height + 1, rng))
                return top, int(_between(0, width - box_width + 1, rng)), box_height, box_width
        box_height, box_width = height, width
        if width / height < self.ratio[0]:
            box_height = max(1, min(height, round(width / self.ratio[0])))
        elif width / height > self.ratio[1]:
            box_width = max(1, min(width, round(height * self.ratio[1])))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


@dataclass(frozen=True)
class Resize:
    """The whole image, resized.

    Args:
        size: (height, width), whatever that does to the aspect; or the length of the shorter side, with the aspect kept, so that
            results differ in shape.
    Raises:
        ValueError: a number is outside its bounds.
    """

    size: int | Sequence[int]

    def __post_init__(self) -> None:
        _pair(self.size, "Resize")

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """(height, width) of every result; None where it depends on the image."""
        return (None, None) if isinstance(self.size, int) else _pair(self.size, "Resize")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The part of an image of this `height` and `width` that becomes the result, which is all of it; `rng` is not asked."""
        size = _shorter(self.size, height, width) if isinstance(self.size, int) else _pair(self.size, "Resize")
        return Window(size, (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


@dataclass(frozen=True)
class CenterCrop:
    """The middle of the image; black around one that is smaller, as torchvision pads it.

    Args:
        size: of the result, (height, width) or one number for both.
        resize: first resize the whole image so that its shorter side is this long: the usual 256 for a size of 224.
    Raises:
        ValueError: a number is outside its bounds.
    """

    size: int | Sequence[int]
    resize: int | None = None

    def __post_init__(self) -> None:
        size = _pair(self.size, "CenterCrop")
        if self.resize is not None and self.resize < max(size):
            raise ValueError(
                f"CenterCrop: resize is the shorter side and needs to be at least size; got {self.resize} for {size}"
            )

    @property
    def shape(self) -> Size:
        """(height, width) of every result."""
        return _pair(self.size, "CenterCrop")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """The part of an image of this `height` and `width` that becomes the result; `rng` is not asked."""
        size = self.shape
        resized = (height, width) if self.resize is None else _shorter(self.resize, height, width)
        size = min(size[0], resized[0]), min(size[1], resized[1])
        top, left = round((resized[0] - size[0]) / 2), round((resized[1] - size[1]) / 2)
        down, along = height / resized[0], width / resized[1]
        box = (top * down, left * along, size[0] * down, size[1] * along)
        return Window(size, box, (0, 0, height, width))


@dataclass(frozen=True)
class Whole:
    """The image as it is."""

    shape: tuple[None, None] = (None, None)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        return Window((height, width), (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


def middle_of(shape: Size, size: Size, *, is_flipped: bool) -> tuple[slice, slice]:
    """The rows and columns of a result of `shape` that a window of a smaller `size` fills.

    An odd pixel is one more below and at the right, or at the left of a mirror image, which is turned as a whole.
    """
    top, left = (shape[0] - size[0]) // 2, (shape[1] - size[1] + is_flipped) // 2
    return slice(top, top + size[0]), slice(left, left + size[1])


def _between(least: float, most: float, rng: np.random.Generator) -> float:
    """A number from [least, most). `rng.uniform` and `rng.integers` draw the same in twenty times the time."""
    return least + (most - least) * rng.random()


def _pair(size: int | Sequence[int], name: str) -> Size:
    """(height, width)."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name}: size needs one or two whole numbers of pixels, at least 1; got {size!r}")
    return sides[0], sides[1]


def _shorter(side: int, height: int, width: int) -> Size:
    """Height and width of an image whose shorter side becomes `side`, rounded down as torchvision does."""
    if width <= height:
        return int(side * height / width), side
    return side, int(side * width / height)


Shape = tuple[int | None, ...]
Place = Callable[[tuple[int, ...]], NDArray[Any]]  # shape -> where the image is to be written
MAX_PIXELS = 89_478_485  # of an image, as Pillow has it: 256 MiB decoded
_MARGIN = 2  # times the result that a shrunk image is: libjpeg's shrinking and the triangle then all but agree
_LEAST_SHRUNK = 16  # pixels of a side: below, the library's rounding would choose another reduction
_STRAIGHT: dict[int, Callable[[Pixels], Pixels]] = {  # how a stored image is turned, by EXIF orientation
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
    """What becomes of an encoded image: `decoder(data)` is its array. A value: it can be compared, pickled, shared by threads.

    Random parameters come from `sample_rng()`; outside a ShmLoader from Python's `random`, which torch's DataLoader seeds.

    Args:
        crop: RandomResizedCrop, CenterCrop, Resize or one's own; None: the image as it is.
        flip: probability of a mirror image, left to right.
        normalise: (mean, standard deviation), each three numbers on the scale from 0 to 1; makes float32.
        layout: "CHW", as torch's layers want it, or "HWC".
        dtype: "uint8", or "float32": from 0 to 1, or normalised. Default: float32 if normalised.
        decoder: "auto", "libjpeg" (Pillow's, which decodes only what the crop needs), "simplejpeg", "pillow" or "opencv".
        scaled: let the JPEG decoder shrink large images to a half, a quarter or an eighth, as long as the crop stays twice as large
            as the result: mean deviation below 2 levels of 255. Without it, and for smaller images, no level is further than one
            from that of Pillow's BILINEAR.
        fast: decode with the fast DCT and chroma upsampling: a tenth quicker, mean deviation 1 to 2 levels.
        upright: turn images as their EXIF orientation says; else they stay as stored, as torchvision leaves them.
        strict: refuse JPEG files that are damaged or cut off, as far as the library can tell; what lies below the crop, of a file
            with restart markers what lies beside it, is not read, so damage there goes unnoticed.
        max_pixels: of an image; a larger one is refused before any memory is taken.
    Raises:
        ValueError: an option is none of these; (by a call) a file is no sound image.
    Thread/process safety: any number of callers.
    Example:
        >>> from shmload.formats import ImageDecoder, RandomResizedCrop
        >>> ImageDecoder(RandomResizedCrop(224), flip=0.5, layout="HWC").spec
        ('uint8', (224, 224, 3))
    """

    crop: Crop | None = None
    flip: float = 0.0
    normalise: tuple[Sequence[float], Sequence[float]] | None = None
    layout: Literal["CHW", "HWC"] = "CHW"
    dtype: Literal["uint8", "float32"] | None = None
    decoder: Literal["auto", "libjpeg", "simplejpeg", "pillow", "opencv"] = "auto"
    scaled: bool = True
    fast: bool = False
    upright: bool = False
    strict: bool = True
    max_pixels: int = MAX_PIXELS
    _crop: Crop = field(init=False, repr=False, compare=False)
    _levels: NDArray[np.float32] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is a probability and needs to be 0 to 1; got {self.flip}")
        for name, choices in (
            ("layout", ("CHW", "HWC")),
            ("dtype", (None, "uint8", "float32")),
            ("decoder", LIBRARIES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} needs to be one of {choices}; got {getattr(self, name)!r}")
        if self.normalise is not None and self.dtype == "uint8":
            raise ValueError("normalise makes float32; leave dtype away or give dtype='float32'")
        object.__setattr__(self, "_crop", self.crop or Whole())
        object.__setattr__(self, "_levels", self._table())

    @property
    def spec(self) -> tuple[str, Shape]:
        """Type and shape of the result, as a schema has them: ("uint8", (3, 224, 224)). None: it depends on the image."""
        height, width = self._crop.shape
        shape = (3, height, width) if self.layout == "CHW" else (height, width, 3)
        return "uint8" if self._levels is None else "float32", shape

    def __call__(self, data: bytes) -> NDArray[Any]:
        """The image of a file, in memory of its own: shape and dtype as `spec` says."""
        return self.decode(data, lambda shape: np.empty(shape, self.spec[0]))

    def decode(self, data: bytes, place: Place) -> NDArray[Any]:
        """Writes the image of a file to where `place` says, which is asked once its shape is known and its header sound.

        Args:
            data: an encoded image.
            place: shape -> a writable array of that shape and of the dtype that `spec` says.
        Returns:
            what `place` gave.
        Raises:
            ValueError: the file is no sound image.
            ImportError: there is no library for it.
        """
        image = checked(
            lambda: open_image(data, self.decoder, self.max_pixels, is_strict=self.strict, is_fast=self.fast)
        )
        turned = checked(lambda: orientation(data)) if self.upright else 1
        stored = (image.height, image.width)
        height, width = stored if turned < 5 else stored[::-1]
        rng = generator()
        window = self._crop.window(height, width, rng)
        is_flipped = self.flip > 0 and rng.random() < self.flip
        size = tuple(side or n for side, n in zip(self._crop.shape, window.size, strict=True))
        out = place((3, *size) if self.layout == "CHW" else (*size, 3))
        middle = out if size == window.size else self._middle(out, window.size, is_flipped=is_flipped)
        if self._is_as_stored(window, stored) and turned == 1 and not is_flipped and middle.flags.c_contiguous:
            checked(lambda: image.pixels(1, into=middle))
            return out
        reduction = self._reduction(image, window)
        whole = -(-height // reduction), -(-width // reduction)
        window = _shrunk(window, reduction, whole)
        if turned > 1:
            part = Part(np.ascontiguousarray(_STRAIGHT[turned](checked(lambda: image.pixels(reduction)))), (0, 0))
        else:
            part = checked(lambda: image.part(reduction, _needed(window)))
        self._resample(part, whole, middle, window, is_flipped=is_flipped)
        return out

    def _middle(self, out: NDArray[Any], size: tuple[int, int], *, is_flipped: bool) -> NDArray[Any]:
        """The part of a result that a window smaller than the crop fills; all of it becomes black."""
        height, width = out.shape[1:] if self.layout == "CHW" else out.shape[:2]
        rows, columns = middle_of((height, width), size, is_flipped=is_flipped)
        black = np.zeros(3, out.dtype) if self._levels is None else self._levels[:, 0]
        out[...] = black[:, None, None] if self.layout == "CHW" else black
        return out[:, rows, columns] if self.layout == "CHW" else out[rows, columns]

    def _is_as_stored(self, window: Window, stored: tuple[int, int]) -> bool:
        """Whether the library's pixels are the result."""
        return (
            self.layout == "HWC"
            and self._levels is None
            and window.size == stored
            and window.box == (0.0, 0.0, *map(float, stored))
        )

    def _reduction(self, image: Opened, window: Window) -> int:
        if not self.scaled:
            return 1
        room = min(window.box[2] / window.size[0], window.box[3] / window.size[1]) / _MARGIN
        room = min(room, image.height / _LEAST_SHRUNK, image.width / _LEAST_SHRUNK)
        return next((reduction for reduction in image.reductions if reduction <= room), 1)

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
        """What each level of each channel becomes, by torchvision's own arithmetic. Shape (3, 256); None if they stay."""
        if self.normalise is None and self.dtype != "float32":
            return None
        levels = np.tile(np.arange(256, dtype=np.float32) / np.float32(255), (3, 1))
        if self.normalise is None:
            return levels
        mean, deviation = (np.array(each, np.float32) for each in self.normalise)
        if mean.shape != (3,) or deviation.shape != (3,) or not np.all(deviation > 0):
            raise ValueError(f"normalise needs three means and three standard deviations above 0; got {self.normalise}")
        return (levels - mean[:, None]) / deviation[:, None]


def generator() -> np.random.Generator:
    """The sample's own generator; outside a ShmLoader one drawn from `random`."""
    try:
        return shmload.sample_rng()
    except RuntimeError:
        return np.random.default_rng(random.getrandbits(128))


def _shrunk(window: Window, reduction: int, whole: Size) -> Window:
    """The same window of an image shrunk to a `reduction`-th, of (height, width) `whole`."""
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
    """The pixels within its clip that resampling a window looks at: those of its box, and half a triangle around."""
    found = []
    for axis in (0, 1):
        start, length, low, high = window.box[axis], window.box[axis + 2], window.clip[axis], window.clip[axis + 2]
        radius = max(1.0, length / window.size[axis])
        found.append((max(low, math.floor(start - radius)), min(high, math.ceil(start + length + radius))))
    return found[0][0], found[1][0], found[0][1], found[1][1]
