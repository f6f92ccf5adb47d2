"""Arrow tables group by group, of Parquet files or of whatever has rows in groups, and their rows as addresses.

The groups that a batch takes rows of are seen as one table whose chunks are theirs (`ArrowColumn`), so that one native copy a
column serves a batch, however many groups its rows come of. A batch that touches more groups than the cache holds takes its rows
out of one after the other instead: it never holds more than one of them beside the cache.

pyarrow's own threads are not used: they would not be there in a forked worker, and workers are what decodes in parallel here.

What fields the columns of a Parquet file are, by their arrow types.

A column of an arrow table as addresses: where the bytes of each row lie, chunk by chunk.

Arrow keeps the values of a column end to end, however deeply lists are nested around them; offsets (or a fixed length) say where
each row's begin. So a row of a column whose lists are all equally long is one run of bytes at a place that follows from its
number, and a row of text or of a ragged list is one run between two offsets. Nothing is copied or decoded to know this; the
buffers may be those of a file that is mapped into memory, and then every worker reads the same pages.

Offsets are believed only after they were looked at: what lies outside a chunk's values is never read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs
from shmload.batch.element_types import of_any
from shmload.batch.text_runs import TextRuns
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats.columns import BlockCache, Indices, NoField
from shmload.formats.hive import partition_columns, with_partitions
from shmload.formats.parquet_footer import check_file

Chunk = tuple[int, int, int, int]  # address of element 0, of the first offset (0: rows of one length), first, last element


@dataclass(frozen=True, eq=False)
class ArrowColumn:
    """One column.

    Attributes:
        dtype: numpy's of the values; str or bytes for text.
        extents: shape of a row; None in front: rows differ in it.
        is_variable: whether the first dimension may differ between rows, by its type.
        starts: row number at which each chunk begins, and the number of rows.
        table: keeps the memory.
    """

    name: str
    dtype: Any
    extents: tuple[int | None, ...]
    is_variable: bool
    starts: Indices
    chunks: NDArray[np.int64]  # a Chunk each
    offset_nbytes: int
    table: Any = field(repr=False)  # which would print its values

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of the first dimension; of a row where there is none."""
        return 1 if self.dtype in (str, bytes) else prod(self.inner) * int(self.dtype.itemsize)

    @property
    def inner(self) -> tuple[int, ...]:
        """The extents behind the first."""
        return tuple(e for e in self.extents[1:] if e is not None)

    def read(self, rows: Indices, out: NDArray[Any]) -> None:
        """Copies rows of one shape to `out`, of shape `(len(rows), *extents)`, converting them to its dtype."""
        chunk, local = self._located(rows)
        origins = self.chunks[chunk, 0]
        if self.dtype == np.bool_:
            bits = self.chunks[chunk, 2] + local
            held = np.empty(len(rows), np.uint8)
            gather_rows(origins + (bits >> 3), 1, held)
            out[...] = (held >> (bits & 7).astype(np.uint8)) & 1
            return
        nbytes = self.element_nbytes * ((self.extents[0] or 0) if self.extents else 1)
        addresses = origins + self.chunks[chunk, 2] * self.element_nbytes + local * nbytes
        self._fill(out, lambda room: gather_rows(addresses, nbytes, room))

    def lengths(self, rows: Indices) -> tuple[Indices, Indices]:
        """Of ragged rows: (address, number of elements) of each."""
        chunk, local = self._located(rows)
        origins, _, first, last = self.chunks[chunk].T
        if not self.offset_nbytes:
            length = self.extents[0] or 0
            return origins + local * length * self.element_nbytes, np.full(len(rows), length, np.int64)
        pairs = np.empty((len(rows), 2), np.int32 if self.offset_nbytes == 4 else np.int64)
        addresses = self.chunks[chunk, 1] + local * self.offset_nbytes
        gather_rows(addresses, 2 * self.offset_nbytes, pairs.reshape(-1).view(np.uint8))
        begin, end = pairs.T.astype(np.int64)
        if (begin < first).any() or (end > last).any() or (end < begin).any():
            raise SampleError(
                f"column {self.name!r} of the arrow table has offsets that are not in order, or lead out of its values: the file "
                "is damaged; write it anew"
            )
        return origins + begin * self.element_nbytes, end - begin

    def read_ragged(self, rows: Indices, out: Any) -> None:
        """Copies ragged rows to what `out.reserve` gives."""
        addresses, lengths = self.lengths(rows)
        self._fill(
            out.reserve(self.name, lengths.tolist()), lambda room: gather_runs(addresses, lengths * self.element_nbytes, room)
        )

    def _fill(self, out: Any, gather: Callable[[Any], None]) -> None:
        """Has values of the column gathered into `out`, which may be of another dtype."""
        held = out if out.dtype == self.dtype else np.empty(out.shape, self.dtype)
        gather(held.reshape(-1).view(np.uint8))
        if held is not out:
            with np.errstate(all="ignore"):  # a float64 beyond float32 is inf, as torch has it
                out[...] = held

    def text(self, rows: Indices, *, strips_nul: bool) -> TextRuns:
        """Rows of text, to be copied from where they lie.

        Args:
            strips_nul: leave out the NULs at the end of values, as numpy's arrays of text do.
        """
        addresses, lengths = self.lengths(rows)
        if strips_nul:
            _strip_nul(addresses, lengths)
        return TextRuns(addresses, lengths, is_bytes=self.dtype is bytes, owner=self.table)

    def _located(self, rows: Indices) -> tuple[Any, Indices]:
        """(chunk, row within it) of each row."""
        if len(self.starts) == 2:
            return np.zeros(len(rows), np.int64), rows
        chunk = np.searchsorted(self.starts, rows, "right") - 1
        return chunk, rows - self.starts[chunk]


