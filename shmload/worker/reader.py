"""How a dataset decodes into rows itself, also through the wrappers that pass this on. Whether it is asked to: reader.py.

torch's TensorDataset, gathered from its tensors' memory into the batch.

Torch indexes every tensor once a sample and stacks what comes. The rows' bytes are the same without any of that. Whether it may be
done is decided by `TensorRows.takes`, batch by batch: for all but plain integers the dataset itself is asked, as torch asks it.

How the batches of one loader are read: one value, decided once, from the loader's arguments and its dataset.

It travels in the job. The trainer that publishes orders, the workers that fill them and the reader without workers obey it; none
asks the dataset again. A question that is answered in two places has two answers: batches of text were once published in chunks, as
one place took them for rows, and each chunk's worker wrote the whole batch, as another took them for ragged.

Precedence: a custom collate_fn (the whole batch, by itself), then `read_batch_into`, `read_into`, `__getitems__`, `__getitem__`.

Reading the samples of the claimed rows: one by one, all at once, or by several threads; and who is to blame while it lasts.

Several threads of one worker reading samples at once: for datasets that wait, for a disk or a network, or give up the GIL.

Rows are given out in order and their results taken in order, so the worker always waits for the oldest row, and that one gets the
blame for a delay. A death may be any row's, and so may a delay where the dataset itself reads several: whoever takes the rows over
reads them one by one, so that the next one names the right row. No read may outlive its chunk: it could write into a row that is
another batch's by then.

What a worker process gets at its start. Small: the dataset travels apart.

A worker's exception on its way to the trainer: type, text, traceback, which sample.

The text is what torch's loader says, so that code which looks into it goes on working; where the sample is known, the exception
carries it as a note.

What is said of a sample that took longer than `sample_timeout_s`, wherever its worker was.
"""

from __future__ import annotations

import logging
import operator
import pickle
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload import faults
from shmload._core.filler import ChunkWriter, WorkerRing
from shmload._core.mapping import Mapping as MemoryMapping
from shmload.batch.collate import ArrayRows, RowOut, RowPlacer, SingleRow, collates_as_shipped, private_rows, typed_array
from shmload.batch.layout import Layout, layout_of_schema
from shmload.batch.ragged import AS_LISTS, Arenas, AsTorchOrList, Ragged, RaggedRows, ragged_of
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import Sample, begin_many, begin_sample, drew_for_many, end_samples, generators, seed_globals
from shmload.world import ability_of, package_ability, takes_arguments

log = logging.getLogger("shmload")


class Failure(NamedTuple):
    """What went wrong, without the exception itself (which would keep frames alive, or not pickle)."""

    kind: type[BaseException]
    text: str
    where: str  # empty: the text says all
    note: str
    rows: tuple[int, ...] = ()  # of the batch, which could not be read; empty: unknown, or the batch as a whole failed
    worker: bytes = b""  # where the worker stands behind it, in torch mode: a note as of worker/snapshot.py; empty: none is due

    @classmethod
    def of(cls, error: BaseException, where: str, note: str) -> Failure:
        """From an exception being handled."""
        return cls(type(error), "".join(traceback.format_exception(error)), where, note)

    def dumps(self, capacity: int) -> bytes:
        """At most `capacity` bytes; a long traceback loses its middle, a type that cannot travel becomes RuntimeError."""
        try:
            kind = pickle.dumps(self.kind)
            pickle.loads(kind)
        except Exception:
            kind = pickle.dumps(RuntimeError)
        text = self.text
        dumped = pickle.dumps((kind, *self[1:]))  # a Ray agent, which does not know the type, opens it, too
        while len(dumped) > capacity:
            keep = max(len(text) - (len(dumped) - capacity) - 100, 200) // 2
            text = f"{text[:keep]}\n... {len(self.text) - 2 * keep} characters left out ...\n{text[-keep:]}"
            dumped = pickle.dumps((kind, *self._replace(text=text, note=self.note[:400])[1:]))
            if keep <= 100:
                break
        return dumped

    @classmethod
    def loads(cls, dumped: bytes) -> Failure:
        """Inverse of `dumps`."""
        kind, *rest = pickle.loads(dumped)
        return cls(pickle.loads(kind), *rest)

    @staticmethod
    def with_worker(dumped: bytes, note: bytes) -> bytes:
        """A failure as it was dumped, with another `worker`."""
        return pickle.dumps((*pickle.loads(dumped)[:-1], note))

    def exception(self) -> BaseException:
        """The exception to raise in the trainer: of the original type, with torch's text."""
        message = f"Caught {self.kind.__name__} {self.where}.\nOriginal {self.text}" if self.where else self.text
        error: BaseException
        try:
            if self.kind is KeyError:
                error = KeyError(_Readable(message))
            elif getattr(self.kind, "message", None):
                error = self.kind(message=message)  # type: ignore[call-arg]  # as torch does for such types
            else:
                error = self.kind(message)
        except Exception:  # an exception with an unusual constructor
            error = RuntimeError(message)
        if self.note:
            error.add_note(self.note)
        return error


