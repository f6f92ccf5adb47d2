"""The Parquet files of a dataset that are open in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shmload.errors import ShardCorrupt
from shmload.formats.arrow.arrow_reader import parquet_file

MAX_OPEN = 64  # a process may usually open 1,024 files, and a dataset may have more


class OpenFiles:
    """Files that are opened when they are needed; at most `MAX_OPEN` of them stay open, those that were used last.

    A file that was changed since it was first opened is refused, because its metadata are not read again.

    Args:
        paths: paths of the files.
    Attributes:
        metadata: for each file, pyarrow's metadata, once it has been opened.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._versions: dict[int, tuple[int, int]] = {}  # size and time of modification of each file when it was first opened
        self._open: dict[int, Any] = {}  # the one used last is the last
        self.metadata: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        """Return a file as a `pyarrow.parquet.ParquetFile`.

        Raises:
            FileNotFoundError, OSError: the file cannot be opened.
            ShardCorrupt: its footer is damaged, or the file was changed.
        """
        file = self._open.pop(number, None)
        if file is None:
            file = self._opened(number)
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[number] = file
        return file

    def _opened(self, number: int) -> Any:
        path = self._paths[number]
        file = parquet_file(path, self.metadata.get(number))
        status = os.stat(path)
        version = status.st_size, status.st_mtime_ns
        if (known := self._versions.setdefault(number, version)) != version:
            file.close()
            raise ShardCorrupt(f"{path}: was changed since it was opened, with {known[0]} bytes: create the dataset again")
        self.metadata[number] = file.metadata
        return file
