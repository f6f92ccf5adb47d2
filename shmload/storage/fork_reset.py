"""Reset objects in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Any

__all__ = ["reset_after_fork"]

_objects: weakref.WeakSet[Any] = weakref.WeakSet()


def reset_after_fork(obj: Any) -> None:
    """Call `obj._begin()` in each child that this process forks, as long as the object lives.

    Args:
        obj: the object, whose `_begin` must register it again.
    """
    _objects.add(obj)


def _reset_all() -> None:
    for each in list(_objects):
        each._begin()


os.register_at_fork(after_in_child=_reset_all)
