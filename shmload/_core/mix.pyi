"""The draws of a mixture, and the orders of its members."""

from typing import Self

import numpy as np
from numpy.typing import NDArray

SCAN_MAX: int
MAX_MEMBERS: int

class Draws:
    def __new__(cls, starts: NDArray[np.uint64], shares: NDArray[np.uint64], *, scan_max: int = ...) -> Self: ...
    def run(self, position: int, counters: NDArray[np.int64], out: NDArray[np.uint16]) -> None: ...

class Rounds:
    def __new__(cls, size: int, *, shuffle: bool, seed: int, epoch: int, stream: int, num_streams: int) -> Self: ...
    def fill(self, first: int, out: NDArray[np.int64], *, offset: int, lap: int, num_laps: int) -> None: ...
