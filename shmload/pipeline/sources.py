"""Rows of items that can be read at any place: sources, and what is made of a row by where its items stand.

A row numbers the items of all its epochs, end to end: position e * n + p is item p of epoch e. A row that repeats has no end, and
its epochs only say how it is counted. What is made of a row is a row again: item k is read by reading those items of the one below
that it is made of, so a place in it is a number, and any worker reads any item.

    Items(["a", "b", "c"])      a b c | a b c | ...
    Skip(1)                     b c | b c | ...
    Enumerate()                 (0, b) (1, c) | (0, b) (1, c) | ...

An order of rows gives keys, which travel to the workers, and a key stands for an item. A Range's, a Permutation's and a Join's say
which item it is; those of all other rows are its positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.pipeline.methods import Fluent
from shmload.schedule import key_streams, permutation
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.digest import digest
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.permutation import MAX_N
from shmload.worker.stage_engine import Each, called, noted
from shmload.world import package_ability

SEED = 1234  # of sources that are given none
MAX_WORKERS = 16000


class Keys(Fluent):
    """What is asked of a row. Its positions number the items of all epochs, end to end.

    Attributes:
        n: items of an epoch.
        identity: which order it is; a state saved under another is refused.
        members: what keys are made of, for who reads them: n of a plain source, the list of its members' of a Join.
        num_counters: what a resume needs besides the position.
        is_fixed: item p is the same in every epoch, but for what is drawn at random.
        parts: the rows that it is made of.
    """

    is_fixed = False
    parts: Sequence[Keys] = ()
    n: int
    seed: int
    repeating: bool
    identity: str
    members: Any
    num_counters = 0
    pools: Sequence[Any] = ()  # workers that its members ask for
    n_workers = 0  # that it asks for itself

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop)."""
        raise NotImplementedError

    def item(self, key: int) -> Any:
        """What a key stands for."""
        return key % self.n

    def name(self, key: int) -> str:
        """What a key stands for, for people."""
        return "item {1} of epoch {0}".format(*divmod(key, self.n))

    def at(self, position: int) -> Any:
        """The item at a position."""
        return self.item(self.key(position))

    def key(self, position: int) -> int:
        """The key at a position."""
        return int(self.keys_at(position, position + 1)[0])

    def counters_at(self, position: int) -> list[int]:
        """What a resume there needs besides the position."""
        return []

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what `counters_at` gave; StateMismatch if it cannot have."""
        if counters:
            raise StateMismatch(f"a {type(self).__name__} has no counters; the state has {counters!r:.200}")


def set_whole(stage: Any, what: str, field: str, least: int, most: int) -> None:
    """Checks a whole number, and makes it Python's own: it comes into states, which are JSON."""
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{what} is a whole number from {least} to {most}; got {value!r}")
    object.__setattr__(stage, field, int(value))


def check_flag(what: str, value: Any) -> None:
    """Checks a truth value: "no" would be one."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} is True or False; got {value!r}")


# ------------------------------------------------------------ sources


@dataclass(frozen=True)
class Source(Keys):
    """Where a pipeline's items come from: integers, epoch after epoch, each once in every epoch."""

    n_elements: int
    _: KW_ONLY
    repeating: bool = True
    seed: int = SEED

    def __post_init__(self) -> None:
        name = type(self).__name__
        set_whole(self, f"{name}(n_elements)", "n_elements", 1, permutation.MAX_N)
        set_whole(self, f"{name}(seed)", "seed", 0, MAX_UINT64)
        check_flag(f"{name}(repeating)", self.repeating)
        identity = f"{name}({self.n_elements}, seed={self.seed}, repeating={self.repeating})"
        self.__dict__.update(n=self.n_elements, members=self.n_elements, identity=identity)

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop) of the endless row of epochs; key = item + epoch * n.

        So what is keyed by it, such as an item's random numbers, is new in every epoch (of the largest n, in the first few).
        """
        n = self.n_elements
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):
            epoch, place = divmod(start + done, n)
            part = out[done : done + n - place]
            self._fill(epoch, place, part)
            part += epoch % max(permutation.MAX_N // n, 1) * n
            done += len(part)
        return out

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        """Writes the items from that place of an epoch on."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Source):
    """The integers 0 to n_elements - 1 in their order, epoch after epoch.

    Args:
        n_elements: how many items, at least 1.
        repeating: whether another epoch follows each. False: the pipeline ends with its epoch.
        seed: 0 to 2**64 - 1; of what `shmload.sample_rng()` and the global generators draw for each item.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    is_fixed = True

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        out[:] = np.arange(place, place + len(out))

    def key(self, position: int) -> int:
        return position


@dataclass(frozen=True)
class Permutation(Source):
    """The integers 0 to n_elements - 1 in a random order, another in every epoch, each once in every epoch.

    All n_elements are permuted, whatever their number, in memory that does not grow with it: `shmload.Permutation` says how.

    Args:
        n_elements: how many items, at least 1.
        repeating: whether another epoch follows each. False: the pipeline ends with its epoch.
        seed: 0 to 2**64 - 1; of the order, and of what `shmload.sample_rng()` and the global generators draw for each item.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        self._orders.get(self.seed, epoch, self._order).fill(place, out)

    @cached_property
    def _orders(self) -> EpochCache[permutation.Permutation]:
        return EpochCache()  # of its own: a Join may have many members

    def _order(self, seed: int, epoch: int) -> permutation.Permutation:
        return permutation.Permutation(self.n_elements, seed=seed, epoch=epoch)


