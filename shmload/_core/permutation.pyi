"""Keyed bijections of [0, n) over whole arrays, and the keys of per-sample randomness."""

from typing import Self

import numpy as np
from numpy.typing import NDArray

MAX_N: int
TABLE_MAX_N: int
ISAS: tuple[str, ...]

def sample_key(seed: int, epoch: int, index: int, stream: int = 0) -> int: ...
def sample_key_pair(seed: int, epoch: int, index: int, stream: int = 0) -> tuple[int, int]: ...

class KeyedPermutation:
    def __new__(
        cls, n: int, *, seed: int, epoch: int, stream: int = 0, num_rounds: int = 8, table_max_n: int = ..., isa: str | None = None
    ) -> Self: ...
    def fill(self, start: int, out: NDArray[np.int64]) -> None: ...
    def take(self, positions: NDArray[np.int64], out: NDArray[np.int64]) -> None: ...
    def inverse(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> None: ...
