"""Read the entries of a SharedIndex from a DataFrame or from a file: .jsonl, .csv, .tsv, .txt or .parquet."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from shmload._core.index_builder import ColumnBuilder
from shmload.errors import is_of_system
from shmload.formats.arrow.arrow_reader import check_encryption
from shmload.formats.extras import library
from shmload.formats.shared_index.packed_index import PackedIndex, check_names, pack_columns, pack_entries

Types = Mapping[str, Callable[[str], Any]]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def pack_dataframe(frame: Any) -> PackedIndex:
    """Pack the columns of a pandas DataFrame, or of any object with `columns` and `frame[name]`.

    Raises:
        TypeError: the object has no columns, or the values of a column cannot be stored.
        ValueError: a value is missing. NaN in a column of floats counts as a value.
    """
    names = getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise TypeError(f"a DataFrame has columns; got {type(frame).__name__}")
    names = list(names)
    check_names(names)
    return pack_columns({name: _values(name, frame[name]) for name in names})


def pack_manifest(path: str | os.PathLike[str], types: Types | None) -> PackedIndex:
    """Pack the entries of a .jsonl, .csv, .tsv, .txt or .parquet file; the first four may be compressed as .gz.

    Args:
        path: path of the file.
        types: converters of columns of .csv and .tsv, by name; other columns are str.
    Raises:
        TypeError, ValueError, OverflowError: an entry cannot be stored; the message names its number and the file.
        ImportError: reading .parquet needs pyarrow.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if types and suffix not in _DELIMITERS:
        raise ValueError(f"{path}: types= is only for .csv and .tsv; {suffix} files define the types of their values")
    try:
        if path.suffix == ".parquet":
            return _pack_parquet(path)
        if suffix not in (".jsonl", ".txt", *_DELIMITERS):
            raise ValueError(f"a manifest is .jsonl, .csv, .tsv or .txt (or any of them .gz), or .parquet; got {path.suffix!r}")
        errors = "surrogateescape" if suffix == ".txt" else "strict"  # as os.listdir returns file names that are not UTF-8
        with open(path, "rb") as begin:
            is_zipped = path.suffix == ".gz" or begin.read(2) == b"\x1f\x8b"
        opened: Any = gzip.open if is_zipped else open
        with opened(path, "rt", encoding="utf-8-sig", errors=errors, newline="") as file:  # some editors write a mark at the start
            if suffix in _DELIMITERS:
                return pack_entries(_table(file, _DELIMITERS[suffix], types or {}))
            lines = filter(None, (line.rstrip("\r\n") for line in file))
            return pack_entries(lines if suffix == ".txt" else map(_from_json, lines, count()))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: the gzip stream is damaged or cut: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, ValueError, OverflowError, ImportError) as error:
        # not the error's own type, whose constructor may need other arguments (UnicodeDecodeError)
        kind = next(kind for kind in (TypeError, ValueError, OverflowError, ImportError) if isinstance(error, kind))
        raise kind(f"{path}: {error}") from error


def _from_json(line: str, entry: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"entry {entry}: {error}") from error


def _table(file: Iterable[str], delimiter: str, types: Types) -> Iterator[dict[str, Any]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    names = next(reader, [])
    if not all(names) or not names or len(set(names)) < len(names):
        raise ValueError(f"the first line names the columns, each once; got {names}")
    unknown = sorted(set(types) - set(names))
    if unknown:
        raise ValueError(f"types names columns {unknown}, and the file has {names}")
    for number, values in enumerate(row for row in reader if row):
        if len(values) != len(names):
            raise ValueError(f"entry {number}: {len(values)} values in line {reader.line_num}, and {len(names)} columns {names}")
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        for name, convert in types.items():
            try:
                row[name] = _truth(row[name]) if convert is bool else convert(row[name])
            except ValueError as error:
                raise ValueError(f"entry {number}, column {name!r}: {error}") from error
        yield row


def _truth(text: str) -> bool:
    """Return the value of a column of bools. Python's own conversion of a str says only whether it is empty."""
    if (word := text.lower()) not in ("true", "false", "1", "0"):
        raise ValueError(f"{text!r} is neither true nor false, 1 nor 0")
    return word in ("true", "1")


def _pack_parquet(path: Path) -> PackedIndex:
    try:
        with library("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            check_names(file.schema_arrow.names)
            check_encryption(str(path), file.metadata, None, "write the others into a file of their own")
            builders = [ColumnBuilder(name) for name in file.schema_arrow.names]
            for batch in file.iter_batches():
                for name, builder, column in zip(batch.schema.names, builders, batch.columns, strict=True):
                    try:
                        values = column.to_pylist()
                    except Exception as error:  # raised by Python's dates or time zones
                        raise ValueError(f"column {name!r} of {column.type}: {type(error).__name__}: {error}") from error
                    builder.extend(values)
    except OSError as error:
        if is_of_system(error):
            raise
        raise ValueError(str(error)) from error  # pyarrow's own error about the contents of the file
    return PackedIndex.of(builders, dict)


def _values(name: str, column: Any) -> Any:
    """Return a column's values: an array if they are numbers, otherwise an iterable."""
    dtype = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return np.asarray(column)
    if hasattr(column, "isna"):
        missing = np.flatnonzero(np.asarray(column.isna()))
        if len(missing):
            raise ValueError(
                f"column {name!r} has {len(missing)} missing values, the first in row {missing[0]}: fill or drop them first"
            )
    own = getattr(dtype, "numpy_dtype", None)  # numeric types among pandas' nullable and Arrow types
    if isinstance(own, np.dtype) and own.kind in "biuf":
        return column.to_numpy(dtype=own)
    return column