@dataclass(frozen=True, eq=False)
class TextLists:
    """A column whose rows are lists of text, which only pyarrow reads.

    Attributes:
        name: of the column.
        table: a ChunkedArray of the rows.
    """

    name: str
    table: Any = field(repr=False)

    def read(self, rows: Indices) -> list[Any]:
        """Return rows as pyarrow's `to_pylist` does: lists of str or bytes; nulls within them are None."""
        found: list[Any] = self.table.take(pa.array(rows)).to_pylist()
        return found


def _strip_nul(addresses: Indices, lengths: Indices) -> None:
    """Shortens the values that end with NUL."""
    left = np.flatnonzero(lengths)
    while len(left):
        ends = np.empty(len(left), np.uint8)
        gather_rows(addresses[left] + lengths[left] - 1, 1, ends)
        left = left[ends == 0]
        lengths[left] -= 1
        left = left[lengths[left] > 0]


def column_of(name: str, column: Any) -> ArrowColumn | None:
    """The addresses of a ChunkedArray; None if its rows are no plain numbers, text, or lists of numbers, or some are null."""
    depth, leaf = 0, column.type
    while _is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    dtype = _dtype_of(leaf)
    if column.null_count or dtype is None or (depth and (dtype in (str, bytes) or dtype == np.bool_)):
        return None
    arrays = [chunk for chunk in column.chunks if len(chunk)]
    walks = [walk for array in arrays if (walk := _walked(array, dtype)) is not None]
    if not walks or len(walks) < len(arrays):
        return None
    chunks, extents = zip(*walks, strict=True)
    inner = {extents_of[1:] for extents_of in extents}
    outer = {extents_of[0] for extents_of in extents if extents_of}
    if len(inner) > 1 or 0 in next(iter(inner)):
        return None
    first = () if not outer else (outer.pop() if len(outer) == 1 else None,)
    offset_nbytes = _offset_nbytes(column.type) if depth or dtype in (str, bytes) else 0
    return ArrowColumn(
        name,
        dtype,
        (*first, *next(iter(inner))),
        bool(depth) and offset_nbytes > 0,
        np.cumsum([0, *map(len, arrays)], dtype=np.int64),
        np.array(chunks, np.int64),
        offset_nbytes,
        column,
    )


