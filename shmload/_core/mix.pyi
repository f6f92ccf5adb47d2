"""Which member of a mixture each draw goes to, so that every prefix keeps to the weights within one sample."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class Apportionment:
    """The draws of K members over pieces of constant weights."""

    num_members: int
    denominator: int
    def __init__(self, starts: NDArray[np.int64], weights: NDArray[np.int64], denominator: int) -> None: ...
    def draw(self, position: int, counters: NDArray[np.int64], members: NDArray[Any]) -> None:
        """Writes whose the draws from `position` on are into `members`, and what the counters are after them into `counters`."""

    def first_at(self, member: int, target: int) -> int | None:
        """The first number of draws of which the member's share, times the denominator, is `target` or more; None if never."""
