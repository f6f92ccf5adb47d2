"""The libjpeg-turbo that Pillow brings, called directly: it decodes what a crop needs of a JPEG, and leaves the rest out.

simplejpeg and OpenCV have a libjpeg-turbo each, but hide it. Pillow's wheels carry one as a shared library, and distributions link
Pillow with the system's. `_core.jpeg` binds whichever it is at run time; where there is none, or an old one, or one of another
interface, JPEGs are decoded whole, by simplejpeg or Pillow: the same pixels.
"""

from __future__ import annotations

import os
import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shmload._core.jpeg import bind, decode
from shmload.formats.images.opened import HINT, Box, Part, Pixels, memory, scratch

LEAST_VERSION = (2, 1)  # of libjpeg-turbo: the oldest that the tests were run with


@cache
def unbound() -> str:
    """Why Pillow's libjpeg cannot be used; "" once it is bound. What is found out holds for the process."""
    try:
        from PIL import _imaging as native
    except ImportError as error:
        return f"Pillow is needed: {error}"
    version = str(getattr(native, "libjpeg_turbo_version", "none"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        return f"Pillow with libjpeg-turbo {'.'.join(map(str, LEAST_VERSION))} or later is needed; it has {version}"
    try:
        bind(os.fsencode(native.__file__ or ""))
    except ImportError as error:
        return str(error)
    return ""


class LibJpeg:
    """A JPEG that Pillow's libjpeg-turbo decodes, as far as it is needed."""

    reductions: tuple[int, ...] = (8, 4, 2, 1)

    def __init__(self, data: bytes, height: int, width: int, *, is_strict: bool, is_fast: bool) -> None:
        self._data, self.height, self.width = data, height, width
        self._is_strict, self._is_fast = is_strict, is_fast

    def pixels(self, reduction: int, *, into: Pixels | None = None) -> Pixels:
        height, width = -(-self.height // reduction), -(-self.width // reduction)
        if into is None:
            into = scratch(height, width)
        self._decode(into.reshape(-1), reduction, (0, 0, height, width))
        return into

    def part(self, reduction: int, needed: Box) -> Part:
        top, _, bottom, _ = needed
        into = memory((bottom - top) * -(-self.width // reduction) * 3)
        left, right = self._decode(into, reduction, needed)
        pixels = into[: (bottom - top) * (right - left) * 3].reshape(bottom - top, right - left, 3)
        return Part(pixels, (top, left))

    def _decode(self, into: NDArray[np.uint8], reduction: int, needed: Box) -> tuple[int, int]:
        if why := unbound():
            raise ImportError(f"decoder='libjpeg': {why}; {HINT}")
        return decode(
            self._data,
            into,
            (-(-self.height // reduction), -(-self.width // reduction)),
            needed,
            reduction=reduction,
            is_strict=self._is_strict,
            is_fast=self._is_fast,
        )
