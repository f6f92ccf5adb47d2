"""Stages that depend only on the positions of items: Take, Skip, Repeat, Enumerate, Window and Shuffle."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.pipeline.item_sequence import Derived, ItemSequence
from shmload.schedule import key_streams, permutation
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.permutation import MAX_N
from shmload.schedule.units import Sliced
from shmload.worker.stage_arguments import set_whole


class Selected(Derived):
    """The items that a slice selects from each epoch of the sequence below, or from all items of a repeating sequence.

    Args:
        below: that sequence.
        part: the slice.
        n: number of items of an epoch.
        what: the stage, with its arguments.
        repeating: whether the sequence repeats; None if it repeats like the sequence below.
    """

    def __init__(self, below: ItemSequence, part: Sliced, n: int, what: str, *, repeating: bool | None = None) -> None:
        super().__init__(below, n, what, repeating=repeating)
        self._part = part

    def position_below(self, position: int) -> int:
        epoch, item = (0, position) if self.below.repeating else divmod(position, self.n)
        below: int = epoch * self.below.n + self._part.items(item, self.below.n)
        return below


@dataclass(frozen=True)
class Take:
    """A stage that selects the first items of each epoch; of a repeating source, the next `n` items in every epoch.

    Args:
        n: number of items, at least 1; all, if there are fewer.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Take(n)", "n", 1, MAX_N)

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage."""
        n = self.n if below.repeating else min(self.n, below.n)
        return Selected(below, Sliced(0, self.n, 1), n, f"Take({self.n})", repeating=False)


@dataclass(frozen=True)
class Skip:
    """A stage that selects all but the first items of each epoch; of a repeating source, all but its very first items.

    Args:
        n: number of items to leave out, at least 0.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Skip(n)", "n", 0, MAX_N)

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage.

        Raises:
            ValueError: no item is left.
        """
        part = Sliced(self.n, None, 1)
        n = below.n if below.repeating else part.count(below.n)
        if not n:
            raise ValueError(f"Skip({self.n}) leaves nothing of an epoch of {below.n} items")
        return Selected(below, part, n, f"Skip({self.n})")


@dataclass(frozen=True)
class Repeat:
    """A stage that combines several epochs into one.

    Args:
        times: number of epochs, at least 1; None repeats without end.
    """

    times: int | None = None

    def __post_init__(self) -> None:
        if self.times is not None:
            set_whole(self, "Repeat(times)", "times", 1, MAX_N)

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage.

        Raises:
            ValueError: the sequence repeats already, or an epoch would be too long.
        """
        if below.repeating:
            raise ValueError("Repeat needs a sequence that ends; this one repeats by itself: give its source repeating=False")
        if self.times is None:
            return Derived(below, below.n, "Repeat()", repeating=True)
        if below.n * self.times > MAX_N:
            raise ValueError(f"Repeat({self.times}) of {below.n} items has more than the 2^62 that can be told apart")
        return Derived(below, below.n * self.times, f"Repeat({self.times})")


@dataclass(frozen=True)
class Enumerate:
    """A stage that makes pairs of a number and the item. Counting starts over in each epoch, unless the source repeats.

    Args:
        start: the first number.
    """

    start: int = 0

    def __post_init__(self) -> None:
        set_whole(self, "Enumerate(start)", "start", -MAX_N, MAX_N)

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage."""
        return Enumerated(below, self.start)


class Enumerated(Derived):
    """The sequence of an Enumerate."""

    def __init__(self, below: ItemSequence, start: int) -> None:
        super().__init__(below, below.n, f"Enumerate({start})")
        self._start = start

    def item(self, key: int) -> Any:
        return self._start + (key if self.repeating else key % self.n), self.below.at(key)


@dataclass(frozen=True)
class Window:
    """A stage that makes lists of consecutive items: n-grams, or with `step=size` disjoint groups. Incomplete windows are left out.

    An item that several windows share is made for each of them, with random numbers of the window. Put a Cache before this stage to
    make each item once.

    Args:
        size: number of items of each window, at least 1.
        step: distance between the first items of two windows, at least 1.
    """

    size: int
    step: int = 1

    def __post_init__(self) -> None:
        set_whole(self, "Window(size)", "size", 1, MAX_N)
        set_whole(self, "Window(step)", "step", 1, MAX_N)

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage.

        Raises:
            ValueError: an epoch is shorter than a window.
        """
        return Windows(below, self.size, self.step)


class Windows(Selected):
    """The sequence of a Window."""

    def __init__(self, below: ItemSequence, size: int, step: int) -> None:
        part = Sliced(0, None if below.repeating else max(below.n - size + 1, 0), step)  # the first item of each window
        n = part.count(below.n)
        if not n:
            raise ValueError(f"Window({size}) needs at least {size} items an epoch; there are {below.n}")
        super().__init__(below, part, n, f"Window({size}, step={step})")
        self._size = size

    def item(self, key: int) -> Any:
        first = self.position_below(key)
        return [self.below.at(position) for position in range(first, first + self._size)]


@dataclass(frozen=True)
class Shuffle:
    """A stage that puts each epoch's items into a random order, a new one in each epoch. Each item occurs once.

    Args:
        seed: seed of the order, 0 to 2**64 - 1; None takes the source's.
        buffer_size: take a random one of the next `buffer_size` items each time, for items whose positions are not known; 1 keeps
            the order. It mixes items of one block only (`block_size` of Conveyer), and `seed` is ignored.
    """

    seed: int | None = None
    _: KW_ONLY
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if self.buffer_size is not None:
            set_whole(self, "Shuffle(buffer_size)", "buffer_size", 1, MAX_N)
        if self.seed is not None:
            set_whole(self, "Shuffle(seed)", "seed", 0, MAX_UINT64)

    @property
    def is_buffered(self) -> bool:
        """Return whether it works without known positions."""
        return self.buffer_size is not None

    def over(self, below: ItemSequence) -> ItemSequence:
        """Return the sequence after this stage."""
        return Shuffled(below, below.seed if self.seed is None else self.seed)


_SHUFFLES = key_streams.SAMPLES + 4  # differs from the stream of a Permutation with the same seed


class Shuffled(Derived):
    """The sequence of a Shuffle."""

    def __init__(self, below: ItemSequence, seed: int) -> None:
        super().__init__(below, below.n, f"Shuffle(seed={seed})")
        self.is_fixed = False
        self._order_seed = seed
        self._orders: EpochCache[permutation.Permutation] = EpochCache()

    def position_below(self, position: int) -> int:
        epoch, item = divmod(position, self.n)
        return epoch * self.n + self._orders.get(self._order_seed, epoch, self._order)[item]

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, items = np.divmod(positions, self.n)
        found = epochs * self.n
        for epoch in set(epochs.tolist()):
            its = epochs == epoch
            found[its] += self._orders.get(self._order_seed, epoch, self._order).take(items[its])
        return found

    def _order(self, seed: int, epoch: int) -> permutation.Permutation:
        return permutation.Permutation(self.n, seed=seed, epoch=epoch, stream=_SHUFFLES)
