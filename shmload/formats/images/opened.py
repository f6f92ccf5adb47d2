"""What every library's images have in common: a size, pixels or a part of them, and the memory these are decoded into."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3)
Box = tuple[int, int, int, int]  # (top, left, bottom, right)
HINT = "pip install 'shmload[images]'"
_KEPT_NBYTES = 1 << 26  # of decoded pixels that a thread keeps its memory for
_local = threading.local()


class Part(NamedTuple):
    """Some pixels of an image, and the (top, left) they begin at."""

    pixels: Pixels
    origin: tuple[int, int]


class Opened(Protocol):
    """An image whose size is known and whose pixels are not decoded yet.

    Attributes:
        reductions: by how much its decoder itself can shrink it: powers of 2, 1 among them.
    """

    height: int
    width: int
    reductions: tuple[int, ...]

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        """The image, shrunk to a `reduction`-th, rounded up.

        Returns:
            `into`, or memory that the thread's next image overwrites.
        """

    def part(self, reduction: int, needed: Box) -> Part:
        """At least the needed pixels of the shrunk image, in memory that the thread's next image overwrites."""


def scratch(height: int, width: int) -> Pixels:
    """`memory` in the shape of an image."""
    return memory(height * width * 3).reshape(height, width, 3)


def memory(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread's for one image: fresh pages would cost a tenth of the decoding."""
    if nbytes > _KEPT_NBYTES:
        return np.empty(nbytes, np.uint8)
    kept: NDArray[np.uint8] | None = getattr(_local, "kept", None)
    if kept is None or kept.size < nbytes:
        kept = _local.kept = np.empty(nbytes, np.uint8)
    return kept[:nbytes]
