"""ParquetDataset: rows of Parquet files by their number, copied from decoded row groups into the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shmload.formats.paths import Paths, expanded
from shmload.formats.readers.columns import ColumnDataset, Opened, library


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
        self.paths = expanded(paths, "Parquet")
        super().__init__(f"{len(self.paths)} Parquet files")
        self._columns = None if columns is None else list(columns)
        self._asked = dict(schema or {})
        self._fill_null = dict(fill_null or {})
        self._cache_bytes = cache_bytes
        if self._columns is not None and not self._columns:
            raise ValueError("columns needs at least one name; None takes all of them")

    def _open(self) -> Opened:
        library("pyarrow.parquet", "parquet")
        from shmload.formats.readers.arrow_tables import Groups

        return Groups(self.paths, self._columns, self._asked, self._fill_null, self._cache_bytes)

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """The row that each row group begins with, and the number of rows; int64, shape `(row groups + 1,)`."""
        starts: NDArray[np.int64] = cast(Any, self._opened).starts
        return starts

    @property
    def block_size(self) -> int:
        """Rows of the largest row group: what `BlockShuffle` takes for its blocks. Groups of one size make the best use of it."""
        return max(int(np.diff(self.block_starts).max(initial=0)), 1)

    @property
    def num_decoded(self) -> int:
        """Row groups that this process has decoded."""
        return int(cast(Any, self._opened).cache.num_decoded)
