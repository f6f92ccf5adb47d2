"""Entries from what people keep them in: DataFrames and manifest files.

A manifest is read row by row and never held as a whole. Nothing is guessed: what a file does not type (.csv, .tsv) is str unless
`types` says otherwise, so that "007" stays what it is.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from shmload._core.index_builder import ColumnBuilder
from shmload.index.layout import Layout
from shmload.index.pack import Packed, pack_columns, pack_entries

Types = Mapping[str, Callable[[str], Any]]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def pack_dataframe(frame: Any) -> Packed:
    """Packs the columns of a pandas DataFrame, or of anything with `columns` and `frame[name]`.

    Raises:
        TypeError: it is no such thing, or a column's values cannot be held.
        ValueError: a value is missing. NaN in a column of floats is a value.
    """
    names = getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise TypeError(f"a DataFrame has columns; got a {type(frame).__name__}")
    names = list(names)
    if len(set(names)) < len(names):
        raise ValueError(f"the columns of an index have different names; got {names}")
    return pack_columns({name: _values(name, frame[name]) for name in names})


def pack_manifest(path: str | os.PathLike[str], types: Types | None) -> Packed:
    """Packs a .jsonl, .csv, .tsv, .txt or .parquet file; the first four also as .gz.

    Raises:
        TypeError, ValueError, OverflowError: an entry does not fit; its number and the file are in the text.
        ImportError: a .parquet file without pyarrow.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if types and suffix not in _DELIMITERS:
        raise ValueError(f"{path}: types are for .csv and .tsv; a {suffix} file says by itself what its values are")
    try:
        if path.suffix == ".parquet":
            return _pack_parquet(path)
        if suffix not in (".jsonl", ".txt", *_DELIMITERS):
            raise ValueError(
                f"a manifest is .jsonl, .csv, .tsv or .txt (or any of them .gz), or .parquet; got {path.suffix!r}"
            )
        errors = "surrogateescape" if suffix == ".txt" else "strict"  # as os.listdir gives file names that are no UTF-8
        with _open_text(path, errors) as file:
            return pack_entries(_rows(file, suffix, types or {}))
    except (TypeError, ValueError, OverflowError) as error:
        raise _same(error)(f"{path}: {error}") from error


def _open_text(path: Path, errors: str) -> TextIO:
    opened = gzip.open if path.suffix == ".gz" else open
    return cast(TextIO, opened(path, "rt", encoding="utf-8", errors=errors, newline=""))


def _rows(file: TextIO, suffix: str, types: Types) -> Iterator[Any]:
    if suffix == ".txt":
        return _lines(file)
    if suffix == ".jsonl":
        return (json.loads(line) for line in _lines(file))
    return _table(file, _DELIMITERS[suffix], types)


def _lines(file: TextIO) -> Iterator[str]:
    """Lines without their ends; empty ones are no entries."""
    for line in file:
        text = line.rstrip("\r\n")
        if text:
            yield text


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
            raise ValueError(
                f"entry {number}: {len(values)} values in line {reader.line_num}, and {len(names)} columns {names}"
            )
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        for name, convert in types.items():
            try:
                row[name] = convert(row[name])
            except ValueError as error:
                raise ValueError(f"entry {number}, column {name!r}: {error}") from error
        yield row


def _pack_parquet(path: Path) -> Packed:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{path}: .parquet manifests need pyarrow: pip install pyarrow") from error
    with parquet.ParquetFile(path) as file:
        builders = [ColumnBuilder(name) for name in file.schema_arrow.names]
        if not builders:
            raise ValueError("an index of rows needs at least one column, got none")
        for batch in file.iter_batches():
            for builder, column in zip(builders, batch.columns, strict=True):
                builder.extend(column.to_pylist())
    return Packed(Layout.of(builders, dict), builders)


def _values(name: str, column: Any) -> Any:
    """A column's values: an array where they are numbers, else something that gives them one by one."""
    dtype = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return np.asarray(column)
    if hasattr(column, "isna"):
        missing = np.flatnonzero(np.asarray(column.isna()))
        if len(missing):
            raise ValueError(
                f"column {name!r} has {len(missing)} missing values, the first in row {missing[0]}: fill or drop them before"
            )
    own = getattr(dtype, "numpy_dtype", None)  # pandas' nullable and Arrow types of numbers
    if isinstance(own, np.dtype) and own.kind in "biuf":
        return column.to_numpy(dtype=own)
    return column


def _same(error: Exception) -> type[Exception]:
    """The class to raise again: those whose text is not their one argument (UnicodeDecodeError) become ValueError."""
    return type(error) if type(error) in (TypeError, ValueError, OverflowError) else ValueError
