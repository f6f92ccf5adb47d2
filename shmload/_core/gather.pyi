"""Copy rows from anywhere in memory one after another: how columns of Arrow files and rows of many tensors get into a batch."""

from typing import Any

from numpy.typing import NDArray

def gather_rows(addresses: NDArray[Any], nbytes: int, out: NDArray[Any]) -> None:
    """Copy rows of `nbytes` each."""

def gather_rows_to(addresses: NDArray[Any], nbytes: int, out: int, room: int) -> None:
    """Copy rows of `nbytes` each to memory of `room` bytes at the address `out`."""

def gather_runs(addresses: NDArray[Any], nbytes: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy runs of different lengths, end to end."""

def pad_runs(runs: list[Any], nbytes: int, out: NDArray[Any]) -> None:
    """Copy the bytes of some arrays, each padded with zeros to `nbytes`."""

def number_runs(lengths: list[int], numbers: NDArray[Any], places: NDArray[Any]) -> None:
    """For runs stored end to end, write each element's run number, from 1 on, and its position in the run, from 0 on."""