def _walked(array: Any, dtype: Any) -> tuple[Chunk, tuple[int | None, ...]] | None:
    """One chunk and the shape of its rows; None if it has nulls inside, or lists in lists that differ in length."""
    if dtype in (str, bytes):
        _, offsets, data = array.buffers()
        places = _offsets_of(array, offsets, 0, len(array))
        first, last = int(places[0]), int(places[-1])
        nbytes = 0 if data is None else data.size
        is_sound = 0 <= first <= last <= nbytes
        return ((data.address if data else 0, places.ctypes.data, first, last), ()) if is_sound else None
    extents: list[int | None] = []
    outer: Any = None  # the first level's offsets, if it has any
    first, count = 0, len(array)
    while _is_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            length: int | None = array.type.list_size
            first, count = (array.offset + first) * array.type.list_size, count * array.type.list_size
        else:
            places = _offsets_of(array, array.buffers()[1], first, count)
            length = _common_length(places)
            if not 0 <= places[0] <= places[-1] <= len(array.values) or (length is None and extents):
                return None
            outer = outer if extents else places
            first, count = int(places[0]), int(places[-1]) - int(places[0])
        array = array.values
        extents.append(length)
        if array.null_count or first + count > len(array):
            return None
    data = array.buffers()[1]
    at = array.offset + first
    if dtype == np.bool_:
        return (data.address, 0, at, at + count), ()
    address = data.address + at * dtype.itemsize if data else 0
    if outer is None:
        return (address, 0, 0, count), tuple(extents)
    element_nbytes = prod(e or 0 for e in extents[1:]) * dtype.itemsize
    origin = address - int(outer[0]) * element_nbytes
    return (origin, outer.ctypes.data, int(outer[0]), int(outer[-1])), tuple(extents)


def _offsets_of(array: Any, buffer: Any, first: int, count: int) -> NDArray[Any]:
    """The offsets of `count` rows of an array from its row `first` on, and one more."""
    if not count:  # which may have no buffer
        return np.zeros(1, np.int64)
    nbytes = _offset_nbytes(array.type)
    return np.frombuffer(buffer, f"int{8 * nbytes}", count + 1, (array.offset + first) * nbytes)


def _common_length(places: NDArray[Any]) -> int | None:
    """How long every row is; None if they differ."""
    count, total = len(places) - 1, int(places[-1]) - int(places[0])
    length = total // count if count else 0
    if total != length * count:  # which most ragged columns show by their sum
        return None
    return length if (np.diff(places) == length).all() else None


def _dtype_of(kind: Any) -> Any:
    """numpy's dtype of the values of an arrow type, str or bytes; None for what is none of these."""
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return str
    if types.is_binary(kind) or types.is_large_binary(kind):
        return bytes
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def _is_list(kind: Any) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _offset_nbytes(kind: Any) -> int:
    """Bytes of one offset of a type; 0 if it has none."""
    if isinstance(kind, pa.FixedSizeListType):
        return 0
    return 8 if str(kind).startswith("large_") else 4  # of lists, strings and binary values


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
    shape = getattr(field.type, "shape", None)  # of tensors
    if asked is None and shape is not None and _is_list(kind):
        asked = _dtype_of(kind.value_type), tuple(shape)
    extents: list[int | None] = []
    while _is_list(kind):
        extents.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    stored = _dtype_of(kind)
    is_text = stored in (str, bytes)
    if is_text and extents and not isinstance(field.type, pa.BaseExtensionType):
        spec = stored, (None,) * len(extents)
        return spec if asked in (None, spec) else _refuse(field, path, asked)
    is_permuted = getattr(field.type, "permutation", None) is not None
    if stored is None or None in extents[1:] or is_permuted or (extents and (is_text or stored == np.bool_)):
        is_picture = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        decode = f"RemoteDataset.from_urls(folder).indexed(decode={{{field.name!r}: ImageDecoder()}})"
        remedy = f", or read its pictures with {decode}" if is_picture else ""
        raise NoField(
            f"{path}: column {field.name!r} of {field.type} is no field of a batch: those are numbers, text, and lists of these; "
            f"name the others in columns={remedy}"
        )
    if is_text:
        return stored if asked in (None, stored, (stored, ())) else _refuse(field, path, asked)
    if asked is None:
        return stored.name, tuple(extents)
    dtype, shape = asked if isinstance(asked, tuple) else (asked, tuple(extents))
    found = None if dtype in (str, bytes) else of_any(dtype).numpy
    is_ragged = bool(shape) and shape[0] is None
    if found is None or bool(shape) != bool(extents) or (is_ragged and tuple(shape) != tuple(extents)):
        return _refuse(field, path, asked)
    return found.name, tuple(shape)


