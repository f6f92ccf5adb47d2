"""The stage engine: what is done with items on their way from a source to a batch, under pipelines and fluent readers alike.

    Each     an item of an item: map, decode, to_tuple; may leave it out
    Stage    items of items: select, shuffle, batches, a generator of the user's own

A program is a list of these, and what is known of the items before any is read: which samples make up the k-th one.

    samples of a rank     0 1 2 3 4 5 6 7 8 9 ...
    slice(2, None)        . . 0 1 2 3 4 5 6 7
    batched(3)                |  0  |  1  | 2        units

Workers take units in turn: worker w those of w, w + n, ... So every batch is whole whatever the number of workers, the batches are
the same ones in the same order (torch takes workers in turn, too), and their number is known before any sample is read. Dealing
samples instead would give each worker a short batch of its own at the end.

`shuffle` keeps the number, not which is which. `select`, `unbatched` and `then` end that knowledge.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.worker.failure import no_end

Handler = Callable[[Exception], bool]
DROP = object()  # what a function gives for an item that is left out


def called(function: Callable[[Any], Any], value: Any, stage: str) -> Any:
    """What a stage's function makes of an item or a batch. Its StopIteration is an error: it would end the items."""
    try:
        return function(value)
    except StopIteration as error:
        first = value[0] if isinstance(value, list) and value else value
        key = first.get("__key__") if isinstance(first, Mapping) else None
        of_sample = "" if key is None else f" at sample {key!r}"
        raise no_end(error, f"the function of {stage}{of_sample}") from error


class Placed(NamedTuple):
    """An item of a fluent reader on its way through the stages, with the sample that errors name.

    Attributes:
        place: (shard's URL, sample's key); None: not known, as of items that a generator of the user's has made.
        is_batch: whether the sample is the first one of a batch.
    """

    item: Any
    place: tuple[Any, Any] | None
    is_batch: bool = False


Items = Iterator[Placed]


def placed(item: Any) -> Placed:
    """Return an item with its place, if it is a sample that says it."""
    is_named = isinstance(item, Mapping) and "__key__" in item and "__url__" in item
    return Placed(item, (item["__url__"], item["__key__"]) if is_named else None)


def located(error: Exception, stage: str, at: Placed) -> Exception:
    """Return the error of a stage with its sample: in the text where that is the only argument, else in a note."""
    if at.place is None:
        return error
    url, key = at.place
    if str(url) in str(error) and repr(key) in str(error):
        return error
    where = f"{url}: {'the batch that begins with sample' if at.is_batch else 'sample'} {key!r}"
    before = error.args
    if len(before) == 1 and before[0] == str(error):
        text = before[0] if before[0].startswith(f"{stage}:") else f"{stage}: {before[0]}"
        error.args = (f"{where}: {text}",)
        if str(error) == error.args[0]:
            return error
        error.args = before
    error.add_note(f"shmload: {stage}, of {where}")
    return error


@dataclass(frozen=True)
class Each:
    """A function of each item.

    Attributes:
        name: for people.
        handler: of its exceptions: True leaves the item out, False ends the items; None raises them.
    """

    name: str
    function: Callable[[Any], Any]
    handler: Handler | None = None

    def __call__(self, item: Any) -> Any:
        return called(self.function, item, self.name)

    def run(self, items: Items, seed: int) -> Items:
        for at in items:
            try:
                made = self(at.item)
            except Exception as error:
                error = located(error, self.name, at)
                if self.handler is None:
                    raise
                if self.handler(error):
                    continue
                return
            if made is not DROP:
                yield at._replace(item=made)


def through(stages: Iterable[Each], value: Any, name: Callable[[int], str] | None = None, key: int = 0) -> Any:
    """The value behind some functions, one after the other. Of an exception a note says whose it is, and of what.

    Args:
        name: key -> what it stands for, for people.
    """
    stage = None
    try:
        for stage in stages:
            value = stage.function(value)
    except Exception as error:
        assert stage is not None
        error = noted(error, stage, "" if name is None else f", of {name(key)}")
        raise error
    return value


def noted(error: Exception, stage: Each, of_what: str) -> Exception:
    """An exception of a stage's function, with a note of whose it is, and of what."""
    if isinstance(error, StopIteration):  # which would end the items
        error = no_end(error, f"the function of {stage.name}")
    error.add_note(f"shmload: {stage.name}{of_what}")
    return error


@dataclass(frozen=True)
class Stage:
    """A function of the iterator.

    Attributes:
        name: for people.
        function: (items, seed, *arguments) -> items; the seed is of this stage's randomness in this worker and epoch.
    """

    name: str
    function: Callable[..., Items]
    arguments: tuple[Any, ...] = ()

    def run(self, items: Items, seed: int) -> Items:
        return self.function(items, seed, *self.arguments)


def select(items: Items, seed: int, predicate: Callable[[Any], Any]) -> Items:
    """Only the items that a function says True of."""
    for at in items:  # not filter(), which a StopIteration of the function would end
        try:
            is_wanted = called(predicate, at.item, "select")
        except Exception as error:
            located(error, "select", at)
            raise
        if is_wanted:
            yield at


