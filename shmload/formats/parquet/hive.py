"""Columns in the names of folders, as Hive, Spark and pyarrow write partitioned data: `year=2024/month=01/part-0.parquet`.

The rules are those of `pyarrow.dataset(folder, partitioning="hive")`: names and values are URL-decoded; a column is int32 if all of
its values are, else a string; `__HIVE_DEFAULT_PARTITION__`, and a file without a column that others have, are null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from shmload.formats.extras import library
from shmload.formats.field_names import NoField

__all__ = ["partition_columns", "partition_types", "with_partitions"]

_NULL = "__HIVE_DEFAULT_PARTITION__"


def partition_columns(
    paths: Sequence[str], folders: Sequence[str], wanted: Sequence[str] | None, types: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the columns in the names of folders, by name. A column is an arrow array with one value for each file.

    Args:
        paths: absolute paths of the files, or URLs.
        folders: for each file, the folder below which names of folders are columns.
        wanted: the columns to read, or None for all.
        types: types of the columns, which `partition_types` found for more files than these.
    Raises:
        NoField: a name is not UTF-8, or a column has no value at all.
    """
    of_files = [_partitions_of(path, path[len(folder.rstrip("/")) + 1 :]) for path, folder in zip(paths, folders, strict=True)]
    if types is not None:
        arrow = library("pyarrow", "parquet")
        texts = {name: arrow.array([one.get(name) for one in of_files], arrow.string()) for name in types}
        return {name: texts[name].cast(kind) for name, kind in types.items()}
    names = dict.fromkeys(name for one in of_files for name in one if wanted is None or name in wanted)
    return {name: _typed(name, [one.get(name) for one in of_files], paths[0]) for name in names}


def partition_types(keys: Sequence[str], wanted: Sequence[str] | None) -> dict[str, str]:
    """Return the arrow types, as strings, of the columns that the keys of a dataset's objects contain.

    Args:
        keys: keys of all objects, below the folder of the dataset.
        wanted: the columns to read, or None for all.
    Raises:
        NoField: a name is not UTF-8, or a column has no value at all.
    """
    found = partition_columns([f"/{key}" for key in keys], ["/"] * len(keys), wanted)
    return {name: str(values.type) for name, values in found.items()}


def with_partitions(schema: Any, partitions: dict[str, Any], path: str) -> Any:
    """Return the arrow schema of a file, followed by the columns in the names of folders.

    Args:
        schema: the file's own schema.
        partitions: a result of `partition_columns`.
        path: path of the file, for the error.
    Raises:
        NoField: the file has a column of the same name and of another type.
    """
    for name, values in partitions.items():
        if name not in schema.names:
            schema = schema.append(library("pyarrow", "parquet").field(name, values.type))
        elif schema.field(name).type != values.type:
            raise NoField(
                f"{path}: column {name!r} is {schema.field(name).type} in the file, and {values.type} by the name of its folder; "
                "name the others in columns=, or give the paths of the files, because the names of folders are then not columns"
            )
    return schema


def _partitions_of(path: str, below: str) -> dict[str, str | None]:
    """Return the columns in the names of a file's folders, by name; the outermost folder of a name decides. None is null."""
    found: dict[str, str | None] = {}
    for segment in below.split("/")[:-1]:
        name, sign, value = segment.partition("=")
        if sign:
            try:
                name, value = (unquote_to_bytes(part).decode() for part in (name, value))
            except UnicodeDecodeError:
                raise NoField(f"{path}: the folder name {segment!r} is not UTF-8 after URL decoding; rename the folder") from None
            found.setdefault(name, None if value == _NULL else value)
    return found


def _typed(name: str, values: list[str | None], path: str) -> Any:
    if all(value is None for value in values):
        raise NoField(
            f"{path}: the folders' names give column {name!r} the value {_NULL} only, so its type is unknown; name the others in "
            "columns="
        )
    arrow = library("pyarrow", "parquet")
    texts = arrow.array(values, arrow.string())
    try:
        return texts.cast(arrow.int32())
    except arrow.ArrowInvalid:
        return texts
