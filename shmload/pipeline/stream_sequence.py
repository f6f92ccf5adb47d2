"""Sequences of a Stream: items that can only be read one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shmload.pipeline.block_sequence import Expansion
from shmload.pipeline.item_sequence import PositionSequence
from shmload.pipeline.position_stages import Enumerate, Skip, Take

UNKNOWN = 1 << 52  # replaces the unknown number of blocks of an epoch


@dataclass(frozen=True, eq=False)
class StreamItems:
    """The items of an iterable, in order; see Stream.

    Args:
        iterable: an iterable, or a function that makes an iterator.
        resume: "state" or "count".
        seed: seed of the items' random numbers.
        n_workers: number of worker processes that it requests.
        steps: stages that choose or number its items.
        pools: empty, because a Stream has no members; other sources have those of their members here.
    """

    iterable: Any
    resume: Literal["state", "count"]
    seed: int
    n_workers: int
    steps: tuple[Take | Skip | Enumerate, ...] = ()
    pools: Sequence[Any] = ()

    def with_step(self, step: Any) -> StreamItems:
        """Return the items after one more stage.

        Raises:
            ValueError: the stage needs to know the positions of items.
        """
        if not isinstance(step, Take | Skip | Enumerate):
            remedy = ": give it a buffer_size" if type(step).__name__ == "Shuffle" else ""
            raise ValueError(f"the items of a Stream have no positions{remedy}")
        return replace(self, steps=(*self.steps, step))

    @property
    def is_spent_once_read(self) -> bool:
        """Return whether it is an iterator, which cannot be restarted."""
        return not isinstance(self.iterable, type) and hasattr(self.iterable, "__next__")


class StreamSequence(PositionSequence):
    """The blocks of a stream, for the schedule; their number is unknown."""

    def __init__(self, stream: StreamItems, expansion: Expansion, size: int) -> None:
        steps = "".join(f", {step}" for step in stream.steps)
        super().__init__(UNKNOWN, f"{expansion.kinds} of blocks of {size} of a Stream{steps}", repeating=False, seed=stream.seed)
        self.stream, self.expansion, self.size = stream, expansion, size