def no_end(error: StopIteration, who: str) -> RuntimeError:
    """The error for a StopIteration of a user's function: raised out of next() it would end the loop, and nobody would hear of it.

    Args:
        who: raised it, for people.
    """
    made = RuntimeError(
        f"{who} raised StopIteration, which would have ended the pass as if there were no more: catch it there, or call "
        f"next(iterator, default) {error}".rstrip()
    )
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


class _Readable(str):
    """A string whose repr is itself: KeyError shows the repr of its argument, which makes a traceback one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


REMEDY = 'Raise sample_timeout_s if such a sample is all right, or give on_error="skip" or "substitute" to go on without it'


def timeout_text(what: str, limit_s: float | None, worker: int, pid: int, stack: str) -> str:
    """What took longer than its limit, whose worker was ended over it, and where that was."""
    return f"{what} sample_timeout_s={limit_s}: worker {worker} (pid {pid}) was ended and is replaced. Where it was:\n{stack}\n"


def sample_at(key: object, epoch: int, row: int, step: int) -> str:
    """A sample by its place."""
    return f"sample {key!s:.200} of epoch {epoch} (row {row} of batch {step})"


# What may be given as a dataset, in types. torch's annotation asks for its Dataset class and so refuses a list, whose samples its
# loader reads all the same; these say what is really read, so that a typed program may pass it.
T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Samples by number: a list, a range, shmload's formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> T_co: ...


class DecodesSamples(Protocol):
    """Writes a sample into its row of the batch. The schema says what a row is: name -> (dtype, shape)."""

    @property
    def schema(self) -> Any: ...

    def read_into(self, index: int, out: Any, /) -> Any: ...


class DecodesBatches(Protocol):
    """Writes a batch into its rows."""

    @property
    def schema(self) -> Any: ...

    def read_batch_into(self, indices: Any, out: Any, /) -> Any: ...


def no_room(nbytes: int) -> NDArray[np.uint8]:
    """The slot of a batch that has none."""
    return np.empty(0, np.uint8)


class InPlace:
    """A dataset that decodes into rows: its schema and its `read_into` or `read_batch_into`, through any wrappers.

    `reads_rows_alike`: a row read by itself is as it is in a batch. `takes_all`: no key has to go the plain way. `draws_nothing`:
    no code of the user's runs, so samples may be read together with any others.
    """

    reads_rows_alike = True
    takes_all = True
    draws_nothing = False

    def __init__(self, dataset: Any) -> None:
        self.schema = dataset.schema
        self.draws_nothing = type(dataset).__module__.startswith("shmload.formats.")
        self.batch_type = ability_of(dataset, "batch_type")
        self.read_into: Callable[[Any, Any], None] | None = ability_of(dataset, "read_into")
        self.read_batch_into: Callable[[Any, Any], None] | None = ability_of(dataset, "read_batch_into")

    def layout(self) -> Layout:
        """Where the fields lie."""
        return layout_of_schema(self.schema, self.batch_type)

    def takes(self, keys: Any) -> bool:
        """Whether samples of these keys may be read in place; if not, the dataset is asked for them one by one."""
        return True

    def read_ragged(self, keys: Any, rows: RaggedRows, begin: Callable[[int], bool], *, is_suspect: bool = False) -> bool:
        """Reads the samples of a batch whose schema has ragged fields.

        Args:
            begin: called with each row before it is read; False ends the reading.
            is_suspect: one of them may end the worker: it is to show which.
        Returns:
            whether all were read.
        """
        if self.read_batch_into is not None and not is_suspect:
            begin(-1)
            self.read_batch_into(np.asarray(keys, np.int64), rows.out(slice(None)))
            rows.check(len(keys))
            return True
        read_into = _row_reader(self)
        for row, key in enumerate(keys):
            if not begin(row):
                return False
            read_into(key, rows.out(row))
            rows.check(row + 1)
        return True


class InPlaceSubset(InPlace):
    """torch's Subset of one."""

    def __init__(self, inner: InPlace, indices: Sequence[int]) -> None:
        self.schema, self.batch_type = inner.schema, inner.batch_type
        self.reads_rows_alike, self.takes_all, self.draws_nothing = inner.reads_rows_alike, inner.takes_all, inner.draws_nothing
        self.inner, self.indices = inner, indices
        read_into, read_batch_into = inner.read_into, inner.read_batch_into
        self.read_into = read_into and (lambda index, out: read_into(indices[index], out))
        self.read_batch_into = read_batch_into and (lambda keys, out: read_batch_into(_as_array(self._chosen(keys)), out))

    def takes(self, keys: Any) -> bool:
        """Whether the inner dataset takes what these keys stand for."""
        return self.takes_all or (are_integers(keys) and self.inner.takes(self._chosen(keys)))

    def _chosen(self, keys: Any) -> list[Any]:
        indices = self.indices
        return [indices[key] for key in (keys.tolist() if isinstance(keys, np.ndarray) else keys)]


