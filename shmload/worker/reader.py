"""How a dataset decodes into rows itself, also through the wrappers that pass this on. Whether it is asked to: reader.py.

torch's TensorDataset, gathered from its tensors' memory into the batch.

Torch indexes every tensor once a sample and stacks what comes. The rows' bytes are the same without any of that. Whether it may be
done is decided by `TensorRows.takes`, batch by batch: for all but plain integers the dataset itself is asked, as torch asks it.

How the batches of one loader are read: one value, decided once, from the loader's arguments and its dataset.

It travels in the job. The trainer that publishes orders, the workers that fill them and the reader without workers obey it; none
asks the dataset again. A question that is answered in two places has two answers: batches of text were once published in chunks, as
one place took them for rows, and each chunk's worker wrote the whole batch, as another took them for ragged.

Precedence: a custom collate_fn (the whole batch, by itself), then `read_batch_into`, `read_into`, `__getitems__`, `__getitem__`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload.batch.array_rows import ArrayRows, typed_array
from shmload.batch.collate import RowOut, SingleRow, private_rows
from shmload.batch.layout import Layout, layout_of_schema
from shmload.batch.ragged import Arenas, Ragged, RaggedRows, ragged_of
from shmload.world import ability_of

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

    `reads_rows_alike`: a row read by itself is as it is in a batch. `takes_all`: no key has to go the plain way.
    """

    reads_rows_alike = True
    takes_all = True

    def __init__(self, dataset: Any) -> None:
        self.schema = dataset.schema
        self.batch_type = ability_of(dataset, "batch_type")
        self.read_into: Callable[[Any, Any], None] | None = ability_of(dataset, "read_into")
        self.read_batch_into: Callable[[Any, Any], None] | None = ability_of(dataset, "read_batch_into")

    def layout(self) -> Layout:
        """Where the fields lie."""
        return layout_of_schema(self.schema, self.batch_type)

    def takes(self, keys: Any) -> bool:
        """Whether samples of these keys may be read in place; if not, the dataset is asked for them one by one."""
        return True

    def read_alone(self, index: Any, rows: dict[str, Any]) -> None:
        """Reads one sample into the first of some rows."""
        if self.read_into is not None:
            self.read_into(index, RowOut(rows, 0))
        else:
            assert self.read_batch_into is not None
            self.read_batch_into(np.array([index], np.int64), RowOut(rows, slice(0, 1)))

    def read_ragged(self, keys: Any, rows: RaggedRows, begin: Callable[[int], bool]) -> bool:
        """Reads the samples of a batch whose schema has ragged fields.

        Args:
            begin: told of each row before it is read; False ends the reading.
        Returns:
            whether all were read.
        """
        if self.read_batch_into is not None:
            begin(-1)
            self.read_batch_into(np.asarray(keys, np.int64), rows.out_rows())
            rows.check(len(keys))
            return True
        assert self.read_into is not None
        for row, key in enumerate(keys):
            if not begin(row):
                return False
            self.read_into(key, rows.out(row))
            rows.check(row + 1)
        return True


class _InPlaceSubset(InPlace):
    """torch's Subset of one."""

    def __init__(self, inner: InPlace, indices: Sequence[int]) -> None:
        self.schema, self.batch_type = inner.schema, inner.batch_type
        self.reads_rows_alike = inner.reads_rows_alike
        self.takes_all = inner.takes_all
        self._inner, self._indices = inner, indices
        read_into, read_batch_into = inner.read_into, inner.read_batch_into
        self.read_into = read_into and (lambda index, out: read_into(indices[index], out))
        self.read_batch_into = read_batch_into and (lambda keys, out: read_batch_into(self._chosen(keys), out))

    def takes(self, keys: Any) -> bool:
        """Whether the inner dataset takes what these keys stand for."""
        return self.takes_all or (are_integers(keys) and self._inner.takes(self._chosen(keys)))

    def _chosen(self, keys: Any) -> list[Any]:
        indices = self._indices
        return [indices[key] for key in (keys.tolist() if isinstance(keys, np.ndarray) else keys)]


class _InPlaceConcat(InPlace):
    """Several with equal schemas, end to end. Whole batches are read row by row, each from its member.

    Args:
        is_cyclic: indices go on behind the last one, from the first: a Mix gives such where a member begins again.
    """

    def __init__(self, members: list[InPlace], ends: Sequence[int], *, is_cyclic: bool) -> None:
        self.schema, self.batch_type = members[0].schema, members[0].batch_type
        self.takes_all = all(m.takes_all for m in members)
        self._members, self._ends, self._is_cyclic = members, ends, is_cyclic
        readers = [_row_reader(m) for m in members]

        def read_into(index: int, out: Any) -> None:
            which, local = self._place(index)
            readers[which](local, out)

        self.read_into = read_into
        self.read_batch_into = None

    def takes(self, keys: Any) -> bool:
        """Whether the member of each key takes it."""
        if self.takes_all:
            return True
        return are_integers(keys) and all(self._members[which].takes([at]) for which, at in map(self._place, keys))

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


