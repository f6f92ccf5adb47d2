"""Crops: the part of an image that becomes the row, and its size there.

Crops follow torchvision. A `Window` describes a crop in pixels of the stored image. Where torchvision resizes and then crops,
one window describes both steps, so only the requested pixels are computed.

Sources: torchvision.transforms v1, RandomResizedCrop.get_params, Resize, CenterCrop; C. Szegedy et al., Going deeper with
convolutions, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Size = tuple[int, int]
_ATTEMPTS = 10  # random parts to draw before the middle of the image is taken, as in torchvision


class Window(NamedTuple):
    """A crop: `box` (top, left, height, width) is resampled to `size`, without pixels outside `clip` (top, left, bottom, right)."""

    size: Size
    box: tuple[float, float, float, float]
    clip: tuple[int, int, int, int]


class Crop(Protocol):
    """The protocol of crops, which choose a window of an image. Your own crop must be picklable."""

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Return height and width of every result; None if they depend on the image."""

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return the window of an image. If it is smaller than `shape`, the result is padded with black (`centered_slices`).

        Args:
            height, width: size of the image in pixels.
            rng: the sample's generator.
        Returns:
            `Window(size, box, clip)`: the box (top, left, height, width) of the image is resampled to the size (height, width);
            pixels outside the clip (top, left, bottom, right) are ignored.
        """


def is_crop(value: Any) -> bool:
    """Return whether a value has the methods of a crop."""
    return callable(getattr(value, "window", None)) and hasattr(value, "shape") and not isinstance(value, type)


def check_decoder(name: str, decoder: Any) -> None:
    """Raise TypeError unless a decoder can be called; `name` is that of the argument."""
    if not callable(decoder):
        remedy = f": wrap it, ImageDecoder({decoder!r})" if is_crop(decoder) else ""
        raise TypeError(f"{name} must be a function, such as an ImageDecoder; got {decoder!r}{remedy}")


@dataclass(frozen=True)
class _SizedCrop:
    size: int | Sequence[int]

    def __post_init__(self) -> None:
        height_and_width(self.size, type(self).__name__)

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Return height and width of every result."""
        return height_and_width(self.size, type(self).__name__)


@dataclass(frozen=True)
class RandomResizedCrop(_SizedCrop):
    """A crop that cuts out a part of random area and aspect ratio and resizes it, with torchvision's distribution.

    As in torchvision, the part is cut out before it is resized, so pixels next to it have no influence.

    Args:
        size: size of the result, (height, width) or one number for both.
        scale: least and greatest share of the image's area.
        ratio: least and greatest aspect ratio, width over height; drawn uniformly in its logarithm.
    Raises:
        ValueError: an argument is out of range.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"RandomResizedCrop: scale needs 0 < least <= most <= 1; got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"RandomResizedCrop: ratio needs 0 < least <= most; got {self.ratio}")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return a window of an image of this `height` and `width`, drawn from `rng`."""
        top, left, box_height, box_width = self._box(height, width, rng)
        clip = (top, left, top + box_height, left + box_width)
        return Window(
            height_and_width(self.size, "RandomResizedCrop"), (float(top), float(left), float(box_height), float(box_width)), clip
        )

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
class Resize(_SizedCrop):
    """A crop that keeps the whole image and resizes it.

    Args:
        size: (height, width), which may change the aspect ratio; or the length of the shorter side, which keeps the aspect ratio,
            so that results differ in shape.
    Raises:
        ValueError: an argument is out of range.
    """

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """Return height and width of every result; None if they depend on the image."""
        return (None, None) if isinstance(self.size, int) else super().shape

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return a window with all of an image of this `height` and `width`; `rng` is not used."""
        size = shorter_side_to(self.size, height, width) if isinstance(self.size, int) else height_and_width(self.size, "Resize")
        return Whole().window(height, width, rng)._replace(size=size)


@dataclass(frozen=True)
class CenterCrop(_SizedCrop):
    """A crop that cuts out the middle of the image. A smaller image is padded with black, as in torchvision.

    Args:
        size: size of the result, (height, width) or one number for both.
        resize: first resize the image so that its shorter side has this length; usually 256 for a size of 224.
    Raises:
        ValueError: an argument is out of range.
    """

    resize: int | None = None

    def __post_init__(self) -> None:
        size = height_and_width(self.size, "CenterCrop")
        if self.resize is not None and self.resize < max(size):
            raise ValueError(f"CenterCrop: resize is the shorter side and needs to be at least size; got {self.resize} for {size}")

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """Return the middle of an image of this `height` and `width`; `rng` is not used."""
        size = height_and_width(self.size, "CenterCrop")
        resized = (height, width) if self.resize is None else shorter_side_to(self.resize, height, width)
        size = min(size[0], resized[0]), min(size[1], resized[1])
        top, left = round((resized[0] - size[0]) / 2), round((resized[1] - size[1]) / 2)
        down, along = height / resized[0], width / resized[1]
        box = (top * down, left * along, size[0] * down, size[1] * along)
        return Window(size, box, (0, 0, height, width))


@dataclass(frozen=True)
class Whole:
    """The image without crop or resize."""

    shape: tuple[None, None] = (None, None)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        return Window((height, width), (0.0, 0.0, float(height), float(width)), (0, 0, height, width))


def check_choices(crop: Any, flip: float) -> None:
    """Check the crop and the flip of a decoder.

    Raises:
        TypeError: `crop` is neither None nor a Crop.
        ValueError: `flip` is not a probability.
    """
    if crop is not None and not is_crop(crop):
        raise TypeError(
            "crop must be RandomResizedCrop(size), CenterCrop(size), Resize(size) or your own Crop, with `shape` and `window`; got "
            f"{crop!r}"
        )
    if not 0 <= flip <= 1:
        raise ValueError(f"flip is a probability and needs to be 0 to 1; got {flip}")


def centered_slices(shape: Size, size: Size, *, is_flipped: bool) -> tuple[slice, slice]:
    """Return the rows and columns of a result of `shape` that a window of a smaller `size` fills.

    If the margin is odd, the extra pixel is at the bottom and right; for a mirrored image at the left, because the padding is
    mirrored, too.
    """
    top, left = (shape[0] - size[0]) // 2, (shape[1] - size[1] + is_flipped) // 2
    return slice(top, top + size[0]), slice(left, left + size[1])


def _between(least: float, most: float, rng: np.random.Generator) -> float:
    """Draw a number from [least, most). `rng.uniform` and `rng.integers` draw the same, but take twenty times as long."""
    return least + (most - least) * rng.random()


def height_and_width(size: int | Sequence[int], name: str) -> Size:
    """Return `size` as (height, width).

    Raises:
        ValueError: it is not one or two positive integers; the message begins with `name`.
    """
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{name}: size needs one or two whole numbers of pixels, at least 1; got {size!r}")
    return sides[0], sides[1]


def shorter_side_to(side: int, height: int, width: int) -> Size:
    """Return (height, width) after resizing an image so that its shorter side is `side`, rounded down as torchvision does."""
    if width <= height:
        return int(side * height / width), side
    return side, int(side * width / height)
