"""Sequences of the items of all epochs, which any process can read at any position.

A sequence numbers the items of all its epochs consecutively: position e * n + p is item p of epoch e. A repeating sequence has no
end; its epochs only affect how positions are counted. A stage that depends only on positions turns a sequence into another one:
item k of the new sequence is computed from the items of the sequence below that it consists of, so any worker can read any item.

    Items(["a", "b", "c"])      a b c | a b c | ...
    Skip(1)                     b c | b c | ...
    Enumerate()                 (0, b) (1, c) | (0, b) (1, c) | ...

The order of a sequence consists of keys, which are sent to the workers, and each key identifies an item. The keys of a Range, a
Permutation and a Join encode the item; the keys of all other sequences are positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.schedule.digest import digest
from shmload.worker.stage_engine import Each, with_note

SEED = 1234  # the default of sources


class ItemSequence:
    """A sequence of items, and the keys that identify them. Positions number the items of all epochs consecutively.

    Attributes:
        n: number of items of an epoch.
        identity: names the order; a state saved under another identity is refused.
        members: structure of the keys, for audits: n of a plain source; for a Join, the list of its members' structures.
        num_counters: number of counters that a resume needs besides the position.
        is_fixed: whether item p is the same in every epoch, except for random numbers.
        parts: the sequences that it is made of.
    """

    is_fixed = False
    parts: Sequence[ItemSequence] = ()
    n: int
    seed: int
    repeating: bool
    identity: str
    members: Any
    num_counters = 0
    pools: Sequence[Any] = ()  # workers that its members request
    n_workers = 0  # workers that it requests itself

    @property
    def dataset(self) -> Any:
        """Return the dataset whose unchanged samples are the items, or None."""
        return None

    @property
    def held(self) -> Sequence[tuple[str, Any]]:
        """Return the objects besides the identity that determine its items, each with a name for error messages."""
        return ()

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the keys at positions [start, stop)."""
        raise NotImplementedError

    def item(self, key: int) -> Any:
        """Return the item that a key identifies."""
        return key % self.n

    def name(self, key: int) -> str:
        """Return the name of a key's item, for error messages."""
        return "item {1} of epoch {0}".format(*divmod(key, self.n))

    def at(self, position: int) -> Any:
        """Return the item at a position."""
        return self.item(self.key(position))

    def key(self, position: int) -> int:
        """Return the key at a position."""
        return int(self.keys_at(position, position + 1)[0])

    def counters_at(self, position: int) -> list[int]:
        """Return the counters that a resume at a position needs besides the position."""
        return []

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Continue with the counters that `counters_at` returned; raise StateMismatch if they are impossible."""
        if counters:
            raise StateMismatch(f"{type(self).__name__} has no counters; the state has {counters!r:.200}")


class PositionSequence(ItemSequence):
    """A sequence whose keys are its positions."""

    def __init__(self, n: int, identity: str, *, repeating: bool, seed: int) -> None:
        self.n = self.members = n
        self.identity, self.repeating, self.seed = identity, repeating, seed

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange(start, stop, dtype=np.int64)

    def __init_subclass__(cls) -> None:
        if "item" in vars(cls):
            cls.at = cls.item  # type: ignore[assignment, method-assign]  # keys are positions, and this saves one call per item

    def key(self, position: int) -> int:
        return position

    def item(self, key: int) -> Any:
        raise NotImplementedError


class Mapped(PositionSequence):
    """A sequence of the results of functions on the items of another sequence."""

    def __init__(self, below: ItemSequence, stages: Sequence[Each]) -> None:
        super().__init__(below.n, below.identity, repeating=below.repeating, seed=below.seed)
        self.below, self._functions = below, {stage.name: stage for stage in stages}  # an error of pickling shows the keys
        self.is_fixed, self.parts = below.is_fixed, (below,)

    @property
    def held(self) -> Sequence[tuple[str, Any]]:
        return [(stage.name, getattr(stage.function, "uncounted", stage.function)) for stage in self._functions.values()]

    def item(self, key: int) -> Any:
        item = self.below.at(key)
        try:
            for stage in self._functions.values():  # like `apply_functions`, but without an extra call per item
                item = stage.function(item)
        except Exception as error:
            error = with_note(error, stage.name, self.below.name(self.below.key(key)))
            raise error
        return item


class Derived(PositionSequence):
    """A sequence whose items are made of those of the sequence below.

    Args:
        below: that sequence.
        n: number of items of an epoch.
        what: the stage that makes it, with its arguments.
        repeating: whether the sequence repeats; None if it repeats like the sequence below.
    """

    def __init__(self, below: ItemSequence, n: int, what: str, *, repeating: bool | None = None) -> None:
        is_endless = below.repeating if repeating is None else repeating
        super().__init__(n, f"{what} of {shortened(below.identity)}", repeating=is_endless, seed=below.seed)
        self.below, self.parts = below, (below,)
        self.is_fixed = below.is_fixed and not below.repeating

    def position_below(self, position: int) -> int:
        """Return the position in the sequence below at which an item begins."""
        return position

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `position_below` of several positions."""
        below: Any = self.position_below  # works on arrays, too, because it is arithmetic
        made: NDArray[np.int64] = below(positions)
        return made

    def item(self, key: int) -> Any:
        return self.below.at(self.position_below(key))

    def name(self, key: int) -> str:
        return self.below.name(self.below.key(self.position_below(key)))


def shortened(names: str) -> str:
    """Return names as part of an identity: a digest of them if they are long."""
    return names if len(names) <= 200 else digest(np.frombuffer(names.encode(), np.uint8))
