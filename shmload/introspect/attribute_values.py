"""The values of a dataset's attributes, by which a loader notices that the program has set one since its workers were started."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_ITEMS, _MAX_VALUES = 256, 4096  # so that it takes a few ms at most


def attribute_values(dataset: Any) -> list[Any]:
    """Return values that differ from those of an earlier call if the program has set an attribute of the dataset in between.

    They include the attributes of datasets, transforms, dataclasses and namespaces within it, and the items of small lists, tuples
    and dicts. Other values are compared by identity, so a change within an array is not noticed. The attributes of this package's
    own datasets do not count, because they change when files are opened.
    """
    values: list[Any] = []
    _collect(dataset, values, set(), is_root=True)
    return values


def _collect(value: Any, values: list[Any], seen: set[int], *, counts: bool = True, is_root: bool = False) -> None:
    """Append what identifies a value.

    Args:
        value: the value.
        values: the list to append to.
        seen: id of each object that was met before.
        counts: whether the value belongs to an object of the program, and not to one of this package.
        is_root: whether it is the dataset itself.
    """
    if isinstance(value, _PLAIN):
        if counts:
            values.append(repr(value) if isinstance(value, float) else value)  # NaN differs from itself
        return
    if len(values) >= _MAX_VALUES or id(value) in seen:
        return
    seen.add(id(value))
    has_attributes = is_root or _has_attributes(value)
    if has_attributes:
        counts = not _is_own(value)
    if counts:
        values += type(value), id(value)
    for part in _parts(value, has_attributes):
        _collect(part, values, seen, counts=counts)


def _is_own(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "shmload"


def _has_attributes(value: Any) -> bool:
    """Return whether the attributes of a value within a dataset count: if it is a dataset, a callable object, or a record."""
    if isinstance(value, type | types.FunctionType | types.MethodType | list | tuple | dict):
        return False
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return callable(value) or dataclasses.is_dataclass(value) or hasattr(value, "__getitem__")


def _parts(value: Any, has_attributes: bool) -> Iterator[Any]:
    items = value.__dict__ if has_attributes and hasattr(value, "__dict__") else value
    if isinstance(items, dict) and len(items) <= _MAX_ITEMS:
        for pair in list(items.items()):
            yield from pair
    elif isinstance(items, list | tuple) and len(items) <= _MAX_ITEMS:
        yield from items
    elif isinstance(items, list | tuple | dict):
        yield len(items)