def _row_reader(member: InPlace) -> Callable[[int, Any], None]:
    if member.read_into is not None:
        return member.read_into
    read_batch_into = member.read_batch_into
    assert read_batch_into is not None
    return lambda index, out: read_batch_into([index], SingleRow(out))


def in_place_of(dataset: Any, ragged: Ragged | None = None) -> InPlace | None:
    """The dataset's way of decoding into rows, found through Subset, ConcatDataset and Mix; None if it has none.

    Args:
        ragged: the loader's rule, which decides what lists of different lengths are in datasets without a schema of their own.
    """
    kind = type(dataset)
    if kind.__module__ in ("datasets.arrow_dataset", "datasets.dataset_dict"):
        from shmload.worker.arrow import arrow_in_place

        return arrow_in_place(dataset, ragged)
    is_torchs = kind.__module__ == "torch.utils.data.dataset"
    if is_torchs and kind.__name__ == "Subset":
        inner = in_place_of(dataset.dataset, ragged)
        return inner and _InPlaceSubset(inner, dataset.indices)
    if is_torchs and kind.__name__ == "TensorDataset":
        return tensors_in_place(dataset)
    is_mix = getattr(kind, "is_concatenation", False)
    if (is_torchs and kind.__name__ == "ConcatDataset") or is_mix:
        found = [in_place_of(d, ragged) for d in dataset.datasets]
        members = [m for m in found if m is not None and m.reads_rows_alike]
        if len(members) == len(found) and len({str(dict(m.schema)) for m in members}) == 1:
            return _InPlaceConcat(members, dataset.cumulative_sizes, is_cyclic=is_mix)
        return None
    if ability_of(dataset, "schema") is not None and (
        ability_of(dataset, "read_into") or ability_of(dataset, "read_batch_into")
    ):
        return InPlace(dataset)
    return None


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

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self._rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Whether they are plain integers and the tensors still lie where they were found: the user may have replaced them."""
        return are_integers(keys) and self._seen == _memory_of(self._dataset)

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

    @property
    def is_in_place(self) -> bool:
        """Whether the dataset writes into the batch itself."""
        return self.layout is not None

    def in_place(self, dataset: Any) -> InPlace | None:
        """The means by which the dataset, in this process, writes into the batch; None: it does not."""
        return in_place_of(dataset, self.ragged) if self.is_in_place else None

    def sample(self, dataset: Any, key: Any) -> Any:
        """One sample, by `__getitems__` where the dataset has it: perhaps it has nothing else."""
        if not self.has_getitems:
            return dataset[key]
        (sample,) = dataset.__getitems__([key])
        return sample

    def try_sample(self, dataset: Any, in_place: InPlace | None, key: Any) -> None:
        """Reads one sample for nothing but to see whether it can be read."""
        if in_place is None or not in_place.takes([key]):
            self.sample(dataset, key)
            return
        assert self.layout is not None
        if self.is_whole:
            assert self.ragged is not None
            in_place.read_ragged([key], RaggedRows(self.layout, self.ragged, 1, no_room, Arenas()), lambda row: True)
        else:
            in_place.read_alone(key, private_rows(self.layout, 1))


PLAIN = ReadPlan()  # samples one by one, as torch's collate takes them


def plan_of(
    dataset: Any,
    *,
    collate_fn: Callable[[Any], Any] | None,
    auto_collation: bool,
    ragged: str | Mapping[str, str],
    is_torch_mode: bool,
) -> ReadPlan:
    """The plan of a loader.

    Args:
        collate_fn: the user's; None: torch's default.
        ragged: as the loader was given it.
    Raises:
        ValueError: `ragged` is no mode, or does not go with the dataset's schema.
    """
    has_getitems = auto_collation and bool(ability_of(dataset, "__getitems__"))
    found = in_place_of(dataset, ragged_of(ragged, None, is_torch_mode=is_torch_mode))
    schema = ability_of(found or dataset, "schema")
    rule = ragged_of(ragged, schema if isinstance(schema, Mapping) else None, is_torch_mode=is_torch_mode)
    if collate_fn is not None:
        return ReadPlan("collate_fn", None, rule, is_whole=True, has_getitems=has_getitems)
    if not auto_collation:
        return ReadPlan("__getitem__", None, rule, is_whole=True)
    in_place = in_place_of(dataset, rule)
    if in_place is None:
        path = "__getitems__" if has_getitems else "__getitem__"
        is_whole = rule is not None and rule.is_certain
        return ReadPlan(path, None, rule, is_whole=is_whole, has_getitems=has_getitems)
    path = "read_batch_into" if in_place.read_batch_into is not None else "read_into"
    layout = in_place.layout()
    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, has_getitems=has_getitems)
