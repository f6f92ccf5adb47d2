"""The in-place readers of datasets that decode into rows of the batch, also through `Subset`, `ConcatDataset` and `Mix`."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.batch.layout import Layout, layout_of_schema
from shmload.batch.ragged_rows import RaggedRows
from shmload.batch.row_placer import RowOut, SingleRow, private_rows
from shmload.introspect.abilities import ability_of, overrides


class InPlace:
    """The in-place reader of a dataset that decodes into rows of the batch.

    Attributes:
        name: the dataset's class, for errors.
        schema: name -> (dtype, shape) of each field of a row.
        batch_type: type of a batch, if it is not a dict.
        read_into: (key, row) -> Any: decodes one sample into a row. May be None if `read_batch_into` is not.
        read_batch_into: (int64 array of indices, rows) -> Any: decodes several samples. May be None if `read_into` is not.
        reads_rows_alike: whether a row that is read alone equals the same row read in a batch.
        takes_all: whether `takes` is true for all keys.
        draws_nothing: whether no code of the user runs, so that samples may be read together with any others.
    """

    name = "the dataset"
    reads_rows_alike = True
    takes_all = True
    draws_nothing = False

    def __init__(self, dataset: Any) -> None:
        self.schema, self.name = dataset.schema, type(dataset).__name__
        self.draws_nothing = type(dataset).__module__.startswith("shmload.formats.")
        self.batch_type = ability_of(dataset, "batch_type")
        self.read_into: Callable[[Any, Any], Any] | None = ability_of(dataset, "read_into")
        self.read_batch_into: Callable[[Any, Any], Any] | None = ability_of(dataset, "read_batch_into")
        if self.read_into is not None and overrides(dataset, ("read_into",), ("read_batch_into",)):
            self.read_batch_into = None  # it would not call the overriding read_into

    def layout(self) -> Layout:
        """Return the offsets of the fields."""
        return layout_of_schema(self.schema, self.batch_type)

    def takes(self, keys: Any) -> bool:
        """Return whether samples of these keys may be read in place; if not, they are read with `dataset[key]`."""
        return True

    def read_ragged(self, keys: Any, rows: RaggedRows, begin: Callable[[int], bool], *, is_suspect: bool = False) -> bool:
        """Read the samples of a batch whose schema has ragged fields.

        Args:
            keys: indices of the samples.
            rows: the rows to write.
            begin: called with each row before it is read; reading stops if it returns False. If all rows are read at once, it
                is called once before, with -1, and its result is ignored.
            is_suspect: read them one by one, because a worker died while reading one of them, or because they draw random numbers.
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
    """The in-place reader of torch's Subset of a dataset that decodes in place."""

    def __init__(self, inner: InPlace, indices: Sequence[int]) -> None:
        self.schema, self.batch_type, self.name = inner.schema, inner.batch_type, inner.name
        self.reads_rows_alike, self.takes_all, self.draws_nothing = inner.reads_rows_alike, inner.takes_all, inner.draws_nothing
        self.inner, self.indices = inner, indices
        read_into, read_batch_into = inner.read_into, inner.read_batch_into
        self.read_into = read_into and (lambda index, out: read_into(indices[index], out))
        self.read_batch_into = read_batch_into and (lambda keys, out: read_batch_into(_as_array(self._chosen(keys)), out))

    def takes(self, keys: Any) -> bool:
        """Return whether the inner dataset takes the indices that these keys select."""
        return self.takes_all or (are_integers(keys) and self.inner.takes(self._chosen(keys)))

    def _chosen(self, keys: Any) -> list[Any]:
        indices = self.indices
        return [indices[key] for key in (keys.tolist() if isinstance(keys, np.ndarray) else keys)]


