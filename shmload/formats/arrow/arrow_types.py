"""The arrow types that can be fields of a batch, and the numpy dtype of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def dtype_of(kind: Any) -> Any:
    """Return the numpy dtype of the values of an arrow type, or str or bytes for text; None for any other type."""
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return str
    if types.is_binary(kind) or types.is_large_binary(kind):
        return bytes
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def is_list(kind: Any) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def offset_nbytes(kind: Any) -> int:
    """Return the size of one offset in bytes for a type of lists, text or binary values; 0 for lists of a fixed size."""
    if isinstance(kind, pa.FixedSizeListType):
        return 0
    return 8 if str(kind).startswith("large_") else 4  # of lists, strings and binary values


def plain_type(kind: Any) -> Any:
    """Return the arrow type to which a column is converted when it is read.

    Dictionaries become their values, dates and times become integers, tensors of one shape become lists, string views become
    strings, and binary views and binary values of a fixed size become binary. Other types do not change.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind) or types.is_date64(kind):
        return pa.int64()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if str(kind) == "string_view":
        return pa.string()
    return pa.binary() if types.is_fixed_size_binary(kind) or str(kind) == "binary_view" else kind


def plain_values(values: Any) -> Any:
    """Return a column converted to its `plain_type`."""
    if isinstance(values.type, pa.BaseExtensionType):
        return pa.chunked_array([chunk.storage for chunk in values.chunks], values.type.storage_type)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    wanted = plain_type(values.type)
    return values if wanted == values.type else values.cast(wanted)
