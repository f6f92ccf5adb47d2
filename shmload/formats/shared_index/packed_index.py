"""Pack entries or columns into the form in which a SharedIndex stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from shmload._core.index_builder import ColumnBuilder, pack_dicts, pack_tuples
from shmload.batch.layout import aligned
from shmload.formats.shared_bytes import SharedBytes
from shmload.formats.shared_index.index_layout import SCALARS, ColumnLayout, IndexLayout

_NUMERIC = "biufc"  # numpy's kinds of numeric dtypes


class PackedIndex(NamedTuple):
    """Columns that are ready to be written to shared memory, and their layout."""

    layout: IndexLayout
    builders: Sequence[ColumnBuilder]

    @classmethod
    def of(cls, builders: Sequence[ColumnBuilder], row_type: type | None) -> PackedIndex:
        """Assign a position in memory to each column. Return the result; `row_type` is as for `IndexLayout`."""
        columns, end = [], 0
        for number, builder in enumerate(builders):
            has_words = builder.kind in ("str", "bytes")
            ends = end if has_words else -1
            data = aligned(end + builder.ends.nbytes)
            end = aligned(data + builder.data.nbytes)
            name = number if builder.name is None else builder.name
            dtype = "" if has_words else SCALARS.get(builder.kind) or str(builder.dtype)
            columns.append(ColumnLayout(name, builder.kind, dtype, builder.shape, builder.is_nullable, ends, data))
        return cls(IndexLayout(builders[0].count, tuple(columns), row_type, end), builders)

    def parts(self) -> Iterator[tuple[int, Any]]:
        """Yield (offset in the memory, bytes) of each part of the columns."""
        for column, builder in zip(self.layout.columns, self.builders, strict=True):
            yield from ((column.ends, builder.ends), (column.data, builder.data))

    def shared(self) -> SharedBytes:
        """Write the columns to shared memory. Its name is removed with the returned object or this process.

        Raises:
            MemoryError: there is not enough memory.
        """
        return SharedBytes.written(self.layout.nbytes, self.parts(), f"an index of {self.layout.count} entries")

    def digest(self) -> str:
        """Return a hash that is equal for two indexes if and only if their entries are equal."""
        digest = hashlib.blake2b(digest_size=16)
        row_type = self.layout.row_type.__qualname__ if self.layout.row_type else ""
        shape = [row_type, *((column.name, column.type, column.data) for column in self.layout.columns)]
        digest.update(repr(shape).encode("utf-8", "surrogatepass"))
        for _, part in self.parts():
            digest.update(part)
        return f"{self.layout.count} entries, {digest.hexdigest()}"


def pack_entries(entries: Iterable[Any]) -> PackedIndex:
    """Pack values or rows. The iterable is consumed once, one entry at a time, and may be of any length.

    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored, or differs in kind from the previous ones; the message
        names it.
    """
    _refuse_tables(entries)
    if isinstance(entries, np.ndarray) and entries.ndim and entries.dtype.kind in _NUMERIC:
        return PackedIndex.of([_column(None, entries)], None)
    iterator = iter(entries)
    for first in iterator:
        row_type = type(first) if isinstance(first, tuple) or type(first) is dict else None
        names = list(first) if row_type is dict else list(getattr(row_type, "_fields", range(len(first)))) if row_type else []
        everything = chain(iter((first,)), iterator)
        del first  # keeps no reference to the entry
        return PackedIndex.of([_column(None, everything)], None) if row_type is None else _pack_rows(row_type, names, everything)
    return PackedIndex.of([ColumnBuilder(None)], None)


def pack_columns(columns: Mapping[str, Any]) -> PackedIndex:
    """Pack columns. The entries are dicts of their values. Numeric arrays keep their dtype.

    Raises:
        TypeError, ValueError, OverflowError: a value cannot be stored, or the columns differ in length.
    """
    check_names(columns)
    builders = [_column(name, values) for name, values in columns.items()]
    if len({builder.count for builder in builders}) > 1:
        lengths = ", ".join(f"{builder.name!r} {builder.count}" for builder in builders)
        raise ValueError(f"the columns of an index have one value per entry each; got different numbers: {lengths}")
    return PackedIndex.of(builders, dict)


def _refuse_tables(entries: Any) -> None:
    """Reject iterables that would yield something other than their entries.

    Raises:
        TypeError: the iterable is a table; the message names the method to call instead.
    """
    if isinstance(entries, (str, bytes)):
        raise TypeError(f"a value of type {type(entries).__name__} is one entry, and an index needs many: give a list of them")
    if isinstance(entries, Mapping):
        raise TypeError("a mapping gives its keys, not its values: use SharedIndex.from_columns(mapping)")
    if hasattr(entries, "columns") and hasattr(entries, "dtypes"):
        raise TypeError("a DataFrame gives its columns' names, not its rows: use SharedIndex.from_dataframe(frame)")


def _column(name: str | None, values: Any) -> ColumnBuilder:
    builder = ColumnBuilder(name)
    if isinstance(values, np.ndarray) and values.ndim and values.dtype.kind in _NUMERIC:
        builder.extend_array(values)
    elif isinstance(values, (str, bytes)):
        raise TypeError(f"column {name!r} is one {type(values).__name__}: give a sequence with one value per entry")
    else:
        builder.extend(values)
    return builder


def _pack_rows(row_type: type, names: Sequence[str | int], rows: Iterable[Any]) -> PackedIndex:
    """Pack tuples, named tuples or dicts."""
    builders = tuple(ColumnBuilder(name) for name in names)
    if row_type is dict:
        check_names(names)
        pack_dicts(rows, builders, tuple(map(str, names)))
    elif row_type is not tuple and not hasattr(row_type, "_fields"):
        raise TypeError(f"entry 0: values of type {row_type.__name__} cannot be created again; give tuples, named tuples or dicts")
    elif not names:
        raise ValueError("entry 0: a row needs at least one value, got an empty tuple")
    else:
        pack_tuples(rows, builders, row_type)
    return PackedIndex.of(builders, row_type)


def check_names(names: Iterable[Any]) -> None:
    """Raise unless these can be the names of an index's columns.

    Raises:
        TypeError: a name is not a str.
        ValueError: there are no names, or two are equal.
    """
    names = list(names)
    if not names:
        raise ValueError("an index of rows needs at least one column, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names of columns are str; got {name!r} of type {type(name).__name__}")
    if len(set(names)) < len(names):
        raise ValueError(f"the columns of an index have different names; got {names}")
