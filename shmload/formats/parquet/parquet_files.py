"""The Parquet files of a dataset that are open in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmload.formats.arrow.arrow_reader import parquet_file
from shmload.formats.open_files import OpenFiles


class ParquetFiles(OpenFiles):
    """`OpenFiles` whose items are `pyarrow.parquet.ParquetFile`s.

    Attributes:
        metadata: for each file, pyarrow's metadata, once it has been opened.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.metadata: dict[int, Any] = {}

    def _opened(self, number: int) -> Any:
        file = parquet_file(self._paths[number], self.metadata.get(number))
        self.metadata[number] = file.metadata
        return file
