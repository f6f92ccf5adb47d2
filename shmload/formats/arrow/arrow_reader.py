"""Open Parquet and Arrow IPC data, in local files and in ranges of objects, and return arrow tables from it.

pyarrow is imported at the first use. Its threads are not used, because they do not exist in a forked worker. All tables are
validated, because pyarrow reads at damaged offsets without a check.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from shmload.errors import ShardCorrupt, is_of_system
from shmload.formats.extras import library
from shmload.formats.field_names import NoField
from shmload.formats.parquet.parquet_footer import RowGroup, check_readable, file_footer, is_signed, row_groups

__all__ = [
    "check_encryption",
    "checked_columns",
    "ipc_batch",
    "ipc_file",
    "parquet_file",
    "parquet_metadata",
    "parquet_part",
    "readable_groups",
    "row_group",
]


def checked_columns(available: Sequence[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """Return the names of the columns to read.

    Args:
        available: the names of a table's columns.
        columns: the requested columns, or None for all.
        where: the file or block, for errors.
    Raises:
        NoField: a column is missing, or its name is not unique.
    """
    if columns is not None and (unknown := [name for name in columns if name not in available]):
        raise NoField(f"{where}: columns names {unknown}, which do not exist; it has {list(available)}")
    counts = Counter(available)
    if any(counts[name] > 1 for name in columns or available):
        raise NoField(f"{where}: two columns have the same name: {list(available)}; fields of a sample have names of their own")
    if not available:
        raise NoField(f"{where}: has no columns")
    return list(available if columns is None else columns)


def parquet_file(path: str, metadata: Any = None) -> Any:
    """Open a local file as a `pyarrow.parquet.ParquetFile`.

    Args:
        path: path of the file.
        metadata: pyarrow's metadata of its footer, if they are known.
    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the system cannot open it, for example because too many files are open.
        ShardCorrupt: the file is empty, or its footer is damaged.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    if not (nbytes := os.path.getsize(path)):
        raise ShardCorrupt(f"{path}, offset 0: the file is empty; a Parquet file has a footer even without rows")
    return _opened(path, f"{path}, offset {max(nbytes - 8, 0)}", metadata)


def parquet_part(where: str, begin: int, data: bytes, nbytes: int, metadata: Any) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` of which only one range of bytes can be read, such as a row group.

    Args:
        where: the file and the row group, for errors.
        begin: offset of the range.
        data: bytes of the range.
        nbytes: size of the file before its footer.
        metadata: pyarrow's metadata of the footer.
    Raises:
        ShardCorrupt: the metadata belongs to another file.
    """
    return _opened(library("pyarrow", "parquet").PythonFile(_Part(begin, data, nbytes), "r"), where, metadata)


def _opened(source: Any, where: str, metadata: Any = None) -> Any:
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    try:
        return parquet.ParquetFile(source, metadata=metadata, memory_map=False, pre_buffer=False, page_checksum_verification=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        if is_of_system(error):
            raise
        raise ShardCorrupt(f"{where}: {error}") from error


def parquet_metadata(where: str, footer: bytes) -> Any:
    """Return pyarrow's metadata of a footer.

    Raises:
        ShardCorrupt: it is damaged.
    """
    arrow, parquet = library("pyarrow", "parquet"), library("pyarrow.parquet", "parquet")
    try:
        return parquet.read_metadata(arrow.BufferReader(b"PAR1" + footer))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ShardCorrupt(f"{where}: the footer of its Parquet is damaged: {error}") from error


def readable_groups(where: str, footer: bytes, metadata: Any, columns: Sequence[str] | None, remedy: str) -> list[RowGroup]:
    """Return the row groups that a footer lists, unless a column to read is encrypted.

    Args:
        where: the file, for errors.
        footer: bytes of the footer.
        metadata: pyarrow's metadata of the same footer.
        columns: the columns to read, or None for all.
        remedy: how to read other columns; ends the message.
    Raises:
        NoField: columns are encrypted.
        ShardCorrupt: the footer is damaged.
    """
    try:
        groups = row_groups(footer)
    except ValueError as error:
        raise ShardCorrupt(f"{where}: the footer of its Parquet is damaged: {error}") from error
    check_readable(where, groups, metadata, columns, remedy)
    return groups


def check_encryption(path: str, metadata: Any, columns: Sequence[str] | None, remedy: str) -> None:
    """Raise if a column to read in a local file is encrypted.

    Args:
        path: path of the file.
        metadata: pyarrow's metadata of its footer.
        columns: the columns to read, or None for all.
        remedy: as for `readable_groups`.
    Raises:
        NoField: columns are encrypted.
        ShardCorrupt: the footer is damaged.
    """
    footer = file_footer(path)
    if is_signed(footer, metadata):
        readable_groups(path, footer, metadata, columns, remedy)


def row_group(file: Any, number: int, columns: Sequence[str], where: str) -> Any:
    """Decode a row group and validate it. Return it as a pyarrow table.

    Args:
        file: the file, from `parquet_file`.
        number: number of the row group.
        columns: the columns to decode.
        where: the file and the row group, for errors.
    Raises:
        ShardCorrupt: its bytes are damaged.
    """
    arrow = library("pyarrow", "parquet")
    try:
        table = file.read_row_group(number, columns=list(columns), use_threads=False)
        table.validate(full=True)  # checks that text is UTF-8, and that offsets are in order
    except (arrow.ArrowException, OSError, ValueError) as error:
        if is_of_system(error):
            raise
        raise ShardCorrupt(f"{where}: {error}") from error
    return table


def ipc_file(data: Any) -> Any:
    """Open an Arrow IPC file (Feather version 2) that is in memory or mapped. Nothing is copied; batches are views of `data`.

    Raises:
        pyarrow.ArrowException, OSError: it is damaged.
    """
    return library("pyarrow.ipc", "parquet").open_file(library("pyarrow", "parquet").py_buffer(memoryview(data).cast("B")))


def ipc_batch(file: Any, number: int) -> Any:
    """Return a record batch of an IPC file, after validating it.

    Raises:
        pyarrow.ArrowException, OSError: it is damaged.
    """
    batch = file.get_batch(number)
    batch.validate(full=True)
    return batch


class _Part(io.RawIOBase):
    """A file of `nbytes` bytes of which only the range at `begin` can be read."""

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
