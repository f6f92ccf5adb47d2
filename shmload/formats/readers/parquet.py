"""ParquetDataset: rows of Parquet files by their number, copied from decoded row groups into the batch.

Row groups of Parquet files, decoded to arrow tables, and their rows as addresses.

The groups in the cache are seen as one table whose chunks are theirs (`batch/arrow_columns.py`), so that one native copy a
column serves a batch, however many groups its rows come of. That table is made anew when a group was decoded. A batch that touches
more groups than the cache holds takes its rows out of one after the other instead: it never holds more than one of them beside the
cache.

pyarrow's own threads are not used: they would not be there in a forked worker, and workers are what decodes in parallel here.

What fields the columns of a Parquet file are, by their arrow types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shmload.batch.layout import of_any
from shmload.batch.rows import ArrowColumn, column_of
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats.paths import Paths, expanded
from shmload.formats.readers.columns import BlockCache, ColumnDataset, Indices, NoField, Opened, library


class ParquetDataset(ColumnDataset):
    """Rows of Parquet files, in the order of the files.

    A row group is decoded whole, when a row of it is first read, and kept in a cache of this process; rows go from there into
    the batch without Python objects. So random order over all rows decodes a row group for nearly every row unless all fit the
    cache: read in blocks instead, with a `BlockShuffle` of `block_size` rows whose window fits the cache. Every worker reads
    of every window, and each has a cache of its own.

    Numbers and booleans become numbers, strings text, lists of numbers ragged arrays, fixed-size lists arrays; dates, times and
    durations int64 in their own unit. Dictionaries are expanded.

    Args:
        paths: files, or patterns with * ? [ ], whose files are sorted by name.
        columns: those that samples have; all by default.
        schema: type and shape of some fields, in place of the stored ones: {"x": "float32"} converts; {"image": ("uint8", (28,
            28))} says that lists have that many values, in every row.
        fill_null: values in place of nulls, by column. Without, a null is an error.
        cache_bytes: of decoded row groups, for each process that reads.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ValueError: `columns` is empty.
        ModuleNotFoundError: pyarrow is not installed (extra `parquet`).
        ShardCorrupt: on reading: a file is not what the format says.
        SampleError: on reading: a row has a null, or another number of values than the schema says.
    Thread/process safety: any number of readers; one thread of a process decodes at a time.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        *,
        fill_null: Mapping[str, Any] | None = None,
        cache_bytes: int = 1 << 28,
    ) -> None:
        super().__init__()
        self.paths = expanded(paths, "Parquet")
        self._columns = None if columns is None else list(columns)
        self._asked = dict(schema or {})
        self._fill_null = dict(fill_null or {})
        self._cache_bytes = cache_bytes
        if self._columns is not None and not self._columns:
            raise ValueError("columns needs at least one name; None takes all of them")

    def _open(self) -> Opened:
        library("pyarrow.parquet", "parquet")

        return Groups(self.paths, self._columns, self._asked, self._fill_null, self._cache_bytes)

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """The row that each row group begins with, and the number of rows; int64, shape `(row groups + 1,)`."""
        starts: NDArray[np.int64] = self._groups.starts
        return starts

    @property
    def block_size(self) -> int:
        """Rows of the largest row group: what `BlockShuffle` takes for its blocks. Groups of one size make the best use of it."""
        return max(int(np.diff(self.block_starts).max(initial=0)), 1)

    @property
    def num_decoded(self) -> int:
        """Row groups that this process has decoded."""
        return int(self._groups.cache.num_decoded)

    @property
    def _groups(self) -> Any:
        return self._opened

    @property
    def _source(self) -> str:
        return f"{len(self.paths)} Parquet files"


def fields_of(schema: Any, path: str, names: Sequence[str] | None) -> list[Any]:
    """The arrow fields of the columns that samples have.

    Raises:
        NoField: there is none, or not the one that was asked for.
    """
    unknown = [name for name in names or () if name not in schema.names]
    if unknown:
        raise NoField(f"{path}: columns names {unknown}, which are not there; it has {schema.names}")
    if len(set(schema.names)) < len(schema.names):
        raise NoField(f"{path}: two columns have one name: {schema.names}; fields of a sample have names of their own")
    if not schema.names:
        raise NoField(f"{path}: has no columns")
    return [schema.field(name) for name in (schema.names if names is None else names)]


