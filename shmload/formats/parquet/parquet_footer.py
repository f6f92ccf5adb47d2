"""The metadata of a Parquet file that pyarrow does not provide: where row groups begin, and which columns are encrypted.

pyarrow aborts the process when the metadata of a column chunk is requested that was encrypted with the column's own key, so the
footer is parsed here instead. It is one struct of Thrift's compact protocol.

Formats: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, .../Encryption.md and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shmload.errors import ShardCorrupt
from shmload.formats.field_names import NoField

__all__ = ["RowGroup", "check_readable", "file_footer", "footer_begin", "is_signed", "row_groups"]

TRAILER_NBYTES = 8  # at the end of a file: length of the footer, and the magic
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(14)


@dataclass(frozen=True)
class RowGroup:
    """A row group, according to the footer.

    Attributes:
        num_rows: number of its rows.
        begin: offset of its first unencrypted page; None if all are encrypted.
        encrypted: numbers of its encrypted columns, counted as the leaves of the schema.
    """

    num_rows: int
    begin: int | None
    encrypted: tuple[int, ...]


def row_groups(footer: bytes) -> list[RowGroup]:
    """Return the row groups of a footer.

    Args:
        footer: the `FileMetaData` struct; bytes after it are ignored.
    Raises:
        ValueError: it is damaged.
    """
    try:
        return [_row_group(group) for group in _struct(footer, 0)[0].get(4, ())]
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its metadata is not a Thrift struct of row groups: {type(error).__name__}: {error}") from error


def _row_group(group: dict[int, Any]) -> RowGroup:
    columns = group[1]
    encrypted = tuple(k for k, column in enumerate(columns) if 8 in column)
    readable = [column[3] for column in columns if 8 not in column]
    begins = [min(meta[9], meta.get(11) or meta[9]) for meta in readable]  # offsets of the data, and of a dictionary if any
    if not all(isinstance(number, int) for number in (group[3], *begins)):
        raise TypeError("numbers are of another type")
    return RowGroup(group[3], min(begins, default=None), encrypted)


def check_readable(where: str, groups: Iterable[RowGroup], metadata: Any, names: Sequence[str] | None, remedy: str) -> None:
    """Raise if a column to read is encrypted.

    Args:
        where: the file, for errors.
        groups: row groups of its footer.
        metadata: pyarrow's metadata of the same footer.
        names: names of the columns to read, or None for all.
        remedy: how to read other columns; ends the message.
    Raises:
        NoField: a column is encrypted; the message names all such columns.
    """
    numbers = sorted({k for group in groups for k in group.encrypted})
    paths = [metadata.schema.column(k).path for k in numbers if k < metadata.num_columns]
    wanted = [path for path in paths if names is None or any(path == n or path.startswith(f"{n}.") for n in names)]
    if wanted:
        raise NoField(f"{where}: columns {wanted} are encrypted, and shmload decrypts no Parquet; {remedy}")


def is_signed(footer: bytes, metadata: Any) -> bool:
    """Return whether a footer has a signature after its metadata, as files with encrypted columns do.

    Args:
        footer: a result of `file_footer`.
        metadata: pyarrow's metadata of the same footer.
    """
    return bool(len(footer) - TRAILER_NBYTES != metadata.serialized_size)


def file_footer(path: str) -> bytes:
    """Return the footer of a local file: the metadata, a signature if any, the footer's length, and the magic.

    Raises:
        ShardCorrupt: the file does not end as a Parquet file does, or its footer is encrypted.
    """
    nbytes = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(nbytes - TRAILER_NBYTES, 0))
        begin = footer_begin(path, nbytes, file.read())
        file.seek(begin)
        return file.read()


def footer_begin(where: str, nbytes: int, trailer: bytes) -> int:
    """Return the offset at which the footer begins.

    Args:
        where: the file, for errors.
        nbytes: size of the file.
        trailer: its last 8 bytes.
    Raises:
        ShardCorrupt: the bytes do not end a Parquet file, or its footer is encrypted.
    """
    at = max(nbytes - TRAILER_NBYTES, 0)
    if trailer[4:] == b"PARE":
        raise ShardCorrupt(
            f"{where}: at byte {at}: the footer of this Parquet file is encrypted, and shmload decrypts no Parquet: write it again "
            "without encryption"
        )
    size = int.from_bytes(trailer[:4], "little")
    if trailer[4:] != b"PAR1" or size + 12 > nbytes:
        raise ShardCorrupt(f"{where}: at byte {at}: the end of a Parquet file is needed; there is {trailer!r}")
    return nbytes - TRAILER_NBYTES - size


# ------------------------------------------------------------ Thrift's compact protocol


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return (field number -> value, offset after the struct)."""
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        kind = head & 15
        if kind == _STOP:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if kind <= _FALSE:
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, at, kind)


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        return _signed(data, at)
    if kind == _BINARY:
        nbytes, at = _varint(data, at)
        return data[at : at + nbytes], at + nbytes
    if kind == _STRUCT:
        return _struct(data, at)
    if kind in (_LIST, _SET):
        head = data[at]
        count, at = _varint(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
        values = []
        for _ in range(count):
            value, at = _value(data, at, head & 15)
            values.append(value)
        return values, at
    if kind == _MAP:
        count, at = _varint(data, at)
        kinds, at = (data[at], at + 1) if count else (0, at)
        for _ in range(count):
            _, at = _value(data, at, kinds >> 4)
            _, at = _value(data, at, kinds & 15)
        return None, at  # skipped: Parquet's metadata has no maps
    nbytes = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8, _UUID: 16}[kind]
    if at + nbytes > len(data):
        raise IndexError(f"a value ends beyond byte {len(data)}")
    return data[at : at + nbytes], at + nbytes


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value = shift = 0
    while byte >= 128 and shift < 70:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        byte = data[at]
    return (value | byte << shift) & 0xFFFF_FFFF_FFFF_FFFF, at + 1
