"""Resample, mirror, normalize and lay out a part of an RGB image directly into the row of a batch."""

from typing import Any

from numpy.typing import NDArray

def resample(
    image: NDArray[Any],
    out: Any,
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    clip: tuple[int, int, int, int],
    *,
    origin: tuple[int, int] = (0, 0),
    whole: tuple[int, int] | None = None,
    is_flipped: bool = False,
    is_planar: bool = False,
    levels: NDArray[Any] | None = None,
    vectors: int = 2,
) -> None: ...
def look_up(image: NDArray[Any], out: NDArray[Any], levels: NDArray[Any], is_planar: bool) -> None: ...
