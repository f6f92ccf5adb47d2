"""`Groups`: read rows by number from arrow tables that are loaded in groups, such as row groups of Parquet or blocks of Ray Data.

The groups of a batch are joined to one table whose chunks are those of the groups (`ArrowColumn`). So one native copy per column
makes a batch, even if its rows come from many groups. If a batch needs more groups than the cache can hold, its rows are taken from
one group after the other, so that at most one group is in memory in addition to the cache.

pyarrow's own threads are not used: they do not exist in a forked worker, and the workers decode in parallel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shmload.batch.element_types import of_any
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats.arrow.arrow_column import ArrowColumn, TextLists, column_of
from shmload.formats.arrow.arrow_types import dtype_of, is_list
from shmload.formats.block_cache import BlockCache
from shmload.formats.row_numbers import Indices

Table = dict[str, ArrowColumn | TextLists]


class Groups(ABC):
    """The rows of tables that are loaded group by group: the `Opened` of a `GroupedDataset`.

    Attributes:
        starts: row number at which each group begins, and the number of rows.
        num_rows: number of rows.
        cache: the decoded groups.
    Args:
        schema: schema of the dataset.
        sizes: (rows, bytes) of each group, none of which is empty.
        fill_null: values in place of nulls, by column.
        cache_bytes: size limit of the decoded groups.
    """

    def __init__(
        self, schema: dict[str, Any], sizes: Sequence[tuple[int, int]], fill_null: Mapping[str, Any], cache_bytes: int
    ) -> None:
        self.schema = schema
        self._fill_null = fill_null
        self._nbytes = np.array([nbytes for _, nbytes in sizes], np.int64)
        self.starts = np.cumsum([0, *(num_rows for num_rows, _ in sizes)], dtype=np.int64)
        self.num_rows = int(self.starts[-1])
        self._cache_bytes = cache_bytes
        self.cache = BlockCache(cache_bytes)
        self._nowhere = np.full(len(sizes), -1, np.int64)
        self._last: tuple[Table, Indices] = {}, self._nowhere  # the last joined table; the row at which each group begins, or -1
        self._num_joined = 0  # number of groups joined since all groups in the cache were joined

    @abstractmethod
    def _load(self, group: int) -> Mapping[str, Any]:
        """Return the columns of a group, each a ChunkedArray of the schema's plain type."""

    @abstractmethod
    def _where(self, group: int) -> str:
        """Return the name of a group for errors."""

    def read(self, rows: Indices, out: Any) -> None:
        """Write rows to a batch. The row numbers have been checked."""
        if not len(rows):
            return
        table, numbers = self._table(rows)
        for name, spec in self.schema.items():
            column = table[name]
            if isinstance(column, TextLists):
                out[name] = column.read(numbers)
            elif spec in (str, bytes):
                out[name] = column.text(numbers, strips_nul=False)
            elif spec[1] and spec[1][0] is None:
                column.read_ragged(numbers, out)
            else:
                target = out[name]
                column.read(numbers, target.reshape(len(target), *(e for e in column.extents if e is not None)))

    def _table(self, rows: Indices) -> tuple[Table, Indices]:
        """Return a table that contains these rows, and their numbers in it."""
        group_of = np.searchsorted(self.starts, rows, "right") - 1
        table, begins = self._last
        if (begins[group_of] < 0).any():
            table, begins = self._last = {}, self._nowhere  # the old table would keep groups that the cache may evict now
            groups = np.unique(group_of)
            if len(groups) > 1 and int(self._nbytes[groups].sum()) > self._cache_bytes:
                return self._picked(rows, group_of, groups)
            tables = {group: self._group(group) for group in groups.tolist()}
            self._num_joined += len(tables)
            if self._num_joined >= self.cache.num_decoded:  # so joining all groups at most doubles the cost of joins
                tables, self._num_joined = {**tables, **self.cache.held()}, 0
            held = np.array(list(tables))
            lengths = self.starts[held + 1] - self.starts[held]
            begins = self._nowhere.copy()
            begins[held] = np.cumsum(lengths) - lengths
            self._last = table, begins = _joined(list(tables.values())), begins
        return table, begins[group_of] + rows - self.starts[group_of]

    def _picked(self, rows: Indices, group_of: Indices, groups: Indices) -> tuple[Table, Indices]:
        """Return a table of only these rows, taken from one group after the other."""
        numbers, tables, count = np.empty(len(rows), np.int64), [], 0
        for group in groups.tolist():
            places = np.flatnonzero(group_of == group)
            chosen = pa.array(rows[places] - self.starts[group])
            found = self._group(group)
            where, schema = self._where(group), self.schema
            tables.append({name: _column(name, found[name].table.take(chosen), where, schema[name]) for name in found})
            numbers[places] = np.arange(count, count + len(places))
            count += len(places)
        return _joined(tables), numbers

    def _group(self, group: int) -> Table:
        found: Table = self.cache.get(group, lambda: self._decoded(group))
        return found

    def _decoded(self, group: int) -> tuple[Table, int]:
        columns, where = dict(self._load(group)), self._where(group)
        wanted = int(self.starts[group + 1] - self.starts[group])
        found = {len(values) for values in columns.values()}
        if found != {wanted}:
            raise ShardCorrupt(f"{where}: its metadata says {wanted} rows, and it has {found}")
        for name, values in columns.items():
            if values.null_count and name in self._fill_null:
                columns[name] = _filled(name, values, self._fill_null[name], where)
        nbytes = max(sum(values.nbytes for values in columns.values()), 1)
        return {name: _column(name, values, where, self.schema[name]) for name, values in columns.items()}, nbytes


