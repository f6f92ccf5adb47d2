"""Pack: pack token sequences into windows of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from shmload._core.gather import number_runs
from shmload.worker.item_stages import with_results
from shmload.worker.stage_arguments import set_whole
from shmload.worker.stage_engine import Expanding, FailedItem, StageContext


@dataclass(frozen=True)
class Pack(Expanding):
    """A stage that packs token sequences into windows of one length: dicts of `tokens`, `segment_ids` and `position_ids`.

    Each sequence is in one window; a sequence longer than a window is cut, and an empty one is left out. `segment_ids` number a
    window's sequences from 1, with 0 for padding; `position_ids` begin at 0 in each sequence.

    Args:
        window: number of tokens of each window, at least 1.
        pad: token that fills up a window.
        strategy: "greedy" continues the newest window or begins another; "best_fit" takes the window of the block with the least
            sufficient room.
    Raises:
        ValueError: an argument is invalid.
    Source: H. Ding et al., Fewer truncations improve language modeling, ICML 2024 (best fit).
    """

    window: int
    _: KW_ONLY
    pad: int = 0
    strategy: str = "greedy"

    def __post_init__(self) -> None:
        set_whole(self, "Pack(window)", "window", 1, 1 << 31)
        set_whole(self, "Pack(pad)", "pad", -(1 << 63), (1 << 63) - 1)
        if self.strategy not in ("greedy", "best_fit"):
            raise ValueError(f'Pack(strategy) is "greedy" or "best_fit"; got {self.strategy!r}')

    @property
    def kind(self) -> str:
        return repr(self)

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        windows: list[_PackedWindow] = []
        is_greedy = self.strategy == "greedy"
        for item, parts in with_results(self._parts, items, name, context):
            if type(item) is FailedItem:
                yield item
                continue
            for part in parts:
                window = self._fitting(windows, len(part))
                if window is None:
                    if is_greedy and windows:
                        yield windows.pop().columns()
                    window = _PackedWindow(self.window, self.pad)
                    windows.append(window)
                window.put(part)
        yield from (window.columns() for window in windows)

    def _parts(self, item: Any) -> list[np.ndarray[Any, Any]]:
        tokens = np.asarray(item)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):  # an empty list is an array of floats
            raise ValueError(f"Pack needs sequences of integers; got an array of {tokens.dtype}, shape {tokens.shape}")
        if tokens.dtype == np.uint64 and tokens.size and int(tokens.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"Pack makes windows of int64, and got the number {tokens.max()}")
        if 0 < len(tokens) <= self.window:
            return [tokens]
        return [tokens[first : first + self.window] for first in range(0, len(tokens), self.window)]

    def _fitting(self, windows: Sequence[_PackedWindow], length: int) -> _PackedWindow | None:
        """Return the window for a sequence, or None if it needs a new one."""
        if len(windows) < 2:
            return windows[0] if windows and windows[0].room >= length else None
        return min((window for window in windows if window.room >= length), key=lambda window: window.room, default=None)


class _PackedWindow:
    """A window that is being filled.

    Attributes:
        room: number of tokens that still fit.
    """

    __slots__ = ("_columns", "_lengths", "_tokens", "room")

    def __init__(self, length: int, pad: int) -> None:
        self._columns = np.zeros((3, length), np.int64)
        self._tokens = self._columns[0]
        if pad:
            self._tokens[:] = pad
        self._lengths: list[int] = []  # of its sequences
        self.room = length

    def put(self, part: np.ndarray[Any, Any]) -> None:
        """Copy a sequence into the window."""
        length, start = len(part), len(self._tokens) - self.room
        self._tokens[start : start + length] = part
        self._lengths.append(length)
        self.room -= length

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns of the finished window."""
        tokens, segments, positions = self._columns
        number_runs(self._lengths, segments, positions)
        return {"tokens": tokens, "segment_ids": segments, "position_ids": positions}
