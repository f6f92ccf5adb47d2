"""What fields the columns of a Parquet file are, by their arrow types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shmload.batch.dtypes import of_any
from shmload.formats.readers.columns import NoField


def fields_of(schema: Any, path: str, names: Sequence[str] | None) -> list[Any]:
    """The arrow fields of the columns that samples have.

    Raises:
        NoField: there is none, or not the one that was asked for.
    """
    unknown = [name for name in names or () if name not in schema.names]
    if unknown:
        raise NoField(f"{path}: columns names {unknown}, which are not there; it has {schema.names}")
    if len(set(schema.names)) < len(schema.names):
        raise NoField(f"{path}: two columns have one name: {schema.names}; fields of a sample have names of their own")
    if not schema.names:
        raise NoField(f"{path}: has no columns")
    return [schema.field(name) for name in (schema.names if names is None else names)]


def spec_of(field: Any, path: str, asked: Any) -> Any:
    """A schema's entry for a column.

    Args:
        asked: the user's own entry, or None.
    Raises:
        NoField: rows of it are no field of a batch, or not what was asked for.
    """
    kind = plain_type(field.type)
    extents: list[int | None] = []
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        extents.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    text = _text_of(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and not extents)
    if not ((text is not None and not extents) or (is_number and None not in extents[1:])):
        raise NoField(
            f"{path}: column {field.name!r} of {field.type} is no field of a batch: those are numbers, text, and lists of numbers; "
            "name the others in columns="
        )
    if text is not None:
        return text if asked in (None, text, (text, ())) else _refuse(field, path, asked)
    if asked is None:
        return np.dtype(kind.to_pandas_dtype()).name, tuple(extents)
    dtype, shape = asked if isinstance(asked, tuple) else (asked, tuple(extents))
    found = None if dtype in (str, bytes) else of_any(dtype).numpy
    is_ragged = bool(shape) and shape[0] is None
    if found is None or bool(shape) != bool(extents) or (is_ragged and tuple(shape) != tuple(extents)):
        return _refuse(field, path, asked)
    return found.name, tuple(shape)


def _refuse(field: Any, path: str, asked: Any) -> Any:
    raise NoField(
        f"{path}: column {field.name!r} is stored as {field.type} and cannot be read as schema says: {asked!r}"
    )


def _text_of(kind: Any) -> type | None:
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return str
    return bytes if types.is_binary(kind) or types.is_large_binary(kind) else None


def plain_type(kind: Any) -> Any:
    """The arrow type that a column is read as: without dictionaries, times as integers."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind) or types.is_date64(kind):
        return pa.int64()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    return pa.binary() if types.is_fixed_size_binary(kind) else kind


def plain_values(values: Any) -> Any:
    """A column as its `plain_type`."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    wanted = plain_type(values.type)
    return values if wanted == values.type else values.cast(wanted)
