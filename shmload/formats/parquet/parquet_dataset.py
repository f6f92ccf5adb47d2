"""`ParquetDataset`: rows of Parquet files by their number, copied from decoded row groups into the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmload.formats.column_dataset import GroupedDataset, Opened
from shmload.formats.extras import library
from shmload.formats.field_names import columns_of
from shmload.formats.paths import Paths, expanded_below


class ParquetDataset(GroupedDataset):
    """Rows of Parquet files, in the order of the files.

    A row group is decoded as a whole when one of its rows is first read, and kept in a cache of this process; rows are copied from
    there into the batch without Python objects. So a random order over all rows decodes a row group for nearly every row, unless
    all row groups fit in the cache. Read in blocks instead, with a `BlockShuffle` of `block_size` rows whose window fits in the
    cache. Every worker reads rows of every window, and each has its own cache.

    Numbers and booleans become numbers, strings become text, lists of numbers become ragged arrays, fixed-size lists become arrays,
    and lists of strings become lists. Dates, times and durations become int64, or int32 if they have 32 bits, in their own unit.
    Dictionaries are expanded.

    Below a folder, or below the fixed part of a pattern, folders named like `year=2024` (Hive's partitions) are columns, by the
    rules of `pyarrow.dataset(folder, partitioning="hive")`: int32 if all values are integers, else text; null for files outside
    such a folder. They replace a column of the same name and type in the files.

    Args:
        paths: files, folders or patterns with * ? [ ]. The files of a folder or a pattern are sorted by name. Hidden files, and
            files in hidden folders, whose names begin with . or _, are ignored. In a folder, files named *.parquet, *.pq or *.parq
            are read, or, if there are none, files whose names have no ending.
        columns: the columns that samples have; all by default.
        schema: type and shape of some fields, in place of the stored ones: {"x": "float32"} converts; {"image": ("uint8", (28,
            28))} means that lists have that many values, in every row.
        fill_null: values in place of nulls, by column. Without one, a null is an error.
        cache_bytes: size limit of the decoded row groups, for each process that reads.
    Raises:
        FileNotFoundError: a pattern or a folder has no such file.
        ValueError: `columns` is empty; on reading: a column does not exist, differs between files, or cannot be a field.
        ModuleNotFoundError: pyarrow is not installed (extra `parquet`).
        ShardCorrupt: on reading: a file does not match its format.
        SampleError: on reading: a row has a null, or another number of values than the schema requires.
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
        found = expanded_below(paths, "Parquet", endings=(".parquet", ".pq", ".parq"))
        self.paths = [path for path, _ in found]
        self._folders = [folder for _, folder in found]
        super().__init__(f"{len(self.paths)} Parquet files", self.paths)
        self._columns = columns_of(columns)
        self._asked = dict(schema or {})
        self._fill_null = dict(fill_null or {})
        self._cache_bytes = cache_bytes

    def _open(self) -> Opened:
        library("pyarrow.parquet", "parquet")
        from shmload.formats.parquet.row_groups import RowGroups

        return RowGroups(self.paths, self._folders, self._columns, self._asked, self._fill_null, self._cache_bytes)