class Row(Keys):
    """A row whose keys are its positions."""

    def __init__(self, n: int, identity: str, *, repeating: bool, seed: int) -> None:
        self.n = self.members = n
        self.identity, self.repeating, self.seed = identity, repeating, seed

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange(start, stop, dtype=np.int64)

    def __init_subclass__(cls) -> None:
        if "item" in vars(cls):
            cls.at = cls.item  # type: ignore[assignment, method-assign]  # methods are set; keys are positions: a call less an item

    def key(self, position: int) -> int:
        return position

    def item(self, key: int) -> Any:
        raise NotImplementedError


class Items(Row):
    """The items of a sequence or a dataset in their order: whatever has a length and can be indexed.

    Args:
        items: a list, an array, a dataset of torch's or of `shmload.formats`, a `RemoteDataset` (each epoch in its own order of
            that epoch). Workers read it, each its own copy.
        repeating: whether another epoch follows each.
        seed: 0 to 2**64 - 1; of what `shmload.sample_rng()` and the global generators draw for each item.
        n_workers: worker processes that it asks for, beside those of DistributedBatchedMap.
    Raises:
        ValueError, TypeError: it is empty, or no such thing.
    """

    def __init__(self, items: Any, *, repeating: bool = False, seed: int = SEED, n_workers: int = 0) -> None:
        name = type(items).__name__
        keyed_items = package_ability(items, "keyed_items")
        self.is_keyed = keyed_items is not None  # its items are asked for by their number in an epoch
        items = items if keyed_items is None else keyed_items()
        try:
            n = len(items) if hasattr(items, "__getitem__") and not hasattr(items, "keys") else None
        except TypeError:  # of an array without dimensions, or a class
            n = None
        if n is None:
            raise TypeError(
                f"Items needs something with a length that is indexed by 0, 1, ...; got a {name}. An iterable is Stream(...)"
            )
        if not n:
            raise ValueError(f"Items: a pipeline needs at least one item; this {name} has none")
        check_flag("Items(repeating)", repeating)
        self.items, self.n_workers = items, n_workers
        self.is_fixed = not (self.is_keyed and items.order.shuffle)
        made_of = f"Items({name} of {n}, seed={seed}, repeating={repeating})"
        super().__init__(n, made_of, repeating=repeating, seed=seed)
        set_whole(self, "Items(seed)", "seed", 0, MAX_UINT64)
        set_whole(self, "Items(n_workers)", "n_workers", 0, MAX_WORKERS)

    def item(self, key: int) -> Any:
        if self.is_keyed:
            epoch, place = divmod(key, self.n)
            return self.items.item(place, epoch)
        return self.items[key % self.n]


