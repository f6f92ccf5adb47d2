"""Strategies for random pipelines, and models of their output in plain lists: the rows of epochs, divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any

import hypothesis.strategies as st
import numpy as np

import shmload
from shmload.pipeline import (
    Chain,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Interleave,
    Items,
    Join,
    Map,
    Partition,
    Permutation,
    Range,
    Repeat,
    Shuffle,
    Skip,
    Take,
    Window,
    Zip,
)
from shmload.schedule.mix_order import MixOrder

ENOUGH = 1100  # items that the model of an endless stream computes


@dataclass(frozen=True)
class Add:
    """A function that every start method can send to workers."""

    number: int

    def __call__(self, x: int) -> int:
        return x + self.number


def doubled(batch: Any) -> Any:
    return batch * 2


def known_item(x: int) -> dict[str, Any]:
    return {"x": x, "noise": np.random.rand()}


@dataclass(frozen=True)
class Leaf:
    """A Range or a Permutation."""

    n: int  # also the number by which an endless row is counted
    is_shuffled: bool
    repeating: bool
    seed: int

    def stages(self) -> list[Any]:
        return [self.stage()]

    def stage(self) -> Any:
        return (Permutation if self.is_shuffled else Range)(self.n, repeating=self.repeating, seed=self.seed)

    @property
    def length(self) -> int | None:
        return None if self.repeating else self.n

    def values(self) -> Iterator[int]:
        """Yields its items, epoch after epoch."""
        for epoch in count():
            if self.is_shuffled:
                yield from shmload.Permutation(self.n, seed=self.seed, epoch=epoch).take(0, self.n).tolist()
            else:
                yield from range(self.n)


@dataclass(frozen=True)
class Joined:
    """A Join of pipelines, each of which adds its own offset."""

    members: tuple[Leaf | Joined, ...]
    weights: tuple[Any, ...]
    stop: Any

    def stages(self) -> list[Any]:
        return [self.stage()]

    def stage(self) -> Any:
        return Join(
            [
                (Conveyer([member.stage(), Map(Add(self.offset(number)))]), weight)
                for number, (member, weight) in enumerate(zip(self.members, self.weights, strict=True))
            ],
            stop=self.stop,
        )

    def offset(self, number: int) -> int:
        """Returns the number that distinguishes a member's items from all others."""
        return (10_000 if isinstance(self.members[number], Joined) else 1000) * (number + 1)

    @property
    def length(self) -> int | None:
        shares = [Fraction(str(weight)) for weight in self.weights]
        ends = [m.length and m.length * sum(shares) / share for m, share in zip(self.members, shares, strict=True)]
        known = [end for end in ends if end is not None]
        if self.stop == "repeat" or not known or (self.stop == "all" and None in ends):
            return None
        return int(min(known)) if self.stop == "first" else -int(-max(known) // 1)

    def values(self) -> Iterator[int]:
        rows = [member.values() for member in self.members]
        # an endless one may be drawn from during many epochs of a Join around it
        draws = turns(self.weights, 50 * ENOUGH if self.length is None else self.length)
        while True:  # members continue where they stopped
            for member in draws:
                yield next(rows[member]) + self.offset(member)
            if self.length is None:
                return


def turns(weights: Any, num_draws: int) -> list[int]:
    """Returns the member of each of the first draws, by the mixture of shmload.Mix, which has its own tests."""
    order = MixOrder([1 << 40] * len(weights), {0: list(weights)}, stop="repeat", shuffle=False)
    return (order.take(0, num_draws, seed=0, epoch=0) >> 40).tolist()


@dataclass(frozen=True)
class Listed:
    """The items of a list."""

    items: tuple[int, ...]
    repeating: bool

    def stages(self) -> list[Any]:
        return [Items(list(self.items), repeating=self.repeating, seed=3)]

    @property
    def n(self) -> int:
        return len(self.items)

    @property
    def length(self) -> int | None:
        return None if self.repeating else len(self.items)

    def values(self) -> Iterator[int]:
        while True:
            yield from self.items


def numbered(pair: tuple[int, int]) -> int:
    return 100 * pair[0] + pair[1]


def weighted_sum(parts: Any) -> int:
    """Returns a number that depends on the order of the parts."""
    return sum((at + 1) * part for at, part in enumerate(parts))


@dataclass(frozen=True)
class Placed:
    """A row after a stage that selects, repeats or groups by position."""

    below: Any
    what: str
    a: int = 1
    b: int = 1

    def stages(self) -> list[Any]:
        made: list[Any] = {
            "take": lambda: [Take(self.a)],
            "skip": lambda: [Skip(self.a)],
            "repeat": lambda: [Repeat(self.a)],
            "for ever": lambda: [Repeat()],
            "enumerate": lambda: [Enumerate(self.a), Map(numbered)],
            "window": lambda: [Window(self.a, self.b), Map(weighted_sum)],
            "shuffle": lambda: [Shuffle(self.a)],
        }[self.what]()
        return [*self.below.stages(), *made]

    @property
    def n(self) -> int:
        """Is the number of items of an epoch, or the number by which an endless row is counted."""
        n, is_endless = self.below.n, self.below.length is None
        if self.what == "take":
            return self.a if is_endless else min(self.a, n)
        if self.what == "window":
            return -(-n // self.b) if is_endless else (n - self.a) // self.b + 1
        return {"skip": n if is_endless else n - self.a, "repeat": n * self.a}.get(self.what, n)

    @property
    def length(self) -> int | None:
        is_endless = self.what == "for ever" or (self.below.length is None and self.what != "take")
        return None if is_endless else self.n

    def values(self) -> Iterator[int]:
        below = self.below.values()
        if self.below.length is None:
            if self.what == "shuffle":
                yield from self._shuffled(below, self.n)
            yield from self._made(below)
        elif self.what in ("repeat", "for ever"):
            yield from below
        elif self.what == "shuffle":
            yield from self._shuffled(below, self.n)
        while True:
            yield from self._made(iter(list(islice(below, self.below.length))))

    def _made(self, values: Iterator[int]) -> Iterator[int]:
        if self.what == "take":
            yield from values if self.below.length is None else islice(values, self.a)
        elif self.what == "skip":
            yield from islice(values, self.a, None)
        elif self.what == "enumerate":
            yield from map(numbered, enumerate(values, self.a))
        else:
            held: list[int] = []
            for value in values:
                held.append(value)
                if len(held) == self.a:
                    yield weighted_sum(held)
                    for _ in range(self.b - self.a):
                        next(values, None)
                    del held[: self.b]

    def _shuffled(self, values: Iterator[int], n: int) -> Iterator[int]:
        for epoch in count():
            items = list(islice(values, n))
            order = shmload.Permutation(n, seed=self.a, epoch=epoch, stream=(1 << 62) + 4)
            yield from (items[place] for place in order.take(0, n))


@dataclass(frozen=True)
class Combined:
    """Several rows, zipped, chained or interleaved."""

    what: str
    rows: tuple[Any, ...]
    block_length: int = 1

    def stages(self) -> list[Any]:
        members = [row.stages() for row in self.rows]
        if self.what == "zip":
            return [Zip(*members), Map(weighted_sum)]
        return [Chain(*members)] if self.what == "chain" else [Interleave(*members, block_length=self.block_length)]

    @property
    def n(self) -> int:
        counts = [row.n for row in self.rows]
        if self.what != "zip":
            return sum(counts)
        return min([row.n for row in self.rows if row.length is not None] or counts)

    @property
    def length(self) -> int | None:
        is_endless = self._are_all_endless if self.what == "zip" else any(row.length is None for row in self.rows)
        return None if is_endless else self.n

    @property
    def _are_all_endless(self) -> bool:
        return all(row.length is None for row in self.rows)

    def values(self) -> Iterator[int]:
        rows = [row.values() for row in self.rows]
        if self.what == "zip" and self._are_all_endless:
            yield from map(weighted_sum, zip(*rows, strict=False))
        while True:
            if self.what == "interleave":
                parts = [
                    values if row.length is None else islice(values, row.length)
                    for row, values in zip(self.rows, rows, strict=True)
                ]
                while parts:
                    for part in list(parts):
                        some = list(islice(part, self.block_length))
                        yield from some
                        if len(some) < self.block_length:
                            parts.remove(part)
            elif self.what == "chain":
                for row, values in zip(self.rows, rows, strict=True):
                    yield from values if row.length is None else islice(values, row.length)
            else:
                parts = [list(islice(values, row.length or self.n)) for row, values in zip(self.rows, rows, strict=True)]
                yield from map(weighted_sum, zip(*parts, strict=False))


@dataclass(frozen=True)
class Spec:
    """A random pipeline and the model of its output."""

    source: Any
    numbers: tuple[int, ...] = ()  # numbers that Maps add, one after the other
    partition_at: int = 0  # index of the Partition among the Maps
    world: int = 1
    uneven: Any = "pad"
    batch_size: int | None = None
    is_partial: bool = True
    num_workers: int = 0
    doubles: bool = False  # doubles whole batches
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, rank: int = 0) -> Conveyer:
        stages: list[Any] = [Map(Add(number)) for number in self.numbers]
        if self.num_workers:
            stages.append(DistributedBatchedMap(Add(0), self.num_workers))
        if self.world > 1:
            stages.insert(self.partition_at, Partition(rank, self.world, uneven=self.uneven))
        if self.batch_size:
            stages.append(Collate(self.batch_size, self.is_partial))
            stages += [Map(doubled)] * self.doubles
        return Conveyer([*self.source.stages(), *stages], **self.options)

    @property
    def stride(self) -> int:
        return (self.batch_size or 1) * self.world

    @property
    def rule(self) -> str:
        if self.batch_size and not self.is_partial:
            return "drop"
        return self.uneven if self.world > 1 else "pad"

    def on(self, world: int) -> Spec:
        return replace(self, world=world)

    def steps(self, epoch: int = 0, position: int = 0) -> Iterator[list[list[int]]]:
        """Yields for each step of an epoch, from a position on, what each rank gets, computed from plain lists."""
        n, size, world = self.source.length, self.batch_size or 1, self.world
        factor = 2 if self.doubles and self.batch_size else 1
        first = 0 if n is None else epoch * n
        values = [(x + sum(self.numbers)) * factor for x in islice(self.source.values(), first + (n or ENOUGH))][first:]
        while position < (ENOUGH - self.stride if n is None else n):
            chunk = values[position : position + self.stride]
            if len(chunk) < self.stride:
                if self.rule == "drop":
                    return
                if self.rule == "exact":
                    yield [part.tolist() for part in np.array_split(np.array(chunk, np.int64), world)]
                    return
                each = -(-len(chunk) // world)
                chunk += [values[at % len(values)] for at in range(each * world - len(chunk))]
                size = each
            yield [chunk[rank * size : (rank + 1) * size] for rank in range(world)]
            position += self.stride

    def of_rank(self, rank: int, epoch: int = 0, position: int = 0) -> Iterator[list[int]]:
        """Yields what one rank gets, step by step."""
        return (step[rank] for step in self.steps(epoch, position) if step[rank])


def join_of_ranges(*pairs: tuple[int, Any], **options: Any) -> Join:
    """Returns a Join of Ranges, each of which adds 1000 times its number."""
    return Join(
        [(Conveyer([Range(n, repeating=False), Map(Add(1000 * number))]), weight) for number, (n, weight) in enumerate(pairs)],
        **options,
    )


def plain(given: Any) -> list[int]:
    """Returns a batch or an item as a list."""
    return given.tolist() if hasattr(given, "tolist") else [given]


def pulled(pipeline: Any, most: int) -> list[list[int]]:
    """Returns the next `most` batches or items as lists."""
    return [plain(given) for given in islice(pipeline, most)]


LEAVES = st.builds(Leaf, st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 3))
WEIGHTS = st.one_of(st.integers(1, 6), st.sampled_from([0.1, 0.25, 1.5, 0.7, 3.3]))


@st.composite
def joined(draw: Callable[..., Any], members: Any) -> Joined:
    chosen = draw(st.lists(members, min_size=1, max_size=3))
    return Joined(tuple(chosen), tuple(draw(WEIGHTS) for _ in chosen), draw(st.sampled_from(["first", "all", "repeat"])))


@st.composite
def placed(draw: Callable[..., Any], below: Any) -> Placed:
    row = draw(below)
    kinds = ["take", "enumerate", "window", "shuffle"]
    if row.length is None or row.n > 1:
        kinds.append("skip")
    if row.length is not None:
        kinds += ["repeat", "for ever"]
    what, most = draw(st.sampled_from(kinds)), 4
    if row.length is not None and what in ("window", "skip"):
        most = min(most, row.n - (what == "skip"))
    return Placed(row, what, draw(st.integers(1, most)), draw(st.integers(1, 3)))


@st.composite
def combined(draw: Callable[..., Any], rows: Any) -> Combined:
    what, chosen = draw(st.sampled_from(["zip", "chain", "interleave"])), draw(st.lists(rows, min_size=1, max_size=3))
    if what == "interleave":
        chosen = [row for row in chosen if (row.length is None) == (chosen[0].length is None)]
    if what == "chain":
        chosen.sort(key=lambda row: row.length is None)
        chosen = [row for row in chosen if row.length is not None] + [row for row in chosen if row.length is None][:1]
    return Combined(what, tuple(chosen), draw(st.integers(1, 3)))


LISTS = st.builds(Listed, st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple), st.booleans())
JOINS = st.one_of(joined(LEAVES), joined(st.one_of(LEAVES, joined(LEAVES))))
ROWS = st.recursive(st.one_of(LEAVES, LISTS), lambda rows: st.one_of(placed(rows), placed(rows), combined(rows)), max_leaves=4)
SOURCES = st.one_of(LEAVES, JOINS, ROWS, ROWS)


@st.composite
def specs(draw: Callable[..., Any], sources: Any = SOURCES, num_workers: int = 0) -> Spec:
    numbers = tuple(draw(st.lists(st.integers(-5, 5), max_size=3)))
    return Spec(
        source=draw(sources),
        numbers=numbers,
        partition_at=draw(st.integers(0, len(numbers))),
        world=draw(st.integers(1, 4)),
        uneven=draw(st.sampled_from(["pad", "drop", "exact"])),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 5))),
        is_partial=draw(st.booleans()),
        doubles=draw(st.booleans()),
        num_workers=num_workers,
    )