class _InPlaceConcat(InPlace):
    """Several with equal schemas, end to end. Batches are read by the members together where that is the same as row by row.

    Args:
        is_cyclic: indices go on behind the last one, from the first: a Mix gives such where a member begins again.
    """

    def __init__(self, members: list[InPlace], ends: Sequence[int], *, is_cyclic: bool) -> None:
        self.schema, self.batch_type = members[0].schema, members[0].batch_type
        for member in members:
            if getattr(member.schema, "zero_fill", False):  # it writes only a part of its rows
                self.schema = member.schema
        self.takes_all = all(m.takes_all for m in members)
        self._members, self._ends, self._is_cyclic = members, ends, is_cyclic
        readers = [_row_reader(m) for m in members]

        def read_into(index: int, out: Any) -> None:
            which, local = self._place(index)
            readers[which](local, out)

        self.read_into = read_into
        self.read_batch_into = None
        if all(m.draws_nothing and m.read_batch_into is not None for m in members):
            self._layout = self.layout()
            if not self._layout.is_ragged:
                self.read_batch_into = self._read_batch

    def takes(self, keys: Any) -> bool:
        """Whether the member of each key takes it."""
        if self.takes_all:
            return True
        return are_integers(keys) and all(self._members[which].takes(at) for which, _, at in self._by_member(keys))

    def _read_batch(self, keys: Any, out: Any) -> None:
        for which, rows, at in self._by_member(keys):
            read_batch_into = self._members[which].read_batch_into
            assert read_batch_into is not None
            if len(rows) == len(keys):
                return read_batch_into(at, out)
            own = private_rows(self._layout, len(rows))
            read_batch_into(at, RowOut(own, slice(0, len(rows))))
            for name, values in own.items():
                out[name][rows] = values
        return None

    def _by_member(self, keys: Any) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Each member that keys are of, which these are, and their numbers in it."""
        numbers, ends = np.asarray(keys, np.int64), self._ends
        for outside in numbers[numbers < -ends[-1]] if not self._is_cyclic else ():
            self._place(int(outside))
        numbers = numbers % ends[-1] if self._is_cyclic else np.where(numbers < 0, numbers + ends[-1], numbers)
        members = np.searchsorted(ends, numbers, "right")
        for which in np.unique(members).tolist():
            rows = np.flatnonzero(members == which)
            yield which, rows, numbers[rows] - (ends[which - 1] if which else 0)

    def _place(self, index: int) -> tuple[int, int]:
        ends = self._ends
        if self._is_cyclic:
            index %= ends[-1]
        elif index < 0:
            if -index > ends[-1]:
                raise ValueError("absolute value of index should not exceed dataset length")  # torch's words
            index += ends[-1]
        which = bisect_right(ends, index)
        return which, index - (ends[which - 1] if which else 0)


def are_integers(keys: Any) -> bool:
    """Whether an order's keys are all plain integers of 64 bits at most, and not what only the dataset can make sense of."""
    if isinstance(keys, np.ndarray):
        return True
    kinds = set(map(type, keys))
    if not kinds <= {int} and not all(kind is int or issubclass(kind, np.signedinteger) for kind in kinds):
        return False
    return not keys or -(1 << 63) <= min(keys) <= max(keys) < 1 << 63