def spec_of(field: Any, path: str, asked: Any) -> Any:
    """A schema's entry for a column.

    Args:
        asked: the user's own entry, or None.
    Raises:
        NoField: rows of it are no field of a batch, or not what was asked for.
    """
    kind = plain_type(field.type)
    extents: list[int | None] = []
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        extents.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    text = _text_of(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and not extents)
    if not ((text is not None and not extents) or (is_number and None not in extents[1:])):
        raise NoField(
            f"{path}: column {field.name!r} of {field.type} is no field of a batch: those are numbers, text, and lists of numbers; "
            "name the others in columns="
        )
    if text is not None:
        return text if asked in (None, text, (text, ())) else _refuse(field, path, asked)
    if asked is None:
        return np.dtype(kind.to_pandas_dtype()).name, tuple(extents)
    dtype, shape = asked if isinstance(asked, tuple) else (asked, tuple(extents))
    found = None if dtype in (str, bytes) else of_any(dtype).numpy
    is_ragged = bool(shape) and shape[0] is None
    if found is None or bool(shape) != bool(extents) or (is_ragged and tuple(shape) != tuple(extents)):
        return _refuse(field, path, asked)
    return found.name, tuple(shape)


def _refuse(field: Any, path: str, asked: Any) -> Any:
    raise NoField(f"{path}: column {field.name!r} is stored as {field.type} and cannot be read as schema says: {asked!r}")


def _text_of(kind: Any) -> type | None:
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return str
    return bytes if types.is_binary(kind) or types.is_large_binary(kind) else None


def plain_type(kind: Any) -> Any:
    """The arrow type that a column is read as: without dictionaries, times as integers."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind) or types.is_date64(kind):
        return pa.int64()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    return pa.binary() if types.is_fixed_size_binary(kind) else kind


def plain_values(values: Any) -> Any:
    """A column as its `plain_type`."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    wanted = plain_type(values.type)
    return values if wanted == values.type else values.cast(wanted)


Table = dict[str, ArrowColumn]


class Groups:
    """The rows of some files, open in this process.

    Attributes:
        starts: row number at which each group begins, and the number of rows.
    """

    def __init__(
        self,
        paths: Sequence[str],
        names: Sequence[str] | None,
        asked: Mapping[str, Any],
        fill_null: Mapping[str, Any],
        cache_bytes: int,
    ) -> None:
        self._files = [_file(path) for path in paths]
        self._paths = paths
        fields = fields_of(self._files[0].schema_arrow, paths[0], names)
        self._names = [field.name for field in fields]
        for what, given in (("schema", asked), ("fill_null", fill_null)):
            unknown = [name for name in given if name not in self._names]
            if unknown:
                raise NoField(f"{what} names {unknown}, which is no column here; those are {self._names}")
        for path, file in zip(paths, self._files, strict=True):
            _check_alike(path, file.schema_arrow, fields, paths[0])
        self.schema = {field.name: spec_of(field, paths[0], asked.get(field.name)) for field in fields}
        self._fill_null = fill_null
        places = [(f, g) for f, file in enumerate(self._files) for g in range(file.num_row_groups)]
        sizes = [self._files[f].metadata.row_group(g) for f, g in places]
        self._places = [place for place, size in zip(places, sizes, strict=True) if size.num_rows > 0]
        self._nbytes = np.array([size.total_byte_size for size in sizes if size.num_rows > 0], np.int64)
        self.starts = np.cumsum([0, *(size.num_rows for size in sizes if size.num_rows > 0)], dtype=np.int64)
        self.num_rows = int(self.starts[-1])
        self._cache_bytes = cache_bytes
        self.cache = BlockCache(cache_bytes)
        self._resident: Table = {}  # the groups in the cache as one table
        self._begins = np.full(len(self._places), -1, np.int64)  # of each group there
        self._num_decoded = 0  # when it was made
        self._lock = Lock()

    def read(self, rows: Indices, out: Any) -> None:
        """Writes these rows to a batch."""
        if not len(rows):
            return
        table, numbers = self._table(rows)
        for name, spec in self.schema.items():
            column = table[name]
            if spec in (str, bytes):
                out[name] = column.text(numbers, strips_nul=False)
            elif spec[1] and spec[1][0] is None:
                column.read_ragged(numbers, out)
            else:
                _check_shape(column, spec[1])
                target = out[name]
                column.read(numbers, target.reshape(len(target), *(e for e in column.extents if e is not None)))

    def _table(self, rows: Indices) -> tuple[Table, Indices]:
        """(a table that holds these rows, their numbers in it)."""
        group_of = np.searchsorted(self.starts, rows, "right") - 1
        groups = np.unique(group_of)
        if len(groups) > 1 and int(self._nbytes[groups].sum()) > self._cache_bytes:
            return self._picked(rows, group_of, groups)
        tables = {group: self._group(group) for group in groups.tolist()}
        with self._lock:
            is_known = self._num_decoded == self.cache.num_decoded and bool((self._begins[groups] >= 0).all())
            if not is_known:
                self._num_decoded = self.cache.num_decoded
                tables.update(self.cache.held())
                held = np.array(list(tables), np.int64)
                lengths = self.starts[held + 1] - self.starts[held]
                self._begins = np.full(len(self._places), -1, np.int64)
                self._begins[held] = np.cumsum(lengths) - lengths
                self._resident = _joined(list(tables.values()))
            table, begins = self._resident, self._begins
        return table, begins[group_of] + rows - self.starts[group_of]

    def _picked(self, rows: Indices, group_of: Indices, groups: Indices) -> tuple[Table, Indices]:
        """The rows by themselves, from one group after the other."""
        numbers, tables, count = np.empty(len(rows), np.int64), [], 0
        for group in groups.tolist():
            places = np.flatnonzero(group_of == group)
            chosen = pa.array(rows[places] - self.starts[group])
            table = self._group(group)
            tables.append({name: _column(name, table[name].table.take(chosen), self._where(group)) for name in table})
            numbers[places] = np.arange(count, count + len(places))
            count += len(places)
        return _joined(tables), numbers

    def _group(self, group: int) -> Table:
        found: Table = self.cache.get(group, lambda: self._decoded(group))
        return found

    def _where(self, group: int) -> str:
        file, number = self._places[group]
        return f"{self._paths[file]}, row group {number}"

    def _decoded(self, group: int) -> tuple[Table, int]:
        file, number = self._places[group]
        where = self._where(group)
        try:
            table = self._files[file].read_row_group(number, columns=self._names, use_threads=False)
            columns = {name: plain_values(table.column(name)) for name in self._names}
            for values in columns.values():
                values.validate(full=True)  # UTF-8, and that offsets are in order
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ShardCorrupt(f"{where}: {error}") from error
        wanted = int(self.starts[group + 1] - self.starts[group])
        if table.num_rows != wanted:
            raise ShardCorrupt(f"{where}: the footer says {wanted} rows, and it has {table.num_rows}")
        for name, values in columns.items():
            if values.null_count and name in self._fill_null:
                columns[name] = pc.fill_null(values, self._fill_null[name])
        return {name: _column(name, values, where) for name, values in columns.items()}, max(
            sum(values.nbytes for values in columns.values()), 1
        )


