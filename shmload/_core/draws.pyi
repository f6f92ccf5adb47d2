"""Stateless draws: random words by position, and weighted indices from an alias table."""

from typing import Self

import numpy as np
from numpy.typing import NDArray

def fill_words(out: NDArray[np.uint64], *, seed: int, epoch: int, stream: int, n: int, start: int = 0) -> None: ...

class AliasTable:
    @property
    def n(self) -> int: ...
    def __new__(cls, weights: NDArray[np.uint64]) -> Self: ...
    def fill(self, start: int, out: NDArray[np.int64], *, seed: int, epoch: int, stream: int) -> None: ...
