"""Base classes of map-style datasets whose samples are rows of named columns."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from shmload.batch.row_placer import OneSample
from shmload.errors import ShardCorrupt
from shmload.formats.file_versions import FileVersions
from shmload.formats.per_process import PerProcess
from shmload.formats.row_numbers import Indices, checked_indices


class Opened(Protocol):
    """The open file of a `ColumnDataset` in this process."""

    num_rows: int
    schema: dict[str, Any]

    def read(self, rows: Indices, out: Any) -> None:
        """Write rows to a batch. The row numbers have been checked."""


class ColumnDataset(ABC):
    """Samples that are rows of named columns. A subclass opens the file in `_open`.

    A pickled dataset contains its arguments, and number and type of the rows if they are known; each process opens the file itself
    at the first use. A forked process refuses a file that was replaced since its parent opened it, because their samples would be
    of two versions. So does any process if the rows are fewer or of another type.

    Args:
        source: what is read, for its repr.
        files: paths of the files that `_open` opens and that must then stay as they are.
    """

    def __init__(self, source: str, files: Sequence[str] = ()) -> None:
        self._source = source
        self._files = files
        self._versions = FileVersions()
        self._rows_before: tuple[int, dict[str, Any]] | None = None  # number and schema of the rows then
        self._held: PerProcess[Opened] = PerProcess()

    @abstractmethod
    def _open(self) -> Opened: ...  # called once in each process, at the first use

    @property
    def _opened(self) -> Opened:
        return self._held.get(self._open_as_before)

    def _open_as_before(self) -> Opened:
        for path in self._files:
            with contextlib.suppress(OSError):  # `_open` raises an error that names the file
                self._versions.check(path)
        opened = self._open()
        if self._rows_before is None:
            self._rows_before = opened.num_rows, opened.schema
        num_rows, schema = self._rows_before
        if opened.num_rows < num_rows or opened.schema != schema:  # more rows may have been appended
            raise ShardCorrupt(
                f"{self._source}: it had {num_rows} rows of {schema} when the dataset first opened it, and now has "
                f"{opened.num_rows} rows of {opened.schema}: create the dataset again"
            )
        return opened

    @property
    def schema(self) -> dict[str, Any]:
        """Return type and shape of each field: {"x": ("float32", (8,))}. An extent of None is ragged. This opens the file."""
        return self._opened.schema

    def __len__(self) -> int:
        return self._opened.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = OneSample(self.schema)
        self.read_batch_into([operator.index(index)], out)
        return out.sample()

    def read_batch_into(self, indices: Sequence[int] | NDArray[Any], out: Any) -> None:
        """Write rows into the rows of a batch.

        Args:
            indices: integers, shape `(rows,)`; negative ones count from the end.
            out: an array for each field of `schema`, with a leading dimension of `rows`; text and ragged fields are in the form of
                a ShmLoader's batch.
        Raises:
            IndexError: an index is out of range.
            ShardCorrupt: the file does not match its format.
        """
        opened = self._opened
        opened.read(checked_indices(indices, opened.num_rows), out)

    def __repr__(self) -> str:
        count = f"{len(self)} samples" if self._held.is_open else "not opened yet"
        return f"<{type(self).__name__} of {self._source}, {count}>"


class GroupedDataset(ColumnDataset):
    """Samples whose rows are stored in groups, such as row groups of Parquet, each of which is loaded as a whole."""

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """Return the number of each group's first row, and the number of rows; int64, shape `(groups + 1,)`."""
        return cast("NDArray[np.int64]", cast(Any, self._opened).starts)

    @property
    def block_size(self) -> int:
        """Return the number of rows of the largest group, for `BlockShuffle`, which works best if all groups have one size."""
        return max(int(np.diff(self.block_starts).max(initial=0)), 1)

    @property
    def num_decoded(self) -> int:
        """Return the number of groups that this process has decoded."""
        return int(cast(Any, self._opened).cache.num_decoded)
