"""Rows of Arrow: Parquet's row groups, and what makes a row's values of a column.

Format: https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shmload.errors import SampleError, ShardCorrupt
from shmload.formats.columns import BlockCache, NoField, PerProcess, library, names_of
from shmload.formats.parquet_footer import RowGroup, check_readable, footer_begin, is_signed, row_groups
from shmload.remote.block_index import SCALARS, BlockLayout, Read, RecordIndex

__all__ = ["Parquet", "column_of", "value_of"]

_NUMBERS = {*SCALARS, "float", "double", "halffloat", "bool"}  # types whose columns are arrays


@dataclass(frozen=True)
class Parquet(BlockLayout):
    """Rows of Parquet. A row group is read by one range, decoded whole, and kept by this process while there is room.

    Lists of numbers become arrays; what else a column holds, what pyarrow makes of it.

    Args:
        columns: those that samples have; None: all.
        cache_bytes: of decoded row groups, for each dataset in each process.
    Raises:
        TypeError: `columns` is a single string, or not of strings.
    """

    name: ClassVar[str] = "parquet"
    columns: tuple[str, ...] | None = None
    cache_bytes: int = 1 << 28
    _decoded: PerProcess[BlockCache] = field(default_factory=PerProcess, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(names_of(self.columns, "columns")))

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        tail = bytes(memoryview(read(max(nbytes - 8, 0), min(nbytes, 8))).cast("B"))
        end = footer_begin(url, nbytes, tail)
        footer = bytes(memoryview(read(end, nbytes - end)).cast("B"))
        groups = self._row_groups(url, footer, _metadata(url, footer))
        starts = [end]
        for group in reversed(groups):  # one without rows has no pages: it ends where it begins
            starts.append(group.begin if group.num_rows and group.begin is not None else starts[-1])
        firsts = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        return RecordIndex(url, np.array(starts[::-1], np.int64), firsts, footer)

    def _row_groups(self, url: str, footer: bytes, metadata: Any) -> list[RowGroup]:
        """Return the row groups, if all columns of samples can be read."""
        try:
            groups = row_groups(footer)
            check_readable(
                groups, metadata, self.columns, "give layout=Parquet(columns=...), of shmload.remote.layouts, without them"
            )
        except NoField as error:
            raise NoField(f"{url}: {error}") from None
        except ValueError as error:
            raise ShardCorrupt(f"{url}: the footer of its Parquet is damaged: {error}") from error
        return groups

    def sample(self, index: RecordIndex, number: int, read: Read) -> dict[str, Any]:
        block, row = index.block(number)
        cache = self._decoded.get(lambda: BlockCache(self.cache_bytes))
        columns = cache.get((index.path, block), lambda: self._group(index, block, read, cache))
        where = f"{index.path}: row group {block}, row {row}"
        return {name: value_of(column, row, where, name) for name, column in columns.items()}

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        raise NotImplementedError("rows come out of a row group")

    def _checked(self, url: str, footer: bytes) -> Any:
        """Return pyarrow's metadata of a footer; an index that was made for other columns may have encrypted ones."""
        metadata = _metadata(url, footer)
        if is_signed(footer, metadata):
            self._row_groups(url, footer, metadata)
        return metadata

    def _group(self, index: RecordIndex, block: int, read: Read, cache: BlockCache) -> tuple[dict[str, Any], int]:
        """The columns of a row group, and the bytes they take."""
        arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
        begin, nbytes = index.span(block)
        try:
            source = arrow.PythonFile(_Part(begin, bytes(memoryview(read(begin, nbytes)).cast("B")), int(index.bounds[-1])), "r")
            footer = index.extra  # of all row groups, so it takes longer to parse than one of many takes to decode
            metadata = cache.get((index.path, "footer"), lambda: (self._checked(index.path, footer), len(footer)))
            file = parquet.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
            if missing := set(self.columns or ()).difference(file.schema_arrow.names):
                raise ValueError(f"has no column {', '.join(sorted(missing))}; it has {', '.join(file.schema_arrow.names)}")
            counts = Counter(file.schema_arrow.names)
            if twice := [name for name in self.columns or counts if counts[name] > 1]:
                raise NoField(f"{index.path}: several columns are named {twice}; the fields of a sample have names of their own")
            table = file.read_row_group(block, columns=None if self.columns is None else list(self.columns), use_threads=False)
            table.validate(full=True)  # UTF-8 among else
        except NoField:
            raise
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise ShardCorrupt(f"{index.path}: row group {block}, at byte {begin}: {error}") from error
        return {name: column_of(table.column(name).combine_chunks()) for name in table.column_names}, table.nbytes


class _Part(io.RawIOBase):
    """A file of which one part is there."""

    def __init__(self, begin: int, data: bytes, nbytes: int) -> None:
        self._begin, self._data, self._nbytes, self._at = begin, data, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        at = self._at - self._begin
        if at < 0 or at > len(self._data):
            raise ValueError(f"byte {self._at} belongs to another row group")
        found = self._data[at:] if size < 0 else self._data[at : at + size]
        self._at += len(found)
        return found


def _metadata(url: str, footer: bytes) -> Any:
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    try:
        return parquet.read_metadata(arrow.BufferReader(b"PAR1" + footer))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ShardCorrupt(f"{url}: the footer of its Parquet is damaged: {error}") from error


def column_of(values: Any) -> Any:
    """Numbers as an array, all else as pyarrow has it."""
    if values.null_count == 0 and str(values.type) in _NUMBERS:
        return values.to_numpy(zero_copy_only=False)
    return values


def value_of(column: Any, row: int, where: str, name: str) -> Any:
    """Return a row's value.

    Args:
        column: as `column_of` gives it.
        where: begins the message of an error: the file and the row.
    Raises:
        SampleError: Python's type does not hold the value.
    """
    try:
        return _cell(column, row)
    except Exception as error:  # of Python's dates, of time zones, of pyarrow
        raise SampleError(
            f"{where}: column {name!r} of {column.type} has a value that Python's type does not hold "
            f"({type(error).__name__}: {error}); leave it out by layout=Parquet(columns=...), or read the file by ParquetDataset, "
            "which gives times as integers"
        ) from error


def _cell(column: Any, row: int) -> Any:
    value = column[row]
    if isinstance(column, np.ndarray):
        return value
    if column.null_count and isinstance(alone := column_of(column.slice(row, 1)), np.ndarray):
        return alone[0]  # a number, of the type that it has in a row group without nulls
    inner = getattr(value, "values", None)  # of a list; a struct has a method of that name
    if getattr(inner, "null_count", 1) == 0 and isinstance(numbers := column_of(inner), np.ndarray):
        return numbers.copy()
    if (kind := _in_microseconds(column.type)) != column.type:
        column.take([row]).cast(kind)  # raises if nanoseconds would be lost; of a slice, all values of lists would be cast
    return value.as_py()


def _in_microseconds(kind: Any) -> Any:
    """Return a type whose times of day have microseconds, as Python's have."""
    arrow = library("pyarrow", "parquet")
    if arrow.types.is_list(kind):
        inner = _in_microseconds(kind.value_type)
        return kind if inner == kind.value_type else arrow.list_(inner)
    return arrow.time64("us") if kind == arrow.time64("ns") else kind
