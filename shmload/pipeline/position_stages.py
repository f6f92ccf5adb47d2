"""Stages that depend only on the positions of items: Take, Skip, Repeat, Enumerate, Window and Shuffle."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.pipeline.rows import Derived, Keys
from shmload.schedule import key_streams, permutation
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.permutation import MAX_N
from shmload.worker.stage_arguments import set_whole


@dataclass(frozen=True)
class Take:
    """The first items of each epoch; of a repeating source, the next `n` items in every epoch.

    Args:
        n: how many, at least 1; all, if there are fewer.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Take(n)", "n", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage."""
        return Taken(below, self.n)


class Taken(Derived):
    """See Take."""

    def __init__(self, below: Keys, n: int) -> None:
        super().__init__(below, n if below.repeating else min(n, below.n), f"Take({n})", repeating=False)

    def place(self, position: int) -> int:
        if self.below.repeating:
            return position
        epoch, item = divmod(position, self.n)
        return epoch * self.below.n + item


@dataclass(frozen=True)
class Skip:
    """All but the first items of each epoch; of a repeating source, all but its very first items.

    Args:
        n: how many, from 0.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Skip(n)", "n", 0, MAX_N)

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage.

        Raises:
            ValueError: nothing is left.
        """
        return Skipped(below, self.n)


class Skipped(Derived):
    """See Skip."""

    def __init__(self, below: Keys, n: int) -> None:
        if not below.repeating and n >= below.n:
            raise ValueError(f"Skip({n}) leaves nothing of an epoch of {below.n} items")
        super().__init__(below, below.n if below.repeating else below.n - n, f"Skip({n})")
        self._num_skipped = n

    def place(self, position: int) -> int:
        if self.repeating:
            return position + self._num_skipped
        epoch, item = divmod(position, self.n)
        return epoch * self.below.n + self._num_skipped + item


@dataclass(frozen=True)
class Repeat:
    """Combines several epochs into one.

    Args:
        times: number of epochs, at least 1; None repeats without end.
    """

    times: int | None = None

    def __post_init__(self) -> None:
        if self.times is not None:
            set_whole(self, "Repeat(times)", "times", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage.

        Raises:
            ValueError: the row repeats already, or an epoch would be too long.
        """
        if below.repeating:
            raise ValueError("Repeat needs a row that ends; this one repeats by itself: give its source repeating=False")
        if self.times is None:
            return Derived(below, below.n, "Repeat()", repeating=True)
        if below.n * self.times > MAX_N:
            raise ValueError(f"Repeat({self.times}) of {below.n} items has more than the 2^62 that can be told apart")
        return Derived(below, below.n * self.times, f"Repeat({self.times})")


@dataclass(frozen=True)
class Enumerate:
    """Pairs of a number and the item. Counting starts over in each epoch, unless the source repeats.

    Args:
        start: the first number.
    """

    start: int = 0

    def __post_init__(self) -> None:
        set_whole(self, "Enumerate(start)", "start", -MAX_N, MAX_N)

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage."""
        return Enumerated(below, self.start)


class Enumerated(Derived):
    """See Enumerate."""

    def __init__(self, below: Keys, start: int) -> None:
        super().__init__(below, below.n, f"Enumerate({start})")
        self._start = start

    def item(self, key: int) -> Any:
        return self._start + (key if self.repeating else key % self.n), self.below.at(key)


@dataclass(frozen=True)
class Window:
    """Lists of consecutive items: n-grams, or with `step=size` disjoint groups. An incomplete window is left out.

    Args:
        size: items of each window, at least 1.
        step: distance between the first items of two windows, at least 1.
    """

    size: int
    step: int = 1

    def __post_init__(self) -> None:
        set_whole(self, "Window(size)", "size", 1, MAX_N)
        set_whole(self, "Window(step)", "step", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage.

        Raises:
            ValueError: an epoch is shorter than a window.
        """
        return Windows(below, self.size, self.step)


class Windows(Derived):
    """See Window."""

    def __init__(self, below: Keys, size: int, step: int) -> None:
        n = -(-below.n // step) if below.repeating else (below.n - size) // step + 1
        if n < 1:
            raise ValueError(f"Window({size}) needs at least {size} items an epoch; there are {below.n}")
        super().__init__(below, n, f"Window({size}, step={step})")
        self._size, self._step = size, step

    def place(self, position: int) -> int:
        if self.repeating:
            return position * self._step
        epoch, window = divmod(position, self.n)
        return epoch * self.below.n + window * self._step

    def item(self, key: int) -> Any:
        first = self.place(key)
        return [self.below.at(place) for place in range(first, first + self._size)]


@dataclass(frozen=True)
class Shuffle:
    """A random order of each epoch's items, a new one in each epoch; each item occurs once.

    Args:
        seed: of the order, 0 to 2**64 - 1; None takes the source's.
        buffer_size: take a random item of a buffer of this size each time, for items whose positions are not known; `seed` is
            ignored then.
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
        """True if it works without known positions."""
        return self.buffer_size is not None

    def over(self, below: Keys) -> Keys:
        """Return the row after this stage."""
        return Shuffled(below, below.seed if self.seed is None else self.seed)


_SHUFFLES = key_streams.SAMPLES + 4  # differs from the stream of a Permutation with the same seed


class Shuffled(Derived):
    """See Shuffle."""

    def __init__(self, below: Keys, seed: int) -> None:
        super().__init__(below, below.n, f"Shuffle(seed={seed})")
        self.is_fixed = False
        self._order_seed = seed
        self._orders: EpochCache[permutation.Permutation] = EpochCache()

    def place(self, position: int) -> int:
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
