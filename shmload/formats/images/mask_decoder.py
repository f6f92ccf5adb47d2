"""MaskDecoder: decode masks, images whose pixels are numbers of classes, aligned with the image of the same sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shmload.formats.images.crops import Crop, Whole, centered_slices, check_choices
from shmload.formats.images.decoder import generator
from shmload.formats.images.encoded_bytes import Encoded, file_bytes
from shmload.formats.images.open_image import MAX_PIXELS, checked
from shmload.formats.images.pillow_image import open_picture
from shmload.formats.images.shared_choices import generator_for

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


@dataclass(frozen=True)
class MaskDecoder:
    """A decoder of masks, in which each pixel is the number of a class. Immutable: can be compared, pickled, and shared by threads.

    The pixels of a palette image are its indices, those of a gray image its levels, and those of a black and white image 0 and 1.
    Resizing takes the nearest pixel, as Pillow's `NEAREST`, so no other numbers arise. If a dataset decodes the image of a sample
    with an ImageDecoder and its mask with a MaskDecoder of the same crop and flip, both make the same random choices.

    Args:
        crop: RandomResizedCrop, CenterCrop, Resize or your own Crop; None keeps the mask as it is.
        flip: probability of mirroring the mask, left to right.
        dtype: "uint8", or "int64", which torch's losses take and masks of 16 bits need.
        fill: the class of pixels outside of a mask that is smaller than the crop, such as one that the loss ignores.
        max_pixels: largest size of a mask; a larger one is rejected before any memory is allocated.
    Raises:
        TypeError: `crop` is not a Crop.
        ValueError: an option is invalid; (when called) a file is not a valid image, has several channels, or has a number that
            `dtype` cannot hold.
    Thread/process safety: any number of callers.
    Example:
        >>> from shmload.formats import MaskDecoder, RandomResizedCrop
        >>> MaskDecoder(RandomResizedCrop(224), flip=0.5).spec
        ('uint8', (224, 224))
    """

    shares_choices: ClassVar[bool] = True

    crop: Crop | None = None
    flip: float = 0.0
    dtype: Literal["uint8", "int64"] = "uint8"
    fill: int = 0
    max_pixels: int = MAX_PIXELS
    _crop: Crop = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choices(self.crop, self.flip)
        if self.dtype not in ("uint8", "int64"):
            raise ValueError(f"dtype needs to be one of ('uint8', 'int64'); got {self.dtype!r}")
        if not 0 <= self.fill <= np.iinfo(self.dtype).max:
            raise ValueError(f"fill is the number of a class, of dtype {self.dtype}; got {self.fill!r}")
        object.__setattr__(self, "_crop", self.crop or Whole())

    @property
    def spec(self) -> tuple[str, tuple[int | None, int | None]]:
        """Return type and shape of the result, as in a schema: ("uint8", (224, 224)). None depends on the mask."""
        return self.dtype, self._crop.shape

    def __call__(self, data: Encoded) -> NDArray[Any]:
        """Return the decoded mask as a new array of the shape `(height, width)` and the dtype that `spec` describes.

        Args:
            data: an encoded image: bytes, another buffer of them, or a dict that has them as "bytes", as Hugging Face's
                `datasets.Image` stores pictures.
        """
        content = file_bytes(data)
        picture = checked(lambda: open_picture(content))
        width, height = picture.size
        if width * height > self.max_pixels:
            raise ValueError(f"the mask has {width} x {height} pixels, more than max_pixels={self.max_pixels}")
        classes = checked(lambda: _classes(picture))
        if int(classes.min()) < 0:
            raise ValueError(f"the mask has a negative number, {classes.min()}, which is no class")
        if (largest := int(classes.max())) > np.iinfo(self.dtype).max:
            raise ValueError(f'the mask has class {largest}, which is too large for uint8: give MaskDecoder(dtype="int64")')
        rng = generator_for((self._crop, self.flip), generator)
        window = self._crop.window(height, width, rng)
        is_flipped = self.flip > 0 and rng.random() < self.flip
        (top, left, box_height, box_width), (first, begin, last, end) = window.box, window.clip
        rows = _nearest(top, box_height, window.size[0], first, last)
        columns = _nearest(left, box_width, window.size[1], begin, end)
        found = classes[rows[:, None], columns[::-1] if is_flipped else columns].astype(self.dtype)
        size = tuple(side or n for side, n in zip(self._crop.shape, window.size, strict=True))
        if size == window.size:
            return found
        out = np.full(size, self.fill, self.dtype)
        out[centered_slices((size[0], size[1]), window.size, is_flipped=is_flipped)] = found
        return out


def _classes(picture: Picture) -> NDArray[Any]:
    """Return the numbers in the pixels of a picture of one channel."""
    if picture.mode not in ("1", "L", "P", "I") and not picture.mode.startswith("I;16"):
        raise ValueError(
            f"a picture of mode {picture.mode} has no class numbers: a mask has one channel (L, P, 1, I or I;16). Convert its "
            "colors to numbers before, or decode it with ImageDecoder"
        )
    classes = np.asarray(picture)
    return classes.astype(np.uint8) if classes.dtype == np.bool_ else classes


def _nearest(start: float, extent: float, count: int, first: int, end: int) -> NDArray[np.intp]:
    """Return for each of `count` results the pixel at its center, within [first, end), of a side that is cut at `start`."""
    steps = np.full(count, extent / count)
    steps[:1] = start + steps[:1] * 0.5
    places: NDArray[np.float64] = np.floor(np.add.accumulate(steps))  # Pillow adds up, too, so that ties fall on the same side
    return places.clip(first, end - 1).astype(np.intp)
