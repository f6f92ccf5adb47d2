"""The stages of a fluent pipeline: from an iterator of items to another, with the meaning webdataset 1.0.2 gives them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from shmload.remote.collation import first_of
from shmload.remote.decoding import SampleDecoder
from shmload.remote.handlers import Handler, reraise_exception
from shmload.worker.failure import no_end

__all__ = ["Batch", "Each", "Select", "Shuffle", "Slice", "Stage", "Then", "Unbatch"]

_DROP = object()


class Stage(Protocol):
    """One step."""

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        """What comes out of what goes in.

        Args:
            seed: of this stage's randomness in this worker and epoch.
        """


@dataclass(frozen=True)
class Each:
    """A function of each item: decode, map and the like. An item whose function gives `_DROP` is left out."""

    name: str
    function: Callable[[Any], Any]
    handler: Handler = reraise_exception

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        function = self.function
        for item in items:
            try:
                made = _of_one(self.name, function, item)
            except Exception as error:
                if self.handler(error):
                    continue
                return
            if made is not _DROP:
                yield made


@dataclass(frozen=True)
class Mapped:
    """map(f): the key of a sample stays; None leaves it out."""

    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        made = self.function(item)
        if made is None:
            return _DROP
        if isinstance(item, dict) and isinstance(made, dict):
            made["__key__"] = item.get("__key__")
        return made


@dataclass(frozen=True)
class MappedDict:
    """map_dict(name=f)."""

    functions: Mapping[str, Callable[[Any], Any]]

    def __call__(self, sample: Any) -> Any:
        _needs_dict("map_dict", sample)
        made = dict(sample)
        for name, function in self.functions.items():
            if name not in made:
                raise ValueError(f"map_dict: there is no {name!r} in the sample, only {', '.join(map(repr, made))}")
            made[name] = function(made[name])
        return made


@dataclass(frozen=True)
class MappedTuple:
    """map_tuple(f, g): field by field; further fields stay."""

    functions: Sequence[Callable[[Any], Any] | None]

    def __call__(self, item: Any) -> Any:
        if not isinstance(item, (list, tuple)):
            raise TypeError(f"map_tuple needs a tuple, got a {type(item).__name__}: call to_tuple(...) before it")
        made = list(item)
        for number, function in enumerate(self.functions[: len(made)]):
            if function is not None:
                made[number] = function(made[number])
        return tuple(made)


@dataclass(frozen=True)
class ToTuple:
    """to_tuple("jpg;png", "cls")."""

    fields: Sequence[str]
    missing_is_error: bool
    none_is_error: bool

    def __call__(self, sample: Any) -> tuple[Any, ...]:
        _needs_dict("to_tuple", sample)
        made = tuple(first_of(sample, names, "to_tuple", self.missing_is_error) for names in self.fields)
        if self.none_is_error and any(value is None for value in made):
            names = [name for name, value in zip(self.fields, made, strict=True) if value is None]
            raise ValueError(f"to_tuple: {', '.join(map(repr, names))} of sample {sample.get('__key__')!r} is None")
        return made


@dataclass(frozen=True)
class Renamed:
    """rename(new="old;older")."""

    names: Mapping[str, str | Sequence[str]]
    keep: bool

    def __call__(self, sample: Any) -> dict[str, Any]:
        _needs_dict("rename", sample)
        found = {name: first_of(sample, old, "rename", True) for name, old in self.names.items()}
        if not self.keep:
            return found
        replaced = {name for old in self.names.values() for name in (old.split(";") if isinstance(old, str) else old)}
        return {**{name: value for name, value in sample.items() if name not in replaced}, **found}


@dataclass(frozen=True)
class Decoded:
    """decode(...)."""

    decoder: SampleDecoder

    def __call__(self, sample: Any) -> dict[str, Any]:
        _needs_dict("decode", sample)
        return self.decoder(sample)


@dataclass(frozen=True)
class Select:
    """Only the items that a function says True of."""

    predicate: Callable[[Any], Any]

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        for item in items:  # not filter(), which a StopIteration of the function would end
            if _of_one("select", self.predicate, item):
                yield item


@dataclass(frozen=True)
class Shuffle:
    """A buffer that gives a random one of what it holds. Its numbers depend on seed, epoch, rank and worker alone."""

    size: int
    initial: int

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        draws = random.Random(seed)
        held: list[Any] = []

        def pick() -> Any:
            place = draws.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            return held.pop()

        for item in items:
            held.append(item)
            if len(held) < self.size:
                held += islice(items, 1)
            if len(held) >= self.initial:
                yield pick()
        while held:
            yield pick()


@dataclass(frozen=True)
class Batch:
    """So many items in each."""

    size: int
    collation_fn: Callable[[list[Any]], Any] | None
    partial: bool

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        while held := list(islice(items, self.size)):
            if len(held) == self.size or self.partial:
                yield held if self.collation_fn is None else _of_one("batched", self.collation_fn, held)


@dataclass(frozen=True)
class Unbatch:
    """The items of batches."""

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        for batch in items:
            if isinstance(batch, (list, tuple)):
                for number in range(len(batch[0]) if batch else 0):
                    yield tuple(column[number] for column in batch)
            elif isinstance(batch, dict):
                lengths = {len(column) for column in batch.values()}
                if len(lengths) != 1:
                    raise ValueError(f"unbatched: the columns of a batch are of one length, these of {sorted(lengths)}")
                for number in range(lengths.pop()):
                    yield {name: column[number] for name, column in batch.items()}
            else:
                raise TypeError(f"unbatched needs batches, tuples or dicts of columns; got a {type(batch).__name__}")


@dataclass(frozen=True)
class Slice:
    """Some of the items of each worker: a slice whose place in the whole pass is not known before it is read."""

    start: int
    stop: int | None
    step: int

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        return islice(items, self.start, self.stop, self.step)


@dataclass(frozen=True)
class Then:
    """A function of the iterator."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, items: Iterator[Any], seed: int) -> Iterator[Any]:
        return iter(self.function(items, *self.args, **self.kwargs))


def _of_one(stage: str, function: Callable[[Any], Any], item: Any) -> Any:
    """What a function makes of an item; a StopIteration of its is no end of the items."""
    try:
        return function(item)
    except StopIteration as error:
        first = item[0] if isinstance(item, list) and item else item
        key = first.get("__key__") if isinstance(first, Mapping) else None
        of_sample = "" if key is None else f" at sample {key!r}"
        raise no_end(error, f"the function of {stage}{of_sample}") from error


def _needs_dict(method: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise TypeError(f"{method} needs samples that are dicts, got a {type(item).__name__}: call it before to_tuple")
