"""The stages of a fluent pipeline: from an iterator of items to another, with the meaning webdataset 1.0.2 gives them.

What becomes of a sample that a stage fails on, as webdataset names it: functions of the exception.

True: go on without the sample. False: end the pass. Or they raise.

Samples to columns, and fields by several names, as webdataset 1.0.2 has them.

decode(): from the bytes of a sample's members to values, by handlers of (extension, bytes), as webdataset 1.0.2 has them.

    pre         what unpacks (.gz): gives a Continue, with which the rest go on
    handlers    image specs and the user's own; the first that gives something other than None
    post        by the extension's last part: formats/tar/members.py
    nothing     the bytes as they are

What can run code is an error unless it was asked for: left as bytes it would only fail later, and less clearly.

Which samples make up the k-th item of a pipeline, as long as that can be said without reading any.

    samples of a rank     0 1 2 3 4 5 6 7 8 9 ...
    slice(2, None)        . . 0 1 2 3 4 5 6 7
    batched(3)                |  0  |  1  | 2        units

Workers take units in turn: worker w those of w, w + n, ... So every batch is whole whatever the number of workers, the batches are
the same ones in the same order (torch takes workers in turn, too), and their number is known before any sample is read. Dealing
samples instead would give each worker a short batch of its own at the end.

What is done with the samples, and what is known of the items before any is read.

As long as every stage makes one item of one, or batches, or slices, it is known without reading which samples make up which item
(stages.py). `shuffle` keeps the number, not which is which. `select`, `unbatched` and `then` end that knowledge.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as partial_of
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.formats.tar.members import IMAGE_EXTENSIONS, Decoders, gunzip, image_decoder
from shmload.worker.reader import no_end

Handler = Callable[[Exception], bool]


def reraise_exception(error: Exception) -> bool:
    """Raises it.

    Args:
        error: of the stage.
    """
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Leaves the sample out.

    Args:
        error: of the stage.
    """
    return True