def _file(path: str) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    nbytes = os.path.getsize(path)
    if not nbytes:
        raise ShardCorrupt(f"{path}, offset 0: the file is empty; a Parquet file has a footer even without rows")
    try:
        return pq.ParquetFile(path, memory_map=False, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardCorrupt(f"{path}, offset {max(nbytes - 8, 0)}: {error}") from error


def _check_alike(path: str, schema: Any, fields: Sequence[Any], first: str) -> None:
    for field in fields:
        has = schema.field(field.name).type if field.name in schema.names else None
        if has != field.type:
            raise NoField(
                f"{path}: column {field.name!r} is {has or 'not there'}, and {field.type} in {first}; the files of a dataset "
                f"have the "
                "same columns"
            )


def _column(name: str, values: Any, where: str) -> ArrowColumn:
    if values.null_count:
        raise SampleError(
            f"{where}: column {name!r} has {values.null_count} nulls, which no array holds: give fill_null={{{name!r}: value}}, or "
            "leave it out of columns="
        )
    found = column_of(name, values)
    if found is None:
        raise SampleError(
            f"{where}: column {name!r} of {values.type} has nulls within its lists, or lists within lists that differ in length; "
            "leave it out of columns="
        )
    return found


def _check_shape(column: ArrowColumn, shape: tuple[int, ...]) -> None:
    known = [extent for extent in column.extents if extent is not None]
    if len(known) < len(column.extents) or prod(known) != prod(shape):
        has = "lists of different lengths" if len(known) < len(column.extents) else f"{prod(known)} values"
        raise SampleError(
            f"column {column.name!r}: the schema says rows of shape {shape}, and row groups here have {has}; the "
            f"first "
            "extent of a ragged field is None"
        )


def _joined(tables: Sequence[Table]) -> Table:
    """The tables of several groups as one, whose chunks are theirs."""
    return tables[0] if len(tables) == 1 else {name: _one_column([table[name] for table in tables]) for name in tables[0]}


def _one_column(columns: Sequence[ArrowColumn]) -> ArrowColumn:
    first = columns[0]
    is_alike = len({column.extents for column in columns}) == 1
    lengths = np.concatenate([np.diff(column.starts) for column in columns])
    return replace(
        first,
        extents=first.extents if is_alike else (None, *first.extents[1:]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        chunks=np.concatenate([column.chunks for column in columns]),
        table=[column.table for column in columns],
    )