def _as_array(keys: list[Any]) -> Any:
    """Integers as `read_batch_into` takes them, a tensor's too; anything else as it is."""
    try:
        return np.array(list(map(operator.index, keys)), np.int64)
    except (TypeError, OverflowError):
        return keys


def _row_reader(member: InPlace) -> Callable[[int, Any], None]:
    if member.read_into is not None:
        return member.read_into
    read_batch_into = member.read_batch_into
    assert read_batch_into is not None
    return lambda index, out: read_batch_into(np.array([index], np.int64), SingleRow(out))


def in_place_of(dataset: Any, ragged: Ragged | None = None) -> InPlace | None:
    """The dataset's way of decoding into rows, found through Subset, ConcatDataset, Mix and pipelines; None if it has none.

    Args:
        ragged: the loader's rule, which decides what lists of different lengths are in datasets without a schema of their own.
    """
    if (made := package_ability(dataset, "in_place")) is not None:  # a pipeline that only chooses among a dataset's samples
        given: InPlace | None = made(ragged)
        return given
    kind = type(dataset)
    if kind.__module__ in ("datasets.arrow_dataset", "datasets.dataset_dict"):
        from shmload.worker.arrow import arrow_in_place

        return arrow_in_place(dataset, ragged)
    is_torchs = kind.__module__ == "torch.utils.data.dataset"
    if is_torchs and kind.__name__ == "Subset":
        inner = in_place_of(dataset.dataset, ragged)
        return inner and InPlaceSubset(inner, dataset.indices)
    if is_torchs and kind.__name__ == "TensorDataset":
        return tensors_in_place(dataset)
    is_mix = bool(package_ability(dataset, "is_concatenation"))
    if (is_torchs and kind.__name__ == "ConcatDataset") or is_mix:
        found = [in_place_of(d, ragged) for d in dataset.datasets]
        members = [m for m in found if m is not None and m.reads_rows_alike]
        if len(members) == len(found) and len({(str(dict(m.schema)), m.batch_type or dict) for m in members}) == 1:
            return _InPlaceConcat(members, dataset.cumulative_sizes, is_cyclic=is_mix)
        return None
    return InPlace(dataset) if declares_decoding(dataset) else None


def declares_decoding(dataset: Any) -> bool:
    """Return whether a dataset has the whole decoding protocol: a valid schema, and `read_into` or `read_batch_into`.

    Attributes of these names may mean something else in a program. A dataset that can be read in no other way keeps them, so that
    what is wrong with its schema is an error.
    """
    schema = ability_of(dataset, "schema")
    readers = [found for name in ("read_into", "read_batch_into") if (found := ability_of(dataset, name)) is not None]
    if schema is None or not readers:
        return False
    if not all(takes_arguments(reader, 2) for reader in readers):
        why = "read_into and read_batch_into take two arguments, an index or indices and the rows"
    else:
        why = _flaw_of_schema(schema, ability_of(dataset, "batch_type"))
    if why and _has_getitem(dataset):
        log.debug("%s is read by its samples and does not decode in place: %s", type(dataset).__name__, why)
        return False
    return not why or isinstance(schema, Mapping)


def _flaw_of_schema(schema: Any, batch_type: Any = None) -> str:
    """Return what is wrong with a schema; empty if nothing is."""
    try:
        layout_of_schema(schema, batch_type)
    except Exception as error:  # of whatever stands there
        return f"{type(error).__name__}: {error}"
    return ""


def _has_getitem(dataset: Any) -> bool:
    """Return whether it has a `__getitem__` of its own. That of torch's Dataset only raises."""
    found = getattr(type(dataset), "__getitem__", None)
    return found is not None and (found.__module__, found.__qualname__) != ("torch.utils.data.dataset", "Dataset.__getitem__")


def is_decoder(function: Any) -> bool:
    """Return whether a stage's function decodes an item into a row: it has a `schema` and `read_into(item, out)`."""
    return isinstance(ability_of(function, "schema"), Mapping) and takes_arguments(ability_of(function, "read_into"), 2)


