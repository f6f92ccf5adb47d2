"""Instances of a dataclass, stored as columns, which take less memory and which forked workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FieldColumns:
    """Instances of one dataclass, stored as columns: a value that all share is stored once, and strings are concatenated.

    Attributes:
        size: number of instances.
        of: for each field by name, a function of a row number that returns the value.
    """

    def __init__(self, kind: type[Any], rows: Iterable[Any]) -> None:
        names = [field.name for field in fields(kind)]
        found: list[list[Any]] = [[] for _ in names]
        for row in rows:
            for name, column in zip(names, found, strict=True):
                column.append(getattr(row, name))
        self._kind, self.size = kind, len(found[0])
        self.of = {name: _column(values) for name, values in zip(names, found, strict=True)}

    def row(self, number: int) -> Any:
        return self._kind(*(column(number) for column in self.of.values()))


def _column(values: list[Any]) -> Callable[[int], Any]:
    first = values[0]
    if all(value is first or value == first for value in values):
        return partial(_same, first)
    if is_dataclass(first) and not isinstance(first, type) and {*map(type, values)} == {type(first)}:
        return FieldColumns(type(first), values).row
    if {*map(type, values)} == {int}:
        return partial(_number_at, np.array(values, np.int64))
    if {*map(type, values)} == {str}:
        encoded = [value.encode() for value in values]
        return partial(_text_at, b"".join(encoded), np.cumsum([0, *map(len, encoded)]))
    return values.__getitem__


def _same(value: Any, _: int) -> Any:
    return value


def _number_at(values: NDArray[np.int64], number: int) -> int:
    return int(values[number])


def _text_at(text: bytes, ends: NDArray[np.int64], number: int) -> str:
    return text[ends[number] : ends[number + 1]].decode()