class Generate(Row):
    """What a function makes of each position: samples that are drawn or computed, and stored nowhere.

    Args:
        fn: position -> item; positions count on over the epochs. What it draws from `shmload.sample_rng()` is the item's own.
        n_elements: items of an epoch, at least 1.
        repeating: whether another epoch follows each: then it has no end.
        seed: 0 to 2**64 - 1; of what `shmload.sample_rng()` and the global generators draw for each item.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    def __init__(self, fn: Callable[[int], Any], n_elements: int, *, repeating: bool = False, seed: int = SEED) -> None:
        if not callable(fn):
            raise TypeError(f"Generate(fn) is a function of a position; got {fn!r}")
        self.fn, self.n_elements = fn, n_elements
        set_whole(self, "Generate(n_elements)", "n_elements", 1, MAX_N)
        check_flag("Generate(repeating)", repeating)
        made_of = f"Generate({self.n_elements}, seed={seed}, repeating={repeating})"
        super().__init__(self.n_elements, made_of, repeating=repeating, seed=seed)
        set_whole(self, "Generate(seed)", "seed", 0, MAX_UINT64)

    def item(self, key: int) -> Any:
        return called(self.fn, key, "Generate")


# ------------------------------------------------------------ what is made of one row


class Mapped(Row):
    """The items of a row behind functions."""

    def __init__(self, below: Keys, stages: Sequence[Each]) -> None:
        super().__init__(below.n, below.identity, repeating=below.repeating, seed=below.seed)
        self.below, self._functions = below, {stage.name: stage for stage in stages}  # by name: an error of pickling shows it
        self.is_fixed, self.parts = below.is_fixed, (below,)

    @property
    def functions(self) -> list[Each]:
        """The functions."""
        return list(self._functions.values())

    def item(self, key: int) -> Any:
        item = self.below.at(key)
        try:
            for stage in self._functions.values():  # what `through` does, without a call more for each item
                item = stage.function(item)
        except Exception as error:
            error = noted(error, stage, f", of {self.below.name(self.below.key(key))}")
            raise error
        return item


class Derived(Row):
    """A row whose items are made of those of another one.

    Args:
        n: items of an epoch.
        what: the stage that makes it, with its arguments.
    """

    def __init__(self, below: Keys, n: int, what: str, *, repeating: bool | None = None) -> None:
        is_endless = below.repeating if repeating is None else repeating
        super().__init__(n, f"{what} of {_short(below.identity)}", repeating=is_endless, seed=below.seed)
        self.below, self.parts = below, (below,)
        self.is_fixed = below.is_fixed and not below.repeating

    def place(self, position: int) -> int:
        """Where in the row below an item stands, or begins."""
        return position

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """`place` of several."""
        place: Any = self.place  # arithmetic, which arrays have, too
        made: NDArray[np.int64] = place(positions)
        return made

    def item(self, key: int) -> Any:
        return self.below.at(self.place(key))

    def name(self, key: int) -> str:
        place = self.place(key)
        return self.below.name(self.below.key(place))


@dataclass(frozen=True)
class Take:
    """The first items of each epoch; of a row that repeats the next ones, epoch after epoch.

    Args:
        n: how many, at least 1; where there are fewer, all.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Take(n)", "n", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """What it makes of a row."""
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
    """All but the first items of each epoch; of a row that repeats, all but its first items.

    Args:
        n: how many, from 0.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole(self, "Skip(n)", "n", 0, MAX_N)

    def over(self, below: Keys) -> Keys:
        """What it makes of a row.

        Raises:
            ValueError: nothing is left of it.
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
    """So many epochs as one.

    Args:
        times: at least 1; None: without end.
    """

    times: int | None = None

    def __post_init__(self) -> None:
        if self.times is not None:
            set_whole(self, "Repeat(times)", "times", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """What it makes of a row.

        Raises:
            ValueError: it repeats by itself, or an epoch would be too long.
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
    """Pairs of a number and the item. It counts the items of an epoch, of a row that repeats all items.

    Args:
        start: the first number.
    """

    start: int = 0

    def __post_init__(self) -> None:
        set_whole(self, "Enumerate(start)", "start", -MAX_N, MAX_N)

    def over(self, below: Keys) -> Keys:
        """What it makes of a row."""
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
    """Lists of neighbouring items: n-grams, or with `step=size` items by the dozen. What fills no window is left out.

    Args:
        size: items of each, at least 1.
        step: from the first item of one to the first of the next, at least 1.
    """

    size: int
    step: int = 1

    def __post_init__(self) -> None:
        set_whole(self, "Window(size)", "size", 1, MAX_N)
        set_whole(self, "Window(step)", "step", 1, MAX_N)

    def over(self, below: Keys) -> Keys:
        """What it makes of a row.

        Raises:
            ValueError: no window is full.
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
    """A random order of each epoch's items, another one in each epoch, each item once in it.

    Args:
        seed: 0 to 2**64 - 1; of the order. None: the source's.
        buffer_size: a random one of so many items each time, for items whose places are not known; the seed does not count then.
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
        """Whether it needs no places."""
        return self.buffer_size is not None

    def over(self, below: Keys) -> Keys:
        """What it makes of a row."""
        return Shuffled(below, below.seed if self.seed is None else self.seed)


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