def tensors_in_place(dataset: Any) -> InPlace | None:
    """The way of a TensorDataset into rows; None if its tensors are not all plain memory."""
    if not all(type(t).__name__ == "Tensor" for t in dataset.tensors):
        return None  # a subclass may index otherwise
    try:
        return TensorRows(dataset)
    except (TypeError, ValueError):
        return None  # sparse, on a device, with a gradient


class TensorRows(InPlace):
    """The rows of a dataset's tensors; a batch is a list, as torch's collate makes it of tuples."""

    takes_all = False
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self._rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Return whether they are plain integers, the tensors are still where they were found (the user may have replaced them),
        and the user has not changed how torch collates samples."""
        return collates_as_shipped() and are_integers(keys) and self._seen == _memory_of(self._dataset)

    def _read(self, indices: Any, out: Any) -> None:
        try:
            self._rows.read_batch_into(indices, out)
        except IndexError:
            for index in indices:
                self._dataset[int(index)]  # says it as torch does
            raise


def _memory_of(dataset: Any) -> list[Any] | None:
    try:
        return [(type(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in dataset.tensors]
    except (RuntimeError, AttributeError):
        return None  # no tensors with memory of their own


@dataclass(frozen=True)
class ReadPlan:
    """How each batch is read and written.

    Attributes:
        path: the dataset's ability that is used: "collate_fn", "read_batch_into", "read_into", "__getitems__" or "__getitem__".
        layout: where fields lie, by the schema of a dataset that is read in place; None: the first sample shows it.
        ragged: how ragged fields are delivered; None: what torch's collate refuses is refused.
        is_whole: a batch has no rows at known places, so one worker reads and writes all of it. Where it is false a batch may
            still turn out to be such; then its order says so.
        has_getitems: samples that are not read in place come by `__getitems__`.
    """

    path: str = "__getitem__"
    layout: Layout | None = None
    ragged: Ragged | None = None
    is_whole: bool = False
    has_getitems: bool = False

    @property
    def rows(self) -> Layout | None:
        """Where rows lie, if that is known before the first sample is read."""
        return None if self.is_whole else self.layout

    def in_place(self, dataset: Any) -> InPlace | None:
        """The means by which the dataset, in this process, writes into the batch; None: it does not."""
        return None if self.layout is None else in_place_of(dataset, self.ragged)

    def read(self, dataset: Any, key: Any) -> Any:
        """Read one sample; by `__getitems__`, if the dataset has it, a batch of one key, which may hold any number of samples."""
        return dataset.__getitems__([key]) if self.has_getitems else dataset[key]

    def try_sample(self, dataset: Any, in_place: InPlace | None, key: Any) -> None:
        """Reads one sample for nothing but to see whether it can be read."""
        if in_place is None or not in_place.takes([key]):
            self.read(dataset, key)
            return
        assert self.layout is not None
        if self.is_whole:
            assert self.ragged is not None
            in_place.read_ragged([key], RaggedRows(self.layout, self.ragged, 1, no_room, Arenas()), lambda row: True)
        elif in_place.read_into is not None:
            in_place.read_into(key, RowOut(private_rows(self.layout, 1), 0))
        elif in_place.read_batch_into is not None:
            in_place.read_batch_into(np.array([key], np.int64), RowOut(private_rows(self.layout, 1), slice(0, 1)))


PLAIN = ReadPlan()  # samples one by one, as torch's collate takes them


def plan_of(
    dataset: Any, *, collate_fn: Callable[[Any], Any] | None, auto_collation: bool, ragged: str | Mapping[str, str], is_torch: bool
) -> ReadPlan:
    """The plan of a loader.

    Args:
        collate_fn: the user's; None: torch's default.
        ragged: as the loader was given it.
    Raises:
        ValueError: `ragged` is no mode, or does not go with the dataset's schema.
    """
    has_getitems = auto_collation and bool(ability_of(dataset, "__getitems__"))
    is_default = isinstance(ragged, AsTorchOrList)
    rule = (None if is_torch else AS_LISTS) if is_default else ragged_of(ragged, None, is_torch_mode=is_torch)
    in_place = in_place_of(dataset, rule)
    schema = in_place.schema if in_place is not None else None if is_default else ability_of(dataset, "schema")
    if isinstance(schema, Mapping) and in_place is None and (why := _flaw_of_schema(schema)):
        log.debug("the schema of %s does not say which fields are ragged: %s", type(dataset).__name__, why)
        schema = None
    if isinstance(schema, Mapping) and not (is_default and all(map(_is_fixed, schema.values()))):
        rule = ragged_of(ragged, schema, is_torch_mode=is_torch)
        in_place = in_place_of(dataset, rule)
    if collate_fn is not None:
        return ReadPlan("collate_fn", None, rule, is_whole=True, has_getitems=has_getitems)
    if not auto_collation:
        return ReadPlan("__getitem__", None, rule, is_whole=True)
    if in_place is None:
        path = "__getitems__" if has_getitems else "__getitem__"
        is_whole = rule is not None and rule.is_certain
        return ReadPlan(path, None, rule, is_whole=is_whole, has_getitems=has_getitems)
    path = "read_batch_into" if in_place.read_batch_into is not None else "read_into"
    layout = in_place.layout()
    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, has_getitems=has_getitems)


def _is_fixed(spec: Any) -> bool:
    """Whether rows of a schema's field are all of one size."""
    dtype, shape = spec[:2] if isinstance(spec, tuple) else (spec, ())
    return dtype not in (str, bytes) and None not in shape


