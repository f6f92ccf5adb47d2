"""`TextRuns`: a column of text whose values are somewhere in memory, as UTF-8 or bytes, and are copied from there to the slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs
from shmload._core.text import BYTES, UTF8


class TextRuns:
    """Text values ready to be written, in the form that TextColumn uses (src/text.pyx).

    Args:
        addresses: address of each value.
        lengths: number of bytes of each value.
        is_bytes: whether the values are bytes instead of str.
        owner: object that keeps the memory alive.
    """

    def __init__(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64], *, is_bytes: bool, owner: Any) -> None:
        self._addresses = addresses
        self._lengths = lengths
        self._owner = owner
        self.kind = BYTES if is_bytes else UTF8
        self.nbytes = 8 * len(lengths) + int(lengths.sum())

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> str | bytes:
        """Return a copy of one value."""
        value = np.empty(int(self._lengths[row]), np.uint8)
        gather_rows(self._addresses[[row]], len(value), value)
        return value.tobytes() if self.kind == BYTES else value.tobytes().decode()

    def write(self, room: NDArray[np.uint8]) -> None:
        """Write the ends of the values (int64) and the values at the start of `room`, which has at least `nbytes`."""
        ends = 8 * len(self)
        room[:ends].view(np.int64)[:] = np.cumsum(self._lengths)
        gather_runs(self._addresses, self._lengths, room[ends : self.nbytes])
