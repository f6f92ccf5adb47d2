"""Convert values of arrow columns to Python objects and arrays, for formats whose samples have no schema."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from shmload.errors import SampleError
from shmload.formats.block_index import SCALARS
from shmload.formats.extras import library

_NUMBERS = {*SCALARS, "float", "double", "halffloat", "bool"}  # types whose columns are arrays


def array_or_values(values: Any) -> Any:
    """Return a column of numbers as a numpy array, and any other column unchanged."""
    if values.null_count == 0 and str(values.type) in _NUMBERS:
        return values.to_numpy(zero_copy_only=False)
    return values


def value_of(column: Any, row: int, where: str, name: str) -> Any:
    """Return the value of one row: a numpy scalar, an array for a list of numbers, or pyarrow's Python object. It is a copy.

    Args:
        column: a result of `array_or_values`.
        row: number of the row within the column.
        where: the file and the row, which begin the message of an error.
        name: name of the column, for errors.
    Raises:
        SampleError: Python's type cannot represent the value.
    """
    try:
        return _cell(column, row)
    except Exception as error:  # raised by Python's dates, by time zones or by pyarrow
        raise SampleError(
            f"{where}: column {name!r} of {column.type} has a value that its Python type cannot represent "
            f"({type(error).__name__}: {error}); leave it out by layout=Parquet(columns=...), or read the file by ParquetDataset, "
            "which gives times as integers"
        ) from error


def _cell(column: Any, row: int) -> Any:
    value = column[row]
    if isinstance(column, np.ndarray):
        return value
    if column.null_count and isinstance(alone := array_or_values(column.slice(row, 1)), np.ndarray):
        return alone[0]  # so a number has the same type as in a row group without nulls
    inner = getattr(value, "values", None)  # the values of a list; a struct has a method of that name
    if getattr(inner, "null_count", 1) == 0 and isinstance(numbers := array_or_values(inner), np.ndarray):
        return numbers.copy()
    if (kind := _in_microseconds(column.type)) != column.type:
        # raises if nanoseconds would be lost; take() and not slice(), because a cast of a slice converts the values of all lists
        column.take([row]).cast(kind)
    return value.as_py()


@lru_cache
def _in_microseconds(kind: Any) -> Any:
    """Return the type with its times of day in microseconds, which is all that Python's `time` can hold."""
    arrow = library("pyarrow", "parquet")
    types = arrow.types
    if kind == arrow.time64("ns"):
        return arrow.time64("us")
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if types.is_map(kind):
        return arrow.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    for is_kind, make in ((types.is_list, arrow.list_), (types.is_large_list, arrow.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)), kind.list_size)
    return kind
