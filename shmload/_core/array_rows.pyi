"""Gather rows of an array into a batch, by index."""

from typing import Any

from numpy.typing import NDArray

class RowGather:
    num_rows: int
    row_nbytes: int
    def __new__(
        cls,
        address: int,
        num_rows: int,
        row_stride: int,
        runs: NDArray[Any],
        count: int,
        item_nbytes: int,
        item_stride: int,
        swap: int,
        keeper: object,
    ) -> RowGather: ...
    def into(self, to: int, nbytes: int, indices: NDArray[Any]) -> None: ...