class InPlaceConcat(InPlace):
    """The in-place reader of several datasets with equal schemas, concatenated.

    Members read whole batches if the result equals that of reading row by row.

    Args:
        members: the readers of the datasets.
        ends: number of samples up to the end of each.
        is_cyclic: indices after the last one start over; `Mix` uses them when a member begins again.
    """

    def __init__(self, members: list[InPlace], ends: Sequence[int], *, is_cyclic: bool) -> None:
        self.schema, self.batch_type = members[0].schema, members[0].batch_type
        self.name = " or ".join(dict.fromkeys(member.name for member in members))
        for member in members:
            if getattr(member.schema, "zero_fill", False):  # it does not write every byte of its rows
                self.schema = member.schema
        self.takes_all, self.draws_nothing = all(m.takes_all for m in members), all(m.draws_nothing for m in members)
        self._members, self._ends, self._is_cyclic = members, ends, is_cyclic
        self._all_ends = np.array(ends, np.int64)  # to look up the members of a batch
        self._all_begins = np.array([0, *ends], np.int64)  # the last one is that of keys beyond the end

        def read_into(index: int, out: Any) -> Any:
            which, local = self._place(index)
            return _row_reader(members[which])(local, out)

        self.read_into = read_into
        self.read_batch_into = None
        if self.draws_nothing and all(m.read_batch_into is not None for m in members):
            self._layout = self.layout()
            if not self._layout.is_ragged:
                self.read_batch_into = self._read_batch

    def takes(self, keys: Any) -> bool:
        """Return whether the member of each key takes it."""
        if self.takes_all:
            return True
        return are_integers(keys) and all(self._members[which].takes(at) for which, _, at in self._by_member(keys))

    def _read_batch(self, keys: Any, out: Any) -> Any:
        parts = list(self._by_member(keys))
        if len(parts) == 1:
            return self._reader(parts[0][0])(parts[0][2], out)
        if not parts:
            return None
        own = private_rows(self._layout, len(keys))  # the members' rows one after another
        done = 0
        for which, rows, at in parts:
            self._reader(which)(at, RowOut(own, slice(done, done + len(rows))))
            done += len(rows)
        order = np.concatenate([rows for _, rows, _ in parts])
        for name, values in own.items():
            out[name][order] = values
        return None

    def _reader(self, which: int) -> Callable[[Any, Any], Any]:
        read_batch_into = self._members[which].read_batch_into
        assert read_batch_into is not None
        return read_batch_into

    def _by_member(self, keys: Any) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for each member that has some of the keys: its number, the rows of these keys, and their indices in it."""
        members, places = self.located(keys)
        by_member = np.argsort(members, kind="stable")
        ordered = members[by_member]
        begins_of_others = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        for begin, end in pairwise([0, *begins_of_others.tolist(), len(members)] if len(members) else []):
            rows = by_member[begin:end]
            yield int(members[rows[0]]), rows, places[rows]

    def located(self, keys: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the member of each key, and the key's index in it; int64, shape `(keys,)`."""
        if len(keys) == 1:  # takes a tenth of the time
            which, at = self._place(int(keys[0]))
            return np.array([which], np.int64), np.array([at], np.int64)
        numbers, ends = np.asarray(keys, np.int64), self._all_ends
        for outside in numbers[numbers < -ends[-1]] if not self._is_cyclic else ():
            self._place(int(outside))
        numbers = numbers % ends[-1] if self._is_cyclic else np.where(numbers < 0, numbers + ends[-1], numbers)
        members = np.searchsorted(ends, numbers, "right")
        return members, numbers - self._all_begins[members]

    def _place(self, index: int) -> tuple[int, int]:
        ends = self._ends
        if self._is_cyclic:
            index %= ends[-1]
        elif index < 0:
            if -index > ends[-1]:
                raise ValueError("absolute value of index should not exceed dataset length")  # torch's message
            index += ends[-1]
        which = bisect_right(ends, index)
        return which, index - (ends[which - 1] if which else 0)


def are_integers(keys: Any) -> bool:
    """Return whether all keys are plain integers of at most 64 bits, and none is a key that only the dataset understands."""
    if isinstance(keys, np.ndarray):
        return True
    kinds = set(map(type, keys))
    if not kinds <= {int} and not all(kind is int or issubclass(kind, np.signedinteger) for kind in kinds):
        return False
    return not keys or -(1 << 63) <= min(keys) <= max(keys) < 1 << 63


def _as_array(keys: list[Any]) -> Any:
    """Convert integers, also those of a tensor, to the array that `read_batch_into` takes; return anything else unchanged."""
    try:
        return np.array(list(map(operator.index, keys)), np.int64)
    except (TypeError, OverflowError):
        return keys


def _row_reader(member: InPlace) -> Callable[[int, Any], Any]:
    if member.read_into is not None:
        return member.read_into
    read_batch_into = member.read_batch_into
    assert read_batch_into is not None
    return lambda index, out: read_batch_into(np.array([index], np.int64), SingleRow(out))
