"""Which part of an image becomes the result, and of what size: torchvision's crops as windows.

A window says everything that resampling needs to know, in pixels of the image as it is stored. A crop that torchvision makes in two
steps (resize, then cut) is one window here: no pixel is computed that is not wanted.

Source: torchvision.transforms v1, RandomResizedCrop.get_params, Resize, CenterCrop; after C. Szegedy et al., Going deeper with
convolutions, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

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
