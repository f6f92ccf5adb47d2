"""Random pipelines by the written grammar, and what they should give: plain lists over the row of epochs, dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any

import hypothesis.strategies as st
import numpy as np

import shmload
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Join, Map, Partition, Permutation, Range
from shmload.schedule.mix import MixOrder

ENOUGH = 1100  # items that a stream's model is asked for


@dataclass(frozen=True)
class Add:
    """A function that every start method can send."""

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

    n: int
    is_shuffled: bool
    repeating: bool
    seed: int

    def stage(self) -> Any:
        return (Permutation if self.is_shuffled else Range)(self.n, repeating=self.repeating, seed=self.seed)

    @property
    def length(self) -> int | None:
        return None if self.repeating else self.n

    def values(self) -> Iterator[int]:
        """Its items, epoch after epoch."""
        for epoch in count():
            if self.is_shuffled:
                yield from shmload.Permutation(self.n, seed=self.seed, epoch=epoch).take(0, self.n).tolist()
            else:
                yield from range(self.n)


@dataclass(frozen=True)
class Joined:
    """A Join of pipelines, each of which adds a number of its own."""

    members: tuple[Leaf | Joined, ...]
    weights: tuple[Any, ...]
    stop: Any

    def stage(self) -> Any:
        return Join(
            [
                (Conveyer([member.stage(), Map(Add(self.offset(number)))]), weight)
                for number, (member, weight) in enumerate(zip(self.members, self.weights, strict=True))
            ],
            stop=self.stop,
        )

    def offset(self, number: int) -> int:
        """What tells a member's items from all others."""
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
        # one without an end may be drawn from through many epochs of a Join around it
        draws = turns(self.weights, 50 * ENOUGH if self.length is None else self.length)
        while True:  # members go on where they stand
            for member in draws:
                yield next(rows[member]) + self.offset(member)
            if self.length is None:
                return


def turns(weights: Any, num_draws: int) -> list[int]:
    """Whose the first draws are, by the mixture of shmload.Mix, which has tests of its own."""
    order = MixOrder([1 << 40] * len(weights), {0: list(weights)}, stop="repeat", shuffle=False)
    return (order.take(0, num_draws, seed=0, epoch=0) >> 40).tolist()


@dataclass(frozen=True)
class Spec:
    """One pipeline."""

    source: Leaf | Joined
    numbers: tuple[int, ...] = ()  # that Maps add, one after the other
    partition_at: int = 0  # among these
    world: int = 1
    uneven: Any = "pad"
    batch_size: int | None = None
    is_partial: bool = True
    num_workers: int = 0
    doubles: bool = False  # whole batches
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
        return Conveyer([self.source.stage(), *stages], **self.options)

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
        """Of each step of an epoch from a position on, what each rank is given. Ranks' rows are dealt from plain lists."""
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
        """What one rank is given, step by step."""
        return (step[rank] for step in self.steps(epoch, position) if step[rank])


def joined_ranges(*pairs: tuple[int, Any], **options: Any) -> Join:
    """A Join of Ranges, each of which adds 1000 times its number."""
    return Join(
        [(Conveyer([Range(n, repeating=False), Map(Add(1000 * number))]), weight) for number, (n, weight) in enumerate(pairs)],
        **options,
    )


def plain(given: Any) -> list[int]:
    """A batch or an item as a list."""
    return given.tolist() if hasattr(given, "tolist") else [given]


def pulled(pipeline: Any, most: int) -> list[list[int]]:
    """So many batches or items, or all to the end."""
    return [plain(given) for given in islice(pipeline, most)]


LEAVES = st.builds(Leaf, st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 3))
WEIGHTS = st.one_of(st.integers(1, 6), st.sampled_from([0.1, 0.25, 1.5, 0.7, 3.3]))


@st.composite
def joined(draw: Callable[..., Any], members: Any) -> Joined:
    chosen = draw(st.lists(members, min_size=1, max_size=3))
    return Joined(tuple(chosen), tuple(draw(WEIGHTS) for _ in chosen), draw(st.sampled_from(["first", "all", "repeat"])))


SOURCES = st.one_of(LEAVES, joined(LEAVES), joined(st.one_of(LEAVES, joined(LEAVES))))


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