def _refuse(field: Any, path: str, asked: Any) -> Any:
    raise NoField(f"{path}: column {field.name!r} is stored as {field.type} and cannot be read as schema says: {asked!r}")


def plain_type(kind: Any) -> Any:
    """The arrow type that a column is read as: without dictionaries, times as integers, tensors of one shape as lists."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind) or types.is_date64(kind):
        return pa.int64()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    return pa.binary() if types.is_fixed_size_binary(kind) else kind


def plain_values(values: Any) -> Any:
    """A column as its `plain_type`."""
    if isinstance(values.type, pa.BaseExtensionType):
        return pa.chunked_array([chunk.storage for chunk in values.chunks], values.type.storage_type)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    wanted = plain_type(values.type)
    return values if wanted == values.type else values.cast(wanted)


Table = dict[str, ArrowColumn | TextLists]


class Groups(ABC):
    """The rows of tables that are had one by one, open in this process.

    Attributes:
        starts: row number at which each group begins, and the number of rows.
    Args:
        sizes: (rows, bytes) of each group, none of which is empty.
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
        self._last: tuple[Table, Indices] = {}, self._nowhere  # of some groups, and where each begins there; -1: it is not in it
        self._num_joined = 0  # groups, since all that the cache holds were joined

    @abstractmethod
    def _load(self, group: int) -> Mapping[str, Any]:
        """The columns of a group, each a ChunkedArray of the schema's plain type."""

    @abstractmethod
    def _where(self, group: int) -> str:
        """How an error names it."""

    def read(self, rows: Indices, out: Any) -> None:
        """Writes these rows to a batch."""
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
        """(a table that holds these rows, their numbers in it)."""
        group_of = np.searchsorted(self.starts, rows, "right") - 1
        table, begins = self._last
        if (begins[group_of] < 0).any():
            table, begins = self._last = {}, self._nowhere  # which held groups that the cache may put out now
            groups = np.unique(group_of)
            if len(groups) > 1 and int(self._nbytes[groups].sum()) > self._cache_bytes:
                return self._picked(rows, group_of, groups)
            tables = {group: self._group(group) for group in groups.tolist()}
            self._num_joined += len(tables)
            if self._num_joined >= self.cache.num_decoded:  # so all of them together cost no more than these alone
                tables, self._num_joined = {**tables, **self.cache.held()}, 0
            held = np.array(list(tables))
            lengths = self.starts[held + 1] - self.starts[held]
            begins = self._nowhere.copy()
            begins[held] = np.cumsum(lengths) - lengths
            self._last = table, begins = _joined(list(tables.values())), begins
        return table, begins[group_of] + rows - self.starts[group_of]

    def _picked(self, rows: Indices, group_of: Indices, groups: Indices) -> tuple[Table, Indices]:
        """The rows by themselves, from one group after the other."""
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
            raise ShardCorrupt(f"{where}: it was said to have {wanted} rows, and it has {found}")
        for name, values in columns.items():
            if values.null_count and name in self._fill_null:
                columns[name] = pc.fill_null(values, self._fill_null[name])
        nbytes = max(sum(values.nbytes for values in columns.values()), 1)
        return {name: _column(name, values, where, self.schema[name]) for name, values in columns.items()}, nbytes