def warn_and_continue(error: Exception) -> bool:
    """Leaves the sample out and says so.

    Args:
        error: of the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return True


def ignore_and_stop(error: Exception) -> bool:
    """Ends the pass.

    Args:
        error: of the stage.
    """
    return False


def warn_and_stop(error: Exception) -> bool:
    """Ends the pass and says so.

    Args:
        error: of the stage.
    """
    warnings.warn(repr(error), stacklevel=2)
    return False


def first_of(sample: Mapping[str, Any], names: str | Sequence[str], method: str, missing_is_error: bool) -> Any:
    """The first of several fields that a sample has; the names are separated by ";".

    Raises:
        ValueError: it has none of them.
    """
    alternatives = names.split(";") if isinstance(names, str) else names
    for name in alternatives:
        if name in sample:
            return sample[name]
    if missing_is_error:
        there = ", ".join(repr(name) for name in sample if not name.startswith("__"))
        raise ValueError(f"{method}: sample {sample.get('__key__')!r} has no {' or '.join(map(repr, alternatives))}, only {there}")
    return None


def default_collation_fn(samples: Sequence[Any]) -> Any:
    """Samples as one batch, column by column: numbers become an array, arrays and tensors are stacked, all else is a list.

    Args:
        samples: tuples or lists of one length, or dicts of the same names.
    Returns:
        a tuple or a dict of columns.
    Raises:
        ValueError: the samples are not alike; says in what.
    """
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            other = next(sample for sample in samples if sample.keys() != first.keys())
            raise ValueError(
                f"batched: samples of a batch have the same fields; these have {sorted(first)} and {sorted(other)}: rename, or "
                "choose fields by to_tuple"
            )
        return {name: _column(name, [sample[name] for sample in samples]) for name in first}
    if len({len(sample) for sample in samples}) != 1:
        raise ValueError(f"batched: samples of a batch have one length; these have {sorted({len(s) for s in samples})}")
    return tuple(_column(number, list(column)) for number, column in enumerate(zip(*samples, strict=True)))


def _column(name: str | int, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values)
    is_tensor = type(first).__module__.partition(".")[0] == "torch" and hasattr(first, "untyped_storage")
    if not is_tensor and not isinstance(first, np.ndarray):
        return values
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) != 1:
        raise ValueError(
            f"batched: field {name!r} has values of shapes {', '.join(map(str, sorted(shapes)[:3]))} in one batch: give them one "
            "shape by map_tuple or map_dict, or a collation_fn"
        )
    if is_tensor:
        import torch

        return torch.stack(values)
    return np.array(values)


MemberHandler = Callable[[str, bytes], Any]  # (".seg.png", bytes) -> the value, or None: not mine
_PICKLES = frozenset({"pickle", "pkl", "pyd", "pth"})


@dataclass
class Continue:
    """What a handler gives that has only unpacked: the others go on with this.

    Args:
        key: the extension without what was unpacked.
        data: the bytes.
    """

    key: str
    data: bytes


def _decoded_image(decode: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    return decode(data) if _last(key) in IMAGE_EXTENSIONS else None


def _gunzipped(key: str, data: bytes) -> Continue | None:
    return Continue(key.removesuffix(".gz"), gunzip(data)) if key.endswith(".gz") else None


def _by_extension(decoders: Decoders, allow_pickle: bool, key: str, data: bytes) -> Any:
    """What the format has a name for."""
    if not allow_pickle and _last(key) in _PICKLES:
        raise PermissionError(
            f"{key.removeprefix('.')!r} is a pickle, which can run any code when it is read: give "
            "decode(allow_pickle=True) for shards you trust, or leave it as bytes by only="
        )
    decoder = decoders.of(key.removeprefix("."))
    return None if decoder is None else decoder(data)


class SampleDecoder:
    """Decodes the members of a sample.

    Args:
        handlers: image specs or functions of (extension with a dot before it, bytes).
        pre, post: that come before and after these; None are the usual ones.
        only: the extensions that are decoded; None is all.
        partial: leave what is decoded already.
        allow_pickle: decode pickles.
    """

    def __init__(
        self,
        handlers: Sequence[str | MemberHandler],
        pre: Sequence[MemberHandler] | None,
        post: Sequence[MemberHandler] | None,
        only: str | Iterable[str] | None,
        *,
        partial: bool,
        allow_pickle: bool,
    ) -> None:
        first = [_gunzipped] if pre is None else list(pre)
        last = [partial_of(_by_extension, Decoders(True, allow_pickle=allow_pickle), allow_pickle)] if post is None else list(post)
        own = [partial_of(_decoded_image, image_decoder(each)) if isinstance(each, str) else each for each in handlers]
        self._handlers: list[MemberHandler] = [*first, *own, *last]
        for handler in self._handlers:
            if not callable(handler):
                raise TypeError(f"decode: a handler is an image spec or a function of (extension, bytes); got {handler!r}")
        self._only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self._partial = partial

    def __call__(self, sample: Any) -> dict[str, Any]:
        _needs_dict("decode", sample)
        found = {}
        for name, value in sample.items():
            is_left = name.startswith("__") or (self._only is not None and name not in self._only)
            if is_left or (self._partial and not isinstance(value, bytes)):
                found[name] = value
                continue
            if not isinstance(value, bytes):
                raise TypeError(
                    f"decode: {name!r} of sample {sample.get('__key__')!r} is a {type(value).__name__} already, bytes are needed: "
                    "decode before map, or give decode(partial=True)"
                )
            try:
                found[name] = self._decoded(f".{name}", value)
            except (ImportError, MemoryError):  # the member is not at fault
                raise
            except PermissionError as error:
                raise ValueError(f"{_where(sample)}: {error}") from None
            except Exception as error:  # of a library or of the user's own handler
                raise ShardCorrupt(f"{_where(sample)}: member {name!r}: {error}") from error
        return found

    def _decoded(self, key: str, data: bytes) -> Any:
        for handler in self._handlers:
            found = handler(key, data)
            if isinstance(found, Continue):
                key, data = found.key, found.data
            elif found is not None:
                return found
        return data


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower()


def _where(sample: dict[str, Any]) -> str:
    return f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"


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

    def with_level(self, level: Sliced | Batched) -> Units:
        return Units((*self.levels, level))


_DROP = object()


@dataclass(frozen=True)
class Stage:
    """One step.

    Attributes:
        run: (items, seed, *arguments) -> items; the seed is of this stage's randomness in this worker and epoch.
    """

    name: str
    run: Callable[..., Iterator[Any]]
    arguments: tuple[Any, ...] = ()


def each(items: Iterator[Any], seed: int, name: str, function: Callable[[Any], Any], handler: Handler) -> Iterator[Any]:
    """A function of each item: decode, map and the like. An item whose function gives `_DROP` is left out."""
    for item in items:
        try:
            made = _of_one(name, function, item)
        except Exception as error:
            if handler(error):
                continue
            return
        if made is not _DROP:
            yield made


def mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """map(f): the key of a sample stays; None leaves it out."""
    made = function(item)
    if made is None:
        return _DROP
    if isinstance(item, dict) and isinstance(made, dict):
        made["__key__"] = item.get("__key__")
    return made


def mapped_dict(functions: Mapping[str, Callable[[Any], Any]], sample: Any) -> Any:
    """map_dict(name=f)."""
    _needs_dict("map_dict", sample)
    made = dict(sample)
    for name, function in functions.items():
        if name not in made:
            raise ValueError(f"map_dict: there is no {name!r} in the sample, only {', '.join(map(repr, made))}")
        made[name] = function(made[name])
    return made


def mapped_tuple(functions: Sequence[Callable[[Any], Any] | None], item: Any) -> Any:
    """map_tuple(f, g): field by field; further fields stay."""
    if not isinstance(item, (list, tuple)):
        raise TypeError(f"map_tuple needs a tuple, got a {type(item).__name__}: call to_tuple(...) before it")
    made = list(item)
    for number, function in enumerate(functions[: len(made)]):
        if function is not None:
            made[number] = function(made[number])
    return tuple(made)


def to_tuple(fields: Sequence[str], missing_is_error: bool, none_is_error: bool, sample: Any) -> tuple[Any, ...]:
    """to_tuple("jpg;png", "cls")."""
    _needs_dict("to_tuple", sample)
    made = tuple(first_of(sample, names, "to_tuple", missing_is_error) for names in fields)
    if none_is_error and any(value is None for value in made):
        names = [name for name, value in zip(fields, made, strict=True) if value is None]
        raise ValueError(f"to_tuple: {', '.join(map(repr, names))} of sample {sample.get('__key__')!r} is None")
    return made


def renamed(names: Mapping[str, str | Sequence[str]], keep: bool, sample: Any) -> dict[str, Any]:
    """rename(new="old;older")."""
    _needs_dict("rename", sample)
    found = {name: first_of(sample, old, "rename", True) for name, old in names.items()}
    if not keep:
        return found
    replaced = {name for old in names.values() for name in (old.split(";") if isinstance(old, str) else old)}
    return {**{name: value for name, value in sample.items() if name not in replaced}, **found}


def select(items: Iterator[Any], seed: int, predicate: Callable[[Any], Any]) -> Iterator[Any]:
    """Only the items that a function says True of."""
    for item in items:  # not filter(), which a StopIteration of the function would end
        if _of_one("select", predicate, item):
            yield item


def shuffle(items: Iterator[Any], seed: int, size: int, initial: int) -> Iterator[Any]:
    """A buffer that gives a random one of what it holds. Its numbers depend on seed, epoch, rank and worker alone."""
    draws = random.Random(seed)
    held: list[Any] = []

    def pick() -> Any:
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


def batch(
    items: Iterator[Any], seed: int, size: int, collation_fn: Callable[[list[Any]], Any] | None, partial: bool
) -> Iterator[Any]:
    """So many items in each."""
    while held := list(islice(items, size)):
        if len(held) == size or partial:
            yield held if collation_fn is None else _of_one("batched", collation_fn, held)


def unbatch(items: Iterator[Any], seed: int) -> Iterator[Any]:
    """The items of batches."""
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


def some(items: Iterator[Any], seed: int, start: int, stop: int | None, step: int) -> Iterator[Any]:
    """Some of the items of each worker: a slice whose place in the whole pass is not known before it is read."""
    return islice(items, start, stop, step)


def piped(
    items: Iterator[Any], seed: int, function: Callable[..., Iterable[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """A function of the iterator."""
    return iter(function(items, *args, **kwargs))


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
        length: what len() is told to say.
    """

    stages: tuple[Stage, ...] = ()
    units: Units = _NO_LEVELS
    known: Known = "units"
    unknown: str = ""
    repetitions: int | None = 1
    limit: int | None = None
    length: int | None = None

    def then(self, stage: Stage) -> Program:
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


def run_stages(stages: Sequence[Stage], samples: Iterator[Any], seed: int) -> Iterator[Any]:
    """The items that come of samples."""
    items = samples
    for number, stage in enumerate(stages):
        items = stage.run(items, seed + number, *stage.arguments)
    return items
