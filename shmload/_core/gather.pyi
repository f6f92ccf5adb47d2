"""Rows that lie anywhere in memory, copied to stand one after the other: how columns of arrow files get into a batch."""

from typing import Any

from numpy.typing import NDArray

def gather_rows(addresses: NDArray[Any], nbytes: int, out: NDArray[Any]) -> None:
    """Copies rows of `nbytes` each."""

def gather_runs(addresses: NDArray[Any], nbytes: NDArray[Any], out: NDArray[Any]) -> None:
    """Copies runs of different lengths, end to end."""

def pad_runs(runs: list[Any], nbytes: int, out: NDArray[Any]) -> None:
    """Copies the bytes of some arrays, each filled up with zeros to `nbytes`."""

def number_runs(lengths: list[int], numbers: NDArray[Any], places: NDArray[Any]) -> None:
    """Writes of the elements of runs that stand end to end which run each is of, from 1 on, and its place in it, from 0 on."""