class RowGroups(Groups):
    """The row groups of Parquet files.

    Args:
        paths: of the files.
        folders: for each, the folder below which names of folders are columns (hive.py).
        names: of the columns; None: all.
        asked: the user's own entries of the schema.
        fill_null: values in place of nulls, by column.
        cache_bytes: of decoded row groups.
    """

    def __init__(
        self,
        paths: Sequence[str],
        folders: Sequence[str],
        names: Sequence[str] | None,
        asked: Mapping[str, Any],
        fill_null: Mapping[str, Any],
        cache_bytes: int,
    ) -> None:
        self._files = [_file(path) for path in paths]
        self._paths = paths
        said = partition_columns(paths, folders, names)
        schemas = {path: with_partitions(file.schema_arrow, said, path) for path, file in zip(paths, self._files, strict=True)}
        schema = schema_of(schemas, names, asked, fill_null, "files")
        self._said = {name: values for name, values in said.items() if name in schema}
        self._stored = [name for name in schema if name not in said]
        for path, file in zip(paths, self._files, strict=True):
            try:
                check_file(path, file.metadata, self._stored, "name the others in columns=")
            except NoField as error:
                raise NoField(f"{path}: {error}") from None
        every = [(f, g, file.metadata.row_group(g)) for f, file in enumerate(self._files) for g in range(file.num_row_groups)]
        self._places = [(f, g) for f, g, group in every if group.num_rows]
        sizes = [(group.num_rows, group.total_byte_size) for _, _, group in every if group.num_rows]
        super().__init__(schema, sizes, fill_null, cache_bytes)

    def _where(self, group: int) -> str:
        file, number = self._places[group]
        return f"{self._paths[file]}, row group {number}"

    def _load(self, group: int) -> Mapping[str, Any]:
        file, number = self._places[group]
        try:
            table = self._files[file].read_row_group(number, columns=self._stored, use_threads=False)
            columns = {name: plain_values(table.column(name)) for name in self._stored}
            for values in columns.values():
                values.validate(full=True)  # UTF-8, and that offsets are in order
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ShardCorrupt(f"{self._where(group)}: {error}") from error
        num_rows = int(self.starts[group + 1] - self.starts[group])
        said = {name: pa.chunked_array([pa.repeat(values[file], num_rows)]) for name, values in self._said.items()}
        return columns | said


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


def schema_of(
    schemas: Mapping[str, Any], names: Sequence[str] | None, asked: Mapping[str, Any], fill_null: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """The schema of what several tables have in common.

    Args:
        schemas: each one's arrow schema, by how an error names it.
        names: of the columns; None: all of the first one's.
        what: the tables are, in the plural.
    Raises:
        NoField: they are not alike, or rows of a column are no field of a batch.
    """
    first = next(iter(schemas))
    fields = fields_of(schemas[first], first, names)
    known = [field.name for field in fields]
    for argument, given in (("schema", asked), ("fill_null", fill_null)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise NoField(f"{argument} names {unknown}, which is no column here; those are {known}")
    for one, schema in schemas.items():
        for wanted in fields:
            has = schema.field(wanted.name).type if wanted.name in schema.names else None
            if has != wanted.type:
                raise NoField(
                    f"{one}: column {wanted.name!r} is {has or 'not there'}, and {wanted.type} in {first}; the {what} of a "
                    "dataset have the same columns"
                )
    return {field.name: spec_of(field, first, asked.get(field.name)) for field in fields}


def _column(name: str, values: Any, where: str, spec: Any) -> ArrowColumn | TextLists:
    """A column of a row group, or of some of its rows, as the schema's `spec` has it."""
    if values.null_count:
        raise SampleError(
            f"{where}: column {name!r} has {values.null_count} nulls, which no array holds: give fill_null={{{name!r}: value}}, or "
            "leave it out of columns="
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
    known = [extent for extent in found.extents if extent is not None]
    if None not in shape and (len(known) < len(found.extents) or prod(known) != prod(shape)):
        has = "lists of different lengths" if len(known) < len(found.extents) else f"{prod(known)} values"
        raise SampleError(
            f"{where}: column {name!r}: the schema says rows of shape {shape}, and row groups here have {has}; the first extent of "
            "a ragged field is None"
        )
    return found


def _joined(tables: Sequence[Table]) -> Table:
    """The tables of several groups as one, whose chunks are theirs."""
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
