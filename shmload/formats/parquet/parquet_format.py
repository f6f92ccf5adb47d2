"""The format Parquet: a row group is read with one request and decoded as a whole.

Format: https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shmload.formats.arrow.arrow_reader import (
    checked_columns,
    parquet_file,
    parquet_metadata,
    parquet_part,
    readable_groups,
    row_group,
)
from shmload.formats.arrow.arrow_values import array_or_values, value_of
from shmload.formats.block_cache import BlockCache
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.column_format import describe_dataset
from shmload.formats.extras import library
from shmload.formats.field_names import columns_of
from shmload.formats.head import Head
from shmload.formats.index_json import IndexJson
from shmload.formats.litdata.litdata_index import PARQUET_LOADER, item_loader_of, listed_chunks
from shmload.formats.parquet.hive import partition_columns, partition_types, with_partitions
from shmload.formats.parquet.parquet_dataset import ParquetDataset
from shmload.formats.parquet.parquet_footer import footer_begin, is_signed
from shmload.formats.per_process import PerProcess
from shmload.formats.summary import Summary


@dataclass(frozen=True)
class Parquet(BlockFormat):
    """Rows of Parquet. A row group is read with one request, decoded as a whole, and kept in this process's cache.

    Lists of numbers become arrays; other values become pyarrow's Python objects. If keys in a folder have parts such as
    `year=2024/` (Hive's partitions), these are columns, too, as in `ParquetDataset`.

    Args:
        columns: the columns that samples have, or None for all.
        cache_bytes: size limit of the decoded row groups, for each dataset in each process.
    Raises:
        TypeError: `columns` is a single string, or not of strings.
        ValueError: `columns` is empty.
    """

    name: ClassVar[str] = "parquet"
    title: ClassVar[str] = "Parquet"
    endings: ClassVar[tuple[str, ...]] = (".parquet",)
    columns: tuple[str, ...] | None = None
    cache_bytes: int = 1 << 28
    _folder: str = field(default="", repr=False)  # URL of the folder below which names of folders are columns
    _types: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # those columns, and their arrow types
    _decoded: PerProcess[BlockCache] = field(default_factory=PerProcess, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (names := columns_of(self.columns)) is not None:
            object.__setattr__(self, "columns", tuple(names))

    def in_folder(self, url: str, keys: Sequence[str]) -> Parquet:
        """Return the format of the objects of a folder, with the columns that their keys contain.

        Args:
            url: URL of the folder.
            keys: keys of all objects of the dataset, below the folder.
        Raises:
            NoField: a name is not UTF-8, or a column has no value at all.
        """
        if not any("=" in key for key in keys):
            return self
        return replace(self, _folder=url, _types=tuple(partition_types(keys, self.columns).items()))

    def recognize(self, head: Head) -> bool:
        return head.starts_with(b"PAR1")

    def describe(self, head: Head, num_samples: int) -> Summary:
        found = describe_dataset(self.title, head, ParquetDataset, num_samples, _lengths, "columns")
        metadata = parquet_file(str(head.path)).metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        sizes = [size for size in sizes if size]
        found.notes.append(f"{len(sizes)} row groups of up to {max(sizes, default=1):,} rows")
        return found

    def listed(self, index: Mapping[str, Any], where: str) -> IndexJson | None:
        """Return the contents of an index.json that LitData wrote for files of Parquet; None for any other."""
        if item_loader_of(index) != PARQUET_LOADER:
            return None
        return IndexJson(self, listed_chunks(index))

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        tail = bytes(memoryview(read(max(nbytes - 8, 0), min(nbytes, 8))).cast("B"))
        end = footer_begin(url, nbytes, tail)
        footer = bytes(memoryview(read(end, nbytes - end)).cast("B"))
        groups = readable_groups(url, footer, parquet_metadata(url, footer), self.columns, _REMEDY)
        starts = [end]
        for group in reversed(groups):  # a group without rows has no pages: it ends where it begins
            starts.append(group.begin if group.num_rows and group.begin is not None else starts[-1])
        firsts = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        return RecordIndex(url, np.array(starts[::-1], np.int64), firsts, footer)

    def sample(self, index: RecordIndex, number: int, read: Read) -> dict[str, Any]:
        block, row = index.block(number)
        cache = self._decoded.get(lambda: BlockCache(self.cache_bytes))
        columns = cache.get((index.path, block), lambda: self._group(index, block, read, cache))
        where = f"{index.path}: row group {block}, row {row}"
        return {name: value_of(column, row, where, name) for name, column in columns.items()}

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        begin, _ = index.span(index.block(sample)[0])
        return self.sample(index, sample, lambda at, nbytes: data[at - begin : at - begin + nbytes])

    def _checked(self, url: str, footer: bytes) -> Any:
        """Return pyarrow's metadata of a footer.

        Encrypted columns are checked for again, because the index may have been made when other columns were requested.
        """
        metadata = parquet_metadata(url, footer)
        if is_signed(footer, metadata):
            readable_groups(url, footer, metadata, self.columns, _REMEDY)
        return metadata

    def _group(self, index: RecordIndex, block: int, read: Read, cache: BlockCache) -> tuple[dict[str, Any], int]:
        """Return the columns of a row group, and their size in bytes."""
        begin, nbytes = index.span(block)
        data, footer = bytes(memoryview(read(begin, nbytes)).cast("B")), index.extra
        # the footer describes all row groups, so parsing it takes longer than decoding one of many
        metadata = cache.get((index.path, "footer"), lambda: (self._checked(index.path, footer), len(footer)))
        where = f"{index.path}: row group {block}, at byte {begin}"
        arrow = library("pyarrow", "parquet")
        file = parquet_part(where, begin, data, int(index.bounds[-1]), metadata)
        partitions = self._partitions(index.path)
        names = checked_columns(with_partitions(file.schema_arrow, partitions, index.path).names, self.columns, index.path)
        table = row_group(file, block, [name for name in names if name not in partitions], where)
        num_rows = table.num_rows
        found = {
            name: array_or_values(
                arrow.repeat(partitions[name][0], num_rows) if name in partitions else table.column(name).combine_chunks()
            )
            for name in names
        }
        return found, table.nbytes

    def _partitions(self, url: str) -> dict[str, Any]:
        """Return the columns that a shard's key contains, as arrow arrays of one value."""
        if not self._types:
            return {}
        return partition_columns([url], [self._folder], None, dict(self._types))


def _lengths(path: Path) -> dict[str, int]:
    """Return the number of rows of each column of a file."""
    file = parquet_file(str(path))
    return dict.fromkeys(file.schema_arrow.names, file.metadata.num_rows)


_REMEDY = "give layout=Parquet(columns=...), of shmload.remote.layouts, without them"
