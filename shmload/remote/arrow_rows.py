"""Rows of Arrow: Parquet's row groups, and what makes a row's values of a column.

Format: https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.columns import BlockCache, PerProcess, library
from shmload.remote.block_index import SCALARS, BlockLayout, Read, RecordIndex

__all__ = ["Parquet", "cell", "column_of"]

_NUMBERS = {*SCALARS, "float", "double", "halffloat", "bool"}  # types whose columns are arrays


@dataclass(frozen=True)
class Parquet(BlockLayout):
    """Rows of Parquet. A row group is read by one range, decoded whole, and kept by this process while there is room.

    Lists of numbers become arrays; what else a column holds, what pyarrow makes of it.

    Args:
        columns: those that samples have; None: all.
        cache_bytes: of decoded row groups, for each dataset in each process.
    """

    name: ClassVar[str] = "parquet"
    columns: tuple[str, ...] | None = None
    cache_bytes: int = 1 << 28
    _decoded: PerProcess[BlockCache] = field(default_factory=PerProcess, init=False, compare=False, repr=False)

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        tail = bytes(memoryview(read(max(nbytes - 8, 0), min(nbytes, 8))).cast("B"))
        size = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or size + 12 > nbytes:
            raise ShardCorrupt(f"{url}: at byte {max(nbytes - 8, 0)}: the end of a Parquet file is needed; there is {tail!r}")
        begin = nbytes - 8 - size
        footer = bytes(memoryview(read(begin, size + 8)).cast("B"))
        metadata = _metadata(url, footer)
        firsts, starts = [0], []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(k) for k in range(group.num_columns)]
            places = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in chunks]
            starts.append(min(places, default=0))
            firsts.append(firsts[-1] + group.num_rows)
        bounds = np.array([*starts, begin], np.int64)
        return RecordIndex(url, bounds, np.array(firsts, np.int64), footer)

    def sample(self, index: RecordIndex, number: int, read: Read) -> dict[str, Any]:
        block, row = index.block(number)
        cache = self._decoded.get(lambda: BlockCache(self.cache_bytes))
        columns = cache.get((index.path, block), lambda: self._group(index, block, read, cache))
        return {name: cell(column, row) for name, column in columns.items()}

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        raise NotImplementedError("rows come out of a row group")

    def _group(self, index: RecordIndex, block: int, read: Read, cache: BlockCache) -> tuple[dict[str, Any], int]:
        """The columns of a row group, and the bytes they take."""
        arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
        begin, nbytes = index.span(block)
        try:
            source = arrow.PythonFile(_Part(begin, bytes(memoryview(read(begin, nbytes)).cast("B")), int(index.bounds[-1])), "r")
            footer = index.extra  # of all row groups, so it takes longer to parse than one of many takes to decode
            metadata = cache.get((index.path, "footer"), lambda: (_metadata(index.path, footer), len(footer)))
            file = parquet.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
            if missing := set(self.columns or ()).difference(file.schema_arrow.names):
                raise ValueError(f"has no column {', '.join(sorted(missing))}; it has {', '.join(file.schema_arrow.names)}")
            table = file.read_row_group(block, columns=None if self.columns is None else list(self.columns), use_threads=False)
            table.validate(full=True)  # UTF-8 among else
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


def cell(column: Any, row: int) -> Any:
    value = column[row]
    if isinstance(column, np.ndarray):
        return value
    if column.null_count and isinstance(alone := column_of(column.slice(row, 1)), np.ndarray):
        return alone[0]  # a number, of the type that it has in a row group without nulls
    inner = getattr(value, "values", None)  # of a list; a struct has a method of that name
    if getattr(inner, "null_count", 1) == 0 and isinstance(numbers := column_of(inner), np.ndarray):
        return numbers.copy()
    return value.as_py()