T = TypeVar("T")


def can_be_joined(batch: Any) -> bool:
    """Return whether what `__getitems__` returned is samples in a row, so that several of it can be put end to end."""
    torch = sys.modules.get("torch")
    return type(batch) in (list, tuple, np.ndarray) or (torch is not None and type(batch) is torch.Tensor)


def joined(batches: list[Any]) -> Any:
    """Return as one batch what `__getitems__` returned for each key; None if it is not samples in a row, all of one type.

    A dataset that filters or adds samples returned another number than one for some keys.
    """
    kind = type(batches[0])
    if not can_be_joined(batches[0]) or any(type(batch) is not kind for batch in batches):
        return None
    if kind in (list, tuple):
        return kind(chain.from_iterable(batches))
    return np.concatenate(batches) if kind is np.ndarray else sys.modules["torch"].cat(batches)


def read_by_threads(
    threads: ThreadPoolExecutor, read: Callable[[int], T], rows: Sequence[int], begin: Callable[[int], object]
) -> Iterator[T]:
    """What `read` gives for each row, in order. When the iterator is closed, nothing is being read any more.

    Args:
        begin: called with each row before it is waited for.
    Raises:
        what the first row that cannot be read raised.
    """
    reads: list[Future[T]] = [threads.submit(read, row) for row in rows]
    try:
        for row, one in zip(rows, reads, strict=True):
            begin(row)
            yield one.result()
    finally:
        for one in reads:
            one.cancel()
        wait(reads)


