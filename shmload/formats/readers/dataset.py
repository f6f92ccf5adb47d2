"""What the datasets of columns share: rows by number, into a batch or one by one, of files that each process opens itself."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload.formats.paths import check_local
from shmload.formats.readers.one_sample import OneSample
from shmload.formats.readers.per_process import PerProcess

Indices = NDArray[np.int64]


class Opened(Protocol):
    """A dataset as it is open in this process."""

    num_rows: int
    schema: dict[str, Any]

    def read(self, rows: Indices, out: Any) -> None:
        """Writes these rows, which exist, to a batch."""


class ColumnDataset(ABC):
    """Samples that are rows of named columns. A pickled dataset is its arguments; a process opens the file when it first reads."""

    def __init__(self) -> None:
        self._held: PerProcess[Opened] = PerProcess()

    @abstractmethod
    def _open(self) -> Opened: ...

    @property
    def _opened(self) -> Opened:
        return self._held.get(self._open)

    @property
    def schema(self) -> dict[str, Any]:
        """Type and shape of each field, {"x": ("float32", (8,))}; None in a shape: it differs from row to row. Opens the file."""
        return self._opened.schema

    def __len__(self) -> int:
        return self._opened.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = OneSample(self.schema)
        self.read_batch_into([operator.index(index)], out)
        return out.sample()

    def read_batch_into(self, indices: Sequence[int] | NDArray[Any], out: Any) -> None:
        """Writes rows to those of a batch.

        Args:
            indices: integers, shape `(rows,)`; negative ones count from the end.
            out: an array for each field of `schema`, with a leading dimension of `rows`; text and ragged fields as a ShmLoader's
                batch takes them.
        Raises:
            IndexError: there is no such row.
            ShardCorrupt: the file is not what its format says.
        """
        opened = self._opened
        opened.read(_checked(indices, opened.num_rows), out)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._held = PerProcess()

    def __repr__(self) -> str:
        count = f"{len(self)} samples" if self._held.is_open else "not opened yet"
        return f"<{type(self).__name__} of {self._source}, {count}>"

    @property
    @abstractmethod
    def _source(self) -> str: ...


class ArrayTreeDataset(ColumnDataset):
    """Rows of arrays that one file or folder holds by their paths within it."""

    def __init__(
        self, path: str | os.PathLike[str], fields: Mapping[str, str] | None = None, *, cache_bytes: int = 1 << 28
    ) -> None:
        super().__init__()
        check_local(path, type(self).__name__)
        self.path = os.path.abspath(path)
        self._fields = None if fields is None else dict(fields)
        self._cache_bytes = cache_bytes

    @property
    def _source(self) -> str:
        return self.path


def _checked(indices: Any, num_rows: int) -> Indices:
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"indices are integers; got {given.dtype}")
    rows = given.astype(np.int64)
    outside = (rows < -num_rows) | (rows >= num_rows)
    if outside.any():
        raise IndexError(f"index {rows[outside][0]} is out of range: the dataset has {num_rows} samples")
    return np.where(rows < 0, rows + num_rows, rows)
