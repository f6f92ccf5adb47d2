"""Rows that lie anywhere in memory, copied to stand one after the other: how columns of arrow files get into a batch."""

from typing import Any

from numpy.typing import NDArray

def gather_rows(addresses: NDArray[Any], nbytes: int, out: NDArray[Any]) -> None:
    """Copies rows of `nbytes` each."""

def gather_runs(addresses: NDArray[Any], nbytes: NDArray[Any], out: NDArray[Any]) -> None:
    """Copies runs of different lengths, end to end."""
