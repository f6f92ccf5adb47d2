"""An image whose header has been parsed, and the memory for its pixels."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3)
Box = tuple[int, int, int, int]  # (top, left, bottom, right)
_KEPT_NBYTES = 1 << 26  # a thread keeps its memory for decoded pixels up to this size
_local = threading.local()


class Part(NamedTuple):
    """Some pixels of a shrunk image, and the (top, left) of the first one within it."""

    pixels: Pixels
    origin: tuple[int, int]


@dataclass
class OpenedImage(ABC):
    """An image whose size is known and whose pixels are not decoded yet.

    Attributes:
        data: the file.
        height, width: size in pixels, as stored.
        is_strict, is_fast: `strict` and `fast` of `ImageDecoder`.
        reductions: the factors by which the decoder itself can shrink the image: powers of 2, including 1.
        is_irregular: the file violates its format but is read anyway; final only after decoding.
    """

    data: bytes
    height: int
    width: int
    is_strict: bool | None
    is_fast: bool
    reductions: tuple[int, ...] = (8, 4, 2, 1)
    is_irregular: bool = False

    @abstractmethod
    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        """Return the image, shrunk by the factor `reduction`; sizes are rounded up.

        Returns:
            `into`, or memory that the thread's next image overwrites.
        """

    def part(self, reduction: int, needed: Box) -> Part:
        """Return at least the pixels in `needed` of the shrunk image, in memory that the thread's next image overwrites."""
        return Part(self.pixels(reduction), (0, 0))

    @abstractmethod
    def orientation(self) -> int:
        """Return the orientation by which Pillow's `ImageOps.exif_transpose` turns the image: 1 to 8, and 1 without one."""

    def size(self, reduction: int) -> tuple[int, int]:
        """Return height and width of the image shrunk by the factor `reduction`."""
        return -(-self.height // reduction), -(-self.width // reduction)


def memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of this thread for one image. The thread's next call returns the same memory.

    It is reused because fresh pages would add a tenth to the decoding time.
    """
    if nbytes > _KEPT_NBYTES:
        return np.empty(nbytes, np.uint8)
    kept: NDArray[np.uint8] | None = getattr(_local, "kept", None)
    if kept is None or kept.size < nbytes:
        kept = _local.kept = np.empty(nbytes, np.uint8)
    return kept[:nbytes]