def _filled(name: str, values: Any, fill: Any, where: str) -> Any:
    """Return a column with a value in place of nulls.

    Raises:
        SampleError: the column's type cannot represent the value.
    """
    try:
        if pa.types.is_integer(values.type) and fill != int(fill):
            raise ValueError("it is not a whole number")
        if pa.types.is_nested(values.type) and isinstance(fill, str | bytes):
            raise ValueError("it is text, which would be split into letters")
        return pc.fill_null(values, fill)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise SampleError(
            f"{where}: column {name!r} is stored as {values.type}, so fill_null={{{name!r}: {fill!r}}} is not a value of it "
            f"({error}): give one of this type"
        ) from error


def _check_range(name: str, values: Any, where: str, dtype: Any) -> None:
    """Check that the schema's dtype can represent all numbers of a column. Numbers that become floats may be rounded.

    Raises:
        SampleError: a number is out of the dtype's range, or the dtype is of integers and the number has a fraction.
    """
    element = of_any(dtype)
    wanted = None if element is None else element.numpy
    while is_list(values.type):
        values = pc.list_flatten(values)
    stored = dtype_of(values.type)
    if wanted is None or not isinstance(stored, np.dtype) or np.can_cast(stored, wanted) or wanted.kind not in "iuf":
        return
    if wanted.kind == "f":
        if _overflows(values.to_numpy(), wanted):
            raise SampleError(
                f"{where}: column {name!r} is stored as {values.type}, and the schema says {wanted}: a finite number would become "
                "infinite; choose another type in schema="
            )
        return
    try:
        values.cast(pa.from_numpy_dtype(wanted))
    except pa.ArrowInvalid as error:
        raise SampleError(
            f"{where}: column {name!r} is stored as {values.type}, and the schema says {wanted}: {error}; choose another type in "
            "schema="
        ) from error


def _overflows(numbers: NDArray[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether a finite number becomes infinite in a dtype of floats."""
    limit = np.finfo(wanted).max
    if -limit <= numbers.min(initial=0) and numbers.max(initial=0) <= limit:
        return False
    with np.errstate(over="ignore"):
        return bool((np.isinf(numbers.astype(wanted)) & np.isfinite(numbers)).any())


def _column(name: str, values: Any, where: str, spec: Any) -> ArrowColumn | TextLists:
    """Return a column of a group, or of some of its rows, after comparing it with the schema's `spec`."""
    if values.null_count:
        raise SampleError(
            f"{where}: column {name!r} has {values.null_count} nulls, which an array cannot store: pass "
            f"fill_null={{{name!r}: value}}, or leave it out of columns="
        )
    if isinstance(spec, tuple) and spec[0] in (str, bytes):
        return TextLists(name, values)
    found = column_of(name, values)
    if found is None:
        raise SampleError(
            f"{where}: column {name!r} of {values.type} has nulls within its lists, or lists within lists that differ in length; "
            "leave it out of columns="
        )
    shape = () if spec in (str, bytes) else spec[1]
    if spec not in (str, bytes):
        _check_range(name, values, where, spec[0])
    known = [extent for extent in found.extents if extent is not None]
    if None not in shape and (len(known) < len(found.extents) or prod(known) != prod(shape)):
        has = "lists of different lengths" if len(known) < len(found.extents) else f"{prod(known)} values"
        raise SampleError(
            f"{where}: column {name!r}: the schema says rows of shape {shape}, but row groups here have {has}; the first extent of "
            "a ragged field is None"
        )
    return found


def _joined(tables: Sequence[Table]) -> Table:
    """Return the tables of several groups as one table, with the same chunks."""
    return tables[0] if len(tables) == 1 else {name: _one_column([table[name] for table in tables]) for name in tables[0]}


def _one_column(columns: Sequence[Any]) -> ArrowColumn | TextLists:
    first: ArrowColumn | TextLists = columns[0]
    if isinstance(first, TextLists):
        return TextLists(first.name, pa.chunked_array([chunk for column in columns for chunk in column.table.chunks]))
    is_alike = len({column.extents for column in columns}) == 1
    lengths = np.concatenate([np.diff(column.starts) for column in columns])
    return replace(
        first,
        extents=first.extents if is_alike else (None, *first.extents[1:]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        chunks=np.concatenate([column.chunks for column in columns]),
        table=[column.table for column in columns],
    )