class SampleReader:
    """One worker's way to its dataset.

    Args:
        open_memory: (path) -> mapping of a segment the trainer has made.

    Which sample is being read, the ring knows: `begin` tells it.
    """

    def __init__(self, ring: WorkerRing, job: Job, in_place: InPlace | None, open_memory: Callable[[str], MemoryMapping]) -> None:
        self._ring, self._job, self._in_place, self._open = ring, job, in_place, open_memory
        self._kept: tuple[Any, Any] | None = None  # (key, sample) decoded to learn the layout, not to be read twice
        self._given: Any = None  # the batch sampler's own object, if it is no list of int
        self._keys: list[Any] | None = None  # of the order; None: its samples are not begun one by one
        self._reads_many = job.plan.has_getitems  # until its samples draw random numbers
        self._own = job.own_generators()
        self._threads = ThreadPoolExecutor(job.num_threads, "shmload-read") if job.num_threads > 1 else None
        self._reseeds = job.seed_samples and job.seed is not None

    @property
    def begun(self) -> int:
        """The number of what was begun last, for `sample_info` and `sample_rng`."""
        return self._ring.begun

    def sample(self) -> Sample:
        """What was begun last."""
        ring = self._ring
        return self._job.seed, ring.epoch, ring.index, ring.worker_id

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """What reads several samples at once, if the loader wants that.

        None if a worker has died over the claimed rows: read one by one they show which of them it was.
        """
        return None if self._threads is None or self._ring.is_suspect else self._threads

    @property
    def reads_all(self) -> bool:
        """Whether a batch's samples come together, not one by one."""
        return self._job.plan.path == "__getitems__" or self.threads is not None

    def keys(self) -> Any:
        """What the order asks for: the whole batch's indices (an array for `read_batch_into`), or the sampler's keys."""
        ring = self._ring
        path = ring.order_path
        raw = bytes(memoryview(self._open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        self._given = self._keys = None
        if ring.is_pickled:
            keys = self._given = pickle.loads(raw)  # written by the trainer
            self._keys = keys if type(keys) is list else list(keys)
            return self._keys
        indices = np.frombuffer(raw, np.int64)
        if self._job.plan.path == "read_batch_into":
            return indices
        self._keys = indices.tolist()
        return self._keys

    def beginning(self) -> Callable[[int, Any], bool]:
        """`begin` for the rows of this order, without steps that it does not need: small samples cost little more than these."""
        begin_row, ring, seed, epoch, keys = self._ring.begin_row, self._ring, self._job.seed, self._ring.epoch, self._keys
        if faults.armed or self._own is not None:
            return self.begin
        if not self._reseeds or seed is None:
            return begin_row

        def begin(row: int, key: Any) -> bool:
            is_wanted = begin_row(row, key)
            seed_globals(seed, epoch, ring.index, keys, row)
            return is_wanted

        return begin

    def writer(self, placer: RowPlacer | None, keys: list[Any], row: int) -> ChunkWriter:
        """What writes the chunk's samples from `row` on, which has been begun; without a placer, what gathers them."""
        seed, part = self._job.seed, None if placer is None else placer.part
        if faults.armed or self._own is not None:
            return ChunkWriter(self._ring, part, keys, row, begin=self.begin)
        if not self._reseeds or seed is None:
            return ChunkWriter(self._ring, part, keys, row)
        return ChunkWriter(self._ring, part, keys, row, reseeder=generators.reseeder, seed=seed, seed_rest=generators.seed_rest)

    def begin(self, row: int, key: Any) -> bool:
        """Says which sample is read next, and seeds its randomness. False: nobody waits for the batch any more."""
        ring = self._ring
        is_wanted = ring.begin_row(row, key)
        if self._reseeds:
            assert self._job.seed is not None
            seed_globals(self._job.seed, ring.epoch, ring.index, self._keys, row)
            if self._own is not None:
                self._own.begin(self._job.seed, ring.epoch, ring.index)
        if faults.armed:
            faults.hit("mid_decode")
        return is_wanted

    def begin_all(self, row: int, key: Any, count: int) -> None:
        """Says that so many samples are read at once, from this one on."""
        key = key.item() if isinstance(key, np.integer) else key
        self.begin(row, key)
        if count > 1:
            self._ring.begin_row(-1, key)  # whoever takes them over is to see which it was, if one ends the worker
        self._ring.end_sample()
        begin_many(can_repeat=False)

    def one(self, row: int, key: Any) -> Any:
        """Read one sample, as `ReadPlan.read` does."""
        self.begin(row, key)
        return self.read(key)

    def read(self, key: Any) -> Any:
        """Reads the sample that has been begun."""
        if self._kept is not None and self._kept[0] == (self._ring.epoch, key):
            sample, self._kept = self._kept[1], None
            return sample
        return self._job.plan.read(self._job.dataset, key)

    __getitem__ = read

    def keep(self, key: Any, sample: Any) -> None:
        """Keeps a sample that was read in vain, so that it need not be read twice."""
        if not self.reads_all:
            self._kept = ((self._ring.epoch, key), sample)

    def many(self, keys: list[Any], first: int, end: int) -> Any:
        """Read rows `first` to `end`.

        Returns:
            a list of their samples; or what the dataset's `__getitems__` returned for them, whatever that is: it may hold fewer
            samples, or more.
        """
        if first >= end:
            return []
        plan, is_suspect = self._job.plan, self._ring.is_suspect
        if self._reads_many and not is_suspect:
            batch = self._read_at_once(keys, first, end)
            if not drew_for_many() or not can_be_joined(batch):
                return batch
            self._reads_many = False  # what a sample draws is keyed by the sample
        if self.threads is None:
            source = self if plan.has_getitems else self._job.dataset
            read = self.writer(None, keys, first).gather(self.one(first, keys[first]), source)
        else:
            read = list(self.by_threads(lambda row: plan.read(self._job.dataset, keys[row]), keys, first, end))
        self._ring.end_sample()
        if not plan.has_getitems:
            return read
        batch = joined(read)
        if batch is not None and (not self._reads_many or all(len(one) == 1 for one in read)):
            return batch
        # rows were read alone to see which one ends the worker; the dataset does more than read each, so its batch is another one
        at_once = self._read_at_once(keys, first, end)
        return batch if batch is not None and drew_for_many() else at_once

    def _read_at_once(self, keys: list[Any], first: int, end: int) -> Any:
        """Return what the dataset's `__getitems__` returns for rows `first` to `end`."""
        job = self._job
        self.begin_all(first, keys[first], end - first)
        begin_many(can_repeat=True, compares=job.seed_samples, own=self._own)
        is_whole = self._given is not None and end - first == len(keys)
        return job.dataset.__getitems__(self._given if is_whole else keys[first:end])

    def by_threads(self, read: Callable[[int], Any], keys: list[Any], first: int, end: int) -> Iterator[Any]:
        """What `read` gives for each row, several at a time."""
        threads = self.threads
        assert threads is not None
        job, epoch, worker = self._job, self._ring.epoch, self._ring.worker_id

        def read_row(row: int) -> Any:
            begin_sample(job.seed, epoch, index_of(keys[row]), worker, reseed=False)
            try:
                return read(row)
            finally:
                end_samples()

        return read_by_threads(threads, read_row, range(first, end), lambda row: self.begin(row, keys[row]))

    def bad_rows(self) -> tuple[int, ...]:
        """The claimed rows that cannot be read, one of which has just shown itself; none if it is the batch that failed."""
        ring = self._ring
        first, end = (0, ring.nrows) if ring.is_packed else (ring.first_row, ring.end_row)
        keys = self.keys()
        failed = ring.row
        bad = [] if failed < 0 else [failed]
        for row in range(first if failed < 0 else failed + 1, end):
            try:
                self.begin(row, keys[row] if type(keys) is list else keys[row].item())
                self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
            except Exception:
                bad.append(row)
        return tuple(bad)


def index_of(key: Any) -> int:
    """The sample's index; -1 if the sampler's key is no integer."""
    return key if type(key) is int and -(1 << 63) <= key < 1 << 63 else -1


@dataclass(frozen=True)
class Job:
    """What the workers of one loader do, the same for all: read samples of `dataset`, make batches of them.

    `collate_fn` is None for the default collate. `seed` is None in torch mode. `drop_last` matters to iterable datasets alone,
    whose last batch only the worker sees; `shared_seed` to DataPipes. Where a worker stands travels with every
    `snapshot_every`-th batch; 0: never; and with the last ones of a pass of `num_steps`, if that is known and workers stay for the
    next. How they are read is the `plan`'s word.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    seed: int | None
    seed_samples: bool
    is_iterable: bool = False
    drop_last: bool = False
    shared_seed: int | None = None
    snapshot_every: int = 0
    num_steps: int = 0
    tolerates_bad_samples: bool = False
    plan: ReadPlan = PLAIN
    num_threads: int = 1

    def own_generators(self) -> OwnGenerators | None:
        """The generators that dataset and collate_fn have now, if there are any and they are to be keyed before each sample."""
        own = OwnGenerators(self.dataset, self.collate_fn) if self.seed is not None and self.seed_samples else None
        return own or None


@dataclass(frozen=True)
class PeerRing:
    """The ring of another of the node's ranks, in which a worker may fill chunks when its own has none (loop.py).

    Worker w of this worker pool has the record `first_record` + w there.
    """

    trainer_pid: int
    trainer_began: str
    control_path: str
    ready_bell: str
    grants_bell: str
    first_record: int


@dataclass(frozen=True)
class Post:
    """One worker's place: which worker of how many, the memory and bells it shares with the trainer."""

    worker_id: int
    num_workers: int
    trainer_pid: int
    control_path: str
    control_nbytes: int
    ready_bell: str
    orders_bell: str
    grants_bell: str
    base_seed: int
    affinity: tuple[int, ...]
    pickled_job_path: str = ""  # the segment with the pickled job; empty: it came another way
    pickled_job_nbytes: int = 0
    stack_path: str = ""  # the segment it writes its Python stack to when asked to; empty: it cannot be asked
    neighbours: tuple[PeerRing, ...] = ()
    resume: bytes = b""  # the pickled snapshot that the worker goes on from; empty: it starts afresh
