"""The attributes of what workers use, by which a loader notices that the program has set one since its workers were started."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = list, tuple, dict, set, frozenset, deque
_WITHOUT_ATTRIBUTES = (type, types.ModuleType, types.FunctionType, types.MethodType, *_CONTAINERS)
_MAX_ITEMS, _MAX_VALUES = 256, 4096  # so that it takes a few ms at most
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}
_FEW = 32  # items of a container that is visited before larger ones, which may use up the values


class _Pending(NamedTuple):
    value: Any
    is_counted: bool  # whether it belongs to an object of the program
    has_attributes: bool  # whether its attributes count, whatever its class is


class _Identity:
    """The identity of an object, which differs from that of a later object at the same address.

    It does not keep the object alive, so a program can free an array before it loads the next one. The few kinds of objects
    without weak references are kept until the values are dropped.
    """

    __slots__ = ("_reference",)
    _reference: Callable[[], Any]

    def __init__(self, value: Any) -> None:
        try:
            self._reference = weakref.ref(value)
        except TypeError:
            self._reference = lambda: value

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return value is not None and isinstance(other, _Identity) and value is other._reference()


def attribute_values(dataset: Any, *functions: Any) -> list[Any]:
    """Return values that differ from those of an earlier call if the program has set an attribute in between.

    They include the attributes of the dataset and of the functions (objects with attributes, such as a collate_fn); those of
    objects within them; what functions have captured, and their default arguments; and the items of small lists, tuples, sets and
    dicts. Of large ones, they include the length and some items. Other values are compared by identity, so a change within an array
    is not noticed. The attributes of this package's own datasets do not count, because they change when files are opened.

    What is near the dataset comes first, and so do containers of few items, because a transform must not be left out for a table
    of annotations.
    """
    values: list[Any] = []
    seen: set[int] = set()
    pending = deque(_Pending(function, is_counted=True, has_attributes=False) for function in functions)
    pending.append(_Pending(dataset, is_counted=True, has_attributes=True))
    later: deque[_Pending] = deque()  # items of containers of many
    while (pending or later) and len(values) < _MAX_VALUES:
        value, is_counted, has_attributes = (pending or later).popleft()
        if isinstance(value, _PLAIN):
            if is_counted:
                values.append((type(value), repr(value) if isinstance(value, float) else value))  # NaN differs from itself
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        has_attributes = has_attributes or _is_read(type(value)) or (is_counted and _is_of_the_program(type(value)))
        if has_attributes:
            is_counted = not _is_own(type(value))
        if is_counted:
            values += type(value), id(value) if isinstance(value, _CONTAINERS) else _Identity(value)
        is_function = isinstance(value, types.MethodType | types.FunctionType)
        parts = [_Pending(part, is_counted, is_function) for part in _parts(value, has_attributes=has_attributes)]
        (pending if has_attributes or len(parts) <= _FEW else later).extend(parts)
    return values


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "shmload"


def _is_read(kind: type) -> bool:
    """Return whether values of a class are datasets, callable objects, or records, also within a dataset of this package."""
    if issubclass(kind, _WITHOUT_ATTRIBUTES):
        return False
    if issubclass(kind, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(kind):
        return True
    return any(name in vars(base) for base in kind.__mro__ for name in ("__call__", "__getitem__"))


def _is_of_the_program(kind: type) -> bool:
    """Return whether values of a class are objects of the program or of its libraries, not of Python."""
    is_of_python = kind.__module__.partition(".")[0] in _OF_PYTHON
    return not (is_of_python or _is_own(kind) or issubclass(kind, _WITHOUT_ATTRIBUTES))


def _parts(value: Any, *, has_attributes: bool) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
        return
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing has been assigned
                yield cell.cell_contents
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), vars(value))
        return
    if isinstance(value, partial):
        yield from (value.func, *value.args, value.keywords)
        return
    for items in (_attributes_of(value) if has_attributes else None, value):
        if not isinstance(items, _CONTAINERS):
            continue
        if len(items) > _MAX_ITEMS:
            yield len(items)
            items = _some_of(items)
        if isinstance(items, dict):
            items = [part for pair in list(items.items()) for part in pair]
        yield from list(items)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those that its classes keep in slots."""
    in_slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return what a class and its bases define by `__slots__`, by name."""
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return {name: part for names in classes for name, part in names.items() if isinstance(part, types.MemberDescriptorType)}


def _some_of(items: Any) -> Any:
    """Return a few items of a large container, so that another one of its length at its address is noticed."""
    if isinstance(items, dict):
        return dict(chain(islice(items.items(), _FEW // 4), islice(reversed(items.items()), _FEW // 4)))
    if isinstance(items, set | frozenset):
        return list(islice(items, _FEW // 2))
    return [items[number * (len(items) - 1) // (_FEW // 2)] for number in range(_FEW // 2 + 1)]