_SHUFFLES = key_streams.SAMPLES + 4  # of orders: apart from those of a Permutation with the same seed


# ------------------------------------------------------------ what is made of several rows


class Zipped(Row):
    """Tuples of the rows' items, to the end of the shortest."""

    def __init__(self, rows: Sequence[Keys]) -> None:
        ending = [row.n for row in rows if not row.repeating]
        names = ", ".join(row.identity for row in rows)
        super().__init__(min(ending or [row.n for row in rows]), f"Zip({_short(names)})", repeating=not ending, seed=rows[0].seed)
        self._rows = self.parts = list(rows)
        self.is_fixed = _are_fixed(rows)

    def item(self, key: int) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        return tuple([row.at(epoch * (self.n if row.repeating else row.n) + item) for row in self._rows])


class Chained(Row):
    """The rows' epochs, one behind the other."""

    def __init__(self, rows: Sequence[Keys]) -> None:
        if endless := [number for number, row in enumerate(rows[:-1]) if row.repeating]:
            raise ValueError(
                f"member {endless[0]} of the Chain repeats, so what follows it would never come: give it repeating=False"
            )
        names = ", ".join(row.identity for row in rows)
        super().__init__(sum(row.n for row in rows), f"Chain({_short(names)})", repeating=rows[-1].repeating, seed=rows[0].seed)
        self._rows = self.parts = list(rows)
        self.is_fixed = _are_fixed(rows)
        self._ends = np.cumsum([row.n for row in rows]).tolist()

    def item(self, key: int) -> Any:
        return self._found(key, lambda row, place: row.at(place))

    def name(self, key: int) -> str:
        found: str = self._found(key, lambda row, place: row.name(row.key(place)))
        return found

    def _found(self, key: int, look: Callable[[Keys, int], Any]) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        which = min(bisect_right(self._ends, item), len(self._rows) - 1)
        row, first = self._rows[which], self._ends[which - 1] if which else 0
        return look(row, epoch * row.n + item - first)


class Interleaved(Row):
    """So many items of each row in turn; a row that has ended is left out."""

    def __init__(self, rows: Sequence[Keys], block_length: int) -> None:
        if len({row.repeating for row in rows}) > 1:
            raise ValueError("members of an Interleave repeat, and others end: give all of them the same `repeating`")
        names = ", ".join(row.identity for row in rows)
        is_endless = rows[0].repeating
        super().__init__(
            sum(row.n for row in rows), f"Interleave({_short(names)}, {block_length})", repeating=is_endless, seed=rows[0].seed
        )
        self._rows = self.parts = list(rows)
        self.is_fixed, self._length = _are_fixed(rows), block_length
        self._phases = list(self._made([MAX_N] * len(rows) if is_endless else [row.n for row in rows]))
        self._starts = [start for start, _, _, _ in self._phases]

    def _made(self, left: list[int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Rounds that are alike: where they begin, whose turns they have, the turns' borders, and what each row gave before."""
        start, had = 0, [0] * len(left)
        while active := [row for row, count in enumerate(left) if count]:
            num_rounds = min(left[row] // self._length for row in active) or 1
            counts = [min(self._length, left[row]) for row in active]
            yield start, active, [0, *np.cumsum(counts).tolist()], had.copy()
            for row, count in zip(active, counts, strict=True):
                left[row] -= count * num_rounds
                had[row] += count * num_rounds
            start += sum(counts) * num_rounds

    def _found(self, key: int) -> tuple[Keys, int]:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        start, active, ends, had = self._phases[bisect_right(self._starts, item) - 1]
        number, place = divmod(item - start, ends[-1])
        turn = bisect_right(ends, place) - 1
        row = active[turn]
        count = ends[turn + 1] - ends[turn]
        return self._rows[row], epoch * self._rows[row].n + had[row] + number * count + place - ends[turn]

    def item(self, key: int) -> Any:
        row, position = self._found(key)
        return row.at(position)

    def name(self, key: int) -> str:
        row, position = self._found(key)
        return row.name(row.key(position))


def _are_fixed(rows: Sequence[Keys]) -> bool:
    return all(row.is_fixed and not row.repeating for row in rows)


def _short(names: str) -> str:
    return names if len(names) <= 200 else digest(np.frombuffer(names.encode(), np.uint8))
