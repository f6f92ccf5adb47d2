"""The row groups of local Parquet files, open in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from shmload.formats.arrow.arrow_groups import Groups
from shmload.formats.arrow.arrow_reader import check_encryption, row_group
from shmload.formats.arrow.arrow_schema import schema_of
from shmload.formats.arrow.arrow_types import plain_values
from shmload.formats.parquet.hive import partition_columns, with_partitions
from shmload.formats.parquet.parquet_files import ParquetFiles


class RowGroups(Groups):
    """The `Groups` of a `ParquetDataset`: all row groups of its files, except empty ones.

    Args:
        paths: paths of the files.
        folders: for each file, the folder below which names of folders are columns (hive.py).
        names: names of the columns, or None for all.
        asked: the user's own entries of the schema.
        fill_null: values in place of nulls, by column.
        cache_bytes: size limit of the decoded row groups.
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
        self._files = ParquetFiles(paths)
        self._paths = paths
        partitions = partition_columns(paths, folders, names)
        schemas = {path: with_partitions(self._files[f].schema_arrow, partitions, path) for f, path in enumerate(paths)}
        schema = schema_of(schemas, names, asked, fill_null, "files")
        self._partitions = {name: values for name, values in partitions.items() if name in schema}
        self._stored = [name for name in schema if name not in partitions]
        every = []
        for f, path in enumerate(paths):
            metadata = self._files.metadata[f]
            check_encryption(path, metadata, self._stored, "name the others in columns=")
            every += [(f, g, metadata.row_group(g)) for g in range(metadata.num_row_groups)]
        self._places = [(f, g) for f, g, group in every if group.num_rows]
        sizes = [(group.num_rows, group.total_byte_size) for _, _, group in every if group.num_rows]
        super().__init__(schema, sizes, fill_null, cache_bytes)

    def _where(self, group: int) -> str:
        file, number = self._places[group]
        return f"{self._paths[file]}, row group {number}"

    def _load(self, group: int) -> Mapping[str, Any]:
        file, number = self._places[group]
        table = row_group(self._files[file], number, self._stored, self._where(group))
        columns = {name: plain_values(table.column(name)) for name in self._stored}
        num_rows = int(self.starts[group + 1] - self.starts[group])
        partitions = {name: pa.chunked_array([pa.repeat(values[file], num_rows)]) for name, values in self._partitions.items()}
        return columns | partitions
