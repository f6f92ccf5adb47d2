"""From entries to packed columns: the first entry says what all are, and each is let go as soon as it is copied."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmload._core.index_builder import ColumnBuilder, pack_dicts, pack_tuples
from shmload.index.layout import Layout

_NUMERIC = "biufc"  # numpy's kinds of numbers


class Packed(NamedTuple):
    """Columns ready to be written, and where each will lie."""

    layout: Layout
    builders: Sequence[ColumnBuilder]

    def write(self, fd: int) -> None:
        """Copies the columns to their places in a file that has room for `layout.nbytes`.

        By the system call, not through a mapping: the kernel then neither clears pages that are written whole nor faults them in.
        """
        for column, builder in zip(self.layout.columns, self.builders, strict=True):
            for begin, part in ((column.ends, builder.ends), (column.data, builder.data)):
                written = 0
                while written < part.nbytes:  # one call writes 2 GiB at most
                    written += os.pwrite(fd, part[written:], begin + written)

    def digest(self) -> str:
        """What two indexes have in common if and only if their entries are equal."""
        digest = hashlib.blake2b(digest_size=16)
        row_type = self.layout.row_type.__qualname__ if self.layout.row_type else ""
        shape = [row_type, *((column.name, column.type, column.data) for column in self.layout.columns)]
        digest.update(repr(shape).encode("utf-8", "surrogatepass"))
        for builder in self.builders:
            digest.update(builder.ends)
            digest.update(builder.data)
        return f"{self.layout.count} entries, {digest.hexdigest()}"


def pack_entries(entries: Iterable[Any]) -> Packed:
    """Packs values or rows, of which an iterator may give any number: they are taken once, one after another.

    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be held, or differs in kind from those before it; it is named.
    """
    _refuse_tables(entries)
    if isinstance(entries, np.ndarray) and entries.ndim and entries.dtype.kind in _NUMERIC:
        column = ColumnBuilder(None)
        column.extend_array(entries)
        return Packed(Layout.of([column], None), [column])
    iterator = iter(entries)
    try:
        first = next(iterator)
    except StopIteration:
        column = ColumnBuilder(None)
        return Packed(Layout.of([column], None), [column])
    if isinstance(first, tuple):
        return _pack_tuples(first, iterator)
    if type(first) is dict:
        return _pack_dicts(first, iterator)
    column = ColumnBuilder(None)
    column.extend((first,))
    del first
    column.extend(iterator)
    return Packed(Layout.of([column], None), [column])


def pack_columns(columns: Mapping[str, Any]) -> Packed:
    """Packs whole columns as the dicts that their values make. Numeric arrays keep their dtype.

    Raises:
        TypeError, ValueError, OverflowError: a value cannot be held, or the columns differ in length.
    """
    _check_names(columns)
    builders = [_column(name, values) for name, values in columns.items()]
    if len({builder.count for builder in builders}) > 1:
        lengths = ", ".join(f"{builder.name!r} {builder.count}" for builder in builders)
        raise ValueError(f"the columns of an index have one value per entry each; got different numbers: {lengths}")
    return Packed(Layout.of(builders, dict), builders)


def _refuse_tables(entries: Any) -> None:
    """Refuses what is iterable but would give something else than its entries.

    Raises:
        TypeError: says what to call instead.
    """
    if isinstance(entries, (str, bytes)):
        raise TypeError(f"a {type(entries).__name__} is one entry, and an index needs many: give a list of them")
    if isinstance(entries, Mapping):
        raise TypeError("a mapping gives its keys, not its values: use SharedIndex.from_columns(mapping)")
    if hasattr(entries, "columns") and hasattr(entries, "dtypes"):
        raise TypeError("a DataFrame gives its columns' names, not its rows: use SharedIndex.from_dataframe(frame)")


def _column(name: str, values: Any) -> ColumnBuilder:
    builder = ColumnBuilder(name)
    if isinstance(values, np.ndarray) and values.ndim and values.dtype.kind in _NUMERIC:
        builder.extend_array(values)
    elif isinstance(values, (str, bytes)):
        raise TypeError(f"column {name!r} is one {type(values).__name__}: give a sequence with one value per entry")
    else:
        builder.extend(values)
    return builder


def _pack_tuples(first: tuple[Any, ...], iterator: Iterable[Any]) -> Packed:
    row_type = type(first)
    names: Sequence[str | int] = getattr(row_type, "_fields", range(len(first)))
    if row_type is not tuple and not hasattr(row_type, "_fields"):
        raise TypeError(f"entry 0: a {row_type.__name__} cannot be made again; give tuples, named tuples or dicts")
    if not first:
        raise ValueError("entry 0: a row needs at least one value, got an empty tuple")
    builders = tuple(ColumnBuilder(name) for name in names)
    pack_tuples((first,), builders, row_type)
    del first
    pack_tuples(iterator, builders, row_type)
    return Packed(Layout.of(builders, row_type), builders)


def _pack_dicts(first: dict[str, Any], iterator: Iterable[Any]) -> Packed:
    _check_names(first)
    names = tuple(first)
    builders = tuple(ColumnBuilder(name) for name in names)
    pack_dicts((first,), builders, names)
    del first
    pack_dicts(iterator, builders, names)
    return Packed(Layout.of(builders, dict), builders)


def _check_names(names: Iterable[Any]) -> None:
    names = list(names)
    if not names:
        raise ValueError("an index of rows needs at least one column, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names of columns are str; got {name!r}, a {type(name).__name__}")