def shuffle(items: Items, seed: int, size: int, initial: int) -> Items:
    """A buffer that gives a random one of what it holds. Its numbers depend on seed, epoch, rank and worker alone."""
    draws = random.Random(seed)
    held: list[Placed] = []

    def pick() -> Placed:
        place = draws.randrange(len(held))
        held[place], held[-1] = held[-1], held[place]
        return held.pop()

    for item in items:
        held.append(item)
        if len(held) < size:
            held += islice(items, 1)
        if len(held) >= initial:
            yield pick()
    while held:
        yield pick()


def batch(items: Items, seed: int, size: int, collation_fn: Callable[[list[Any]], Any] | None, partial: bool) -> Items:
    """So many items in each."""
    while held := list(islice(items, size)):
        if len(held) == size or partial:
            at = Placed([each.item for each in held], held[0].place, is_batch=True)
            try:
                made = at.item if collation_fn is None else called(collation_fn, at.item, "batched")
            except Exception as error:
                located(error, "batched", at)
                raise
            yield at._replace(item=made)


def unbatch(items: Items, seed: int) -> Items:
    """The items of batches."""
    for at in items:
        batch = at.item
        if isinstance(batch, (list, tuple)):
            for number in range(len(batch[0]) if batch else 0):
                yield at._replace(item=tuple(column[number] for column in batch))
        elif isinstance(batch, dict):
            lengths = {len(column) for column in batch.values()}
            if len(lengths) != 1:
                raise ValueError(f"unbatched: the columns of a batch are of one length, these of {sorted(lengths)}")
            for number in range(lengths.pop()):
                yield at._replace(item={name: column[number] for name, column in batch.items()})
        else:
            raise TypeError(f"unbatched needs batches, tuples or dicts of columns; got a {type(batch).__name__}")


def some(items: Items, seed: int, start: int, stop: int | None, step: int) -> Items:
    """Some of the items of each worker: a slice whose place in the whole pass is not known before it is read."""
    return islice(items, start, stop, step)


def piped(
    items: Items, seed: int, function: Callable[..., Iterable[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Items:
    """A function of the iterator. It may take several items for one, so the place of what it gives is what that says itself."""
    return map(placed, function((at.item for at in items), *args, **kwargs))


@dataclass(frozen=True)
class Sliced:
    """Some of the items below, as range says: start, stop, step."""

    start: int
    stop: int | None
    step: int

    def count(self, below: int) -> int:
        return len(range(below)[self.start : self.stop : self.step])

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        return self.start + numbers * self.step


@dataclass(frozen=True)
class Batched:
    """So many items below in each."""

    size: int
    partial: bool

    def count(self, below: int) -> int:
        return -(-below // self.size) if self.partial else below // self.size

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        found = (numbers[:, None] * self.size + np.arange(self.size)).reshape(-1)
        return found[found < below]


@dataclass(frozen=True)
class Units:
    """The levels, from the samples upward."""

    levels: tuple[Sliced | Batched, ...] = ()

    def counts(self, num_samples: int) -> list[int]:
        """Items at each level, the samples first."""
        found = [num_samples]
        for level in self.levels:
            found.append(level.count(found[-1]))
        return found

    def count(self, num_samples: int) -> int:
        """Units that so many samples make."""
        return self.counts(num_samples)[-1]

    def samples(self, unit: int, num_samples: int) -> NDArray[np.int64]:
        """The samples of a unit, numbered as the rank has them."""
        found = np.array([unit], np.int64)
        counts = self.counts(num_samples)
        for level, below in zip(reversed(self.levels), reversed(counts[:-1]), strict=True):
            found = level.items(found, below)
        return found


_NO_LEVELS = Units()
Known = Literal["units", "number", "nothing"]


@dataclass(frozen=True)
class Program:
    """What is done with the samples.

    Attributes:
        units: which samples make up the items, as far as that is known.
        known: "units": the k-th item is the k-th unit; "number": there are as many items as units; "nothing".
        unknown: the stage that ended the knowledge.
        repetitions: epochs in a pass; None: without end.
        limit: items of a pass; None: all.
        length: what len() is to say.
    """

    stages: tuple[Each | Stage, ...] = ()
    units: Units = _NO_LEVELS
    known: Known = "units"
    unknown: str = ""
    repetitions: int | None = 1
    limit: int | None = None
    length: int | None = None

    def then(self, stage: Each | Stage) -> Program:
        return replace(self, stages=(*self.stages, stage))

    def ended_by(self, name: str) -> Program:
        return self if self.known == "nothing" else replace(self, known="nothing", unknown=name)

    def count(self, num_samples: int) -> int:
        """Items of a pass over so many samples.

        Raises:
            TypeError: nobody can know.
        """
        if self.length is not None:
            return self.length
        if self.limit is not None:
            return self.limit
        if self.repetitions is None:
            raise TypeError("a dataset with repeat() has no end, and no len(): give repeat a number, or with_epoch(n)")
        if self.known == "nothing":
            raise TypeError(
                f"the number of items behind {self.unknown} is not known before they are read: give it by with_length(n), or bound "
                "a pass by with_epoch(n)"
            )
        return self.repetitions * self.units.count(num_samples)

    def run(self, samples: Iterator[Any], seed: int) -> Iterator[Any]:
        """The items that come of samples."""
        items: Items = map(placed, samples)
        for number, stage in enumerate(self.stages):
            items = stage.run(items, seed + number)
        return (at.item for at in items)
