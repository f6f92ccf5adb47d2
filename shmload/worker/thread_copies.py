"""Copy for each worker thread what an iterable dataset changes during a pass; processes have copies of everything.

An iterable dataset keeps the state of a pass in its attributes, and often in the objects that they hold: a stage counts its epochs,
a buffer is filled, a list of files is shuffled in place. Large data and what is made to be shared stay shared.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from shmload.introspect.attribute_values import slots_of

MAX_LENGTH = 100_000  # entries of a container that each thread gets a copy of; longer ones are data, which threads share
MAX_NBYTES = 1 << 20  # size of an array or a tensor that each thread gets a copy of
MAX_SEARCHED = 100  # entries of a container in which objects to copy are searched for
MAX_COPIES = 1000  # objects that are copied for a thread
_CONTAINERS = {list, dict, set, deque, defaultdict, OrderedDict, Counter, bytearray, array}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event)
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}  # packages whose objects are shared: queues, files, generators of numbers
_OWN_WAYS = ("__copy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__del__")


def copy_of_datasets(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, and of the iterable datasets among its attributes and in lists there (ChainDataset)."""
    return _Copies(lambda _: False).of(dataset)


def copy_for_passes(dataset: Any) -> Any:
    """Return a shallow copy of an iterable dataset, and of what it is made of, where passes keep their positions and buffers."""
    return _Copies(_keeps_state_of_a_pass).of(dataset)


class _Copies:
    """Shallow copies of a dataset and of objects that it holds, which refer to each other as the originals do.

    Args:
        is_copied: whether to copy an object that was found. Other objects are shared.
    """

    def __init__(self, is_copied: Callable[[Any], bool]) -> None:
        self._is_copied = is_copied
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (original, copy); the first is kept so that its id stays its own
        self._unvisited: deque[Any] = deque()

    def of(self, dataset: Any) -> Any:
        """Return the copy of a dataset."""
        copied = self._copy(dataset)
        while self._unvisited:
            _replace_in(self._unvisited.popleft(), self._own)
        return copied

    def _copy(self, value: Any) -> Any:
        made = copy.deepcopy(value) if isinstance(value, torch.Tensor) else copy.copy(value)  # a shallow one shares its memory
        self._made[id(value)] = value, made
        self._unvisited.append(made)
        return made

    def _own(self, value: Any) -> Any:
        """Return the copy of a value, or the value if it is shared."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, MethodType):
            of = self._own(value.__self__)
            return value if of is value.__self__ else MethodType(value.__func__, of)
        if isinstance(value, IterableDataset):
            return self._copy(value)
        has_datasets = type(value) in (list, tuple) and any(isinstance(part, IterableDataset) for part in value)
        if type(value) is tuple and (has_datasets or len(value) <= MAX_SEARCHED):
            parts = tuple(map(self._own, value))
            return value if all(map(operator.is_, parts, value)) else parts
        return self._copy(value) if has_datasets or (len(self._made) < MAX_COPIES and self._is_copied(value)) else value


def _replace_in(holder: Any, own: Callable[[Any], Any]) -> None:
    """Replace each value in a list, a dict or an object's attributes by what `own` returns for it."""
    if isinstance(holder, list | deque):
        if len(holder) <= MAX_SEARCHED or isinstance(holder[0], IterableDataset):
            for at, value in enumerate(list(holder)):
                holder[at] = own(value)
        return
    for name, slot in slots_of(type(holder)).items():
        if hasattr(holder, name):
            slot.__set__(holder, own(getattr(holder, name)))
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    if values is not holder or len(values) <= MAX_SEARCHED:
        for name, value in list(values.items()):
            values[name] = own(value)


def _keeps_state_of_a_pass(value: Any) -> bool:
    """Return whether a pass may change this object without meaning to change it for other workers.

    These are containers, arrays and tensors (a buffer, an order that each pass shuffles in place) unless they are large, and
    objects of Python classes, except for those with a lock, which are made to be shared. A class that defines how it is copied,
    pickled or ended may hold what must not be copied, such as a file.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        return len(value) <= MAX_LENGTH
    if kind is np.ndarray:
        return value.base is None and value.nbytes <= MAX_NBYTES
    if kind in _TENSORS:
        is_plain = value.layout is torch.strided and value.device.type == "cpu" and value.is_leaf
        return is_plain and value.nbytes <= MAX_NBYTES and not value.is_shared() and not value._is_view()
    if kind is SimpleNamespace or getattr(kind, "is_of_one_worker", False):
        return True
    package = kind.__module__.partition(".")[0]
    slots = slots_of(kind)
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return (
        (hasattr(value, "__dict__") or bool(slots))
        and not isinstance(value, type | ModuleType | FunctionType)
        and package != "shmload"
        and package not in _OF_PYTHON
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _OWN_WAYS)
        and not any(isinstance(one, _LOCKS) for one in held)
    )
