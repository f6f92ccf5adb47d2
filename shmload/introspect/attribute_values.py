"""The attributes of what workers use, by which a loader notices that the program has set one since its workers were started."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_ITEMS, _MAX_VALUES = 256, 4096  # so that it takes a few ms at most


class _Pending(NamedTuple):
    value: Any
    is_counted: bool  # whether it belongs to an object of the program
    has_attributes: bool  # whether its attributes count, whatever its class is


def attribute_values(dataset: Any, *functions: Any) -> list[Any]:
    """Return values that differ from those of an earlier call if the program has set an attribute in between.

    They include the attributes of the dataset and of the functions (objects with attributes, such as a collate_fn); those of
    datasets, transforms, dataclasses and namespaces within them; and the items of small lists, tuples and dicts. Other values are
    compared by identity, so a change within an array is not noticed. The attributes of this package's own datasets do not count,
    because they change when files are opened.
    """
    values: list[Any] = []
    seen: set[int] = set()
    pending = [
        *(_Pending(function, is_counted=True, has_attributes=False) for function in functions),
        _Pending(dataset, is_counted=True, has_attributes=True),
    ]
    while pending and len(values) < _MAX_VALUES:
        value, is_counted, has_attributes = pending.pop()
        if isinstance(value, _PLAIN):
            if is_counted:
                values.append(repr(value) if isinstance(value, float) else value)  # NaN differs from itself
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        has_attributes = has_attributes or _has_attributes(type(value))
        if has_attributes:
            is_counted = not _is_own(type(value))
        if is_counted:
            values += type(value), id(value)
        is_method = isinstance(value, types.MethodType)
        pending += [_Pending(part, is_counted, is_method) for part in _parts(value, has_attributes=has_attributes)]
    return values


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "shmload"


def _has_attributes(kind: type) -> bool:
    """Return whether the attributes of values of a class count: if it is one of datasets, callable objects, or records."""
    if issubclass(kind, type | types.FunctionType | types.MethodType | list | tuple | dict):
        return False
    if issubclass(kind, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(kind):
        return True
    return any(name in vars(base) for base in kind.__mro__ for name in ("__call__", "__getitem__"))


def _parts(value: Any, *, has_attributes: bool) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
        return
    if isinstance(value, partial):
        yield from (value.func, *value.args, value.keywords)
        return
    items = value.__dict__ if has_attributes and hasattr(value, "__dict__") else value
    if isinstance(items, dict) and len(items) <= _MAX_ITEMS:
        for pair in list(items.items()):
            yield from pair
    elif isinstance(items, list | tuple) and len(items) <= _MAX_ITEMS:
        yield from items
    elif isinstance(items, list | tuple | dict):
        yield len(items)
