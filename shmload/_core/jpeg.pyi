"""Decode a part of a JPEG to RGB, with a libjpeg-turbo that is bound at run time."""

from typing import Any

from numpy.typing import NDArray

def bind(path: bytes) -> None: ...
def decode(
    data: bytes,
    into: NDArray[Any],
    size: tuple[int, int],
    part: tuple[int, int, int, int],
    *,
    reduction: int = 1,
    is_strict: bool | None = True,
    is_fast: bool = False,
) -> tuple[int, int, int]: ...
def is_remark(warning: str) -> bool: ...
def recode(data: bytes, *, least_width: int = 0) -> bytes: ...
