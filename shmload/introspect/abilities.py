"""Find what an object of the user's can do: attributes that it really has, calls that it takes, and its parts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

log = logging.getLogger("shmload")


def ability_of(value: Any, name: str) -> Any:
    """Return an attribute that an object's class defines, or that the object was given; None otherwise.

    An attribute that only a `__getattr__` provides, or a property that raises, counts as missing.
    """
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return None
    try:
        return getattr(value, name)
    except Exception as error:  # a property of the user's, which may raise anything
        log.debug("%s.%s is ignored: it raised %s: %s", type(value).__name__, name, type(error).__name__, error)
        return None


def package_ability(value: Any, name: str) -> Any:
    """Return an attribute that a class of this package, or a subclass, defines on purpose; None otherwise.

    If no base class from this package defines the name, an attribute of that name means something else.
    """
    for kind in type(value).__mro__:
        if name in vars(kind) and kind.__module__.partition(".")[0] == "shmload":
            return ability_of(value, name)
    if (found := ability_of(value, name)) is not None:
        log.debug(
            "%s.%s is ignored, of type %s: only shmload's own datasets define it", type(value).__name__, name, type(found).__name__
        )
    return None


def takes_arguments(function: Any, num: int) -> bool:
    """Return whether an object can be called with `num` positional arguments."""
    if isinstance(function, MethodType):
        return callable(function.__func__) and _binds_self(function.__func__, num)
    return callable(function) and _binds(function, num)


def _binds(function: Any, num: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num)
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


@lru_cache(256)  # queried for each snapshot
def _binds_self(function: Any, num: int) -> bool:
    return _binds(function, num + 1)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, each with the expression that reaches it: ("[3]", item), (".transform", attribute)."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from ((f".{name}", part) for name, part in value.__dict__.items())


def is_stateful(value: Any) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict(state)`, as torch's and torchdata's checkpoints need."""
    return takes_arguments(ability_of(value, "state_dict"), 0) and takes_arguments(ability_of(value, "load_state_dict"), 1)


def overrides(value: Any, names: Sequence[str], replaced: Sequence[str]) -> bool:
    """Return whether the program has overridden one of `names`, but inherits `replaced`, whose code ignores the override.

    Args:
        value: an object. An attribute that was set on the object itself is no override.
        names: methods that a reader of the class may override, such as `__getitem__`.
        replaced: methods that do the same work without calling those, such as `read_batch_into`.
    """
    classes = type(value).__mro__
    first, first_replaced = (min(_depth(value, name) for name in each) for each in (names, replaced))
    return 0 <= first < first_replaced and classes[first].__module__.partition(".")[0] != "shmload"


def _depth(value: Any, name: str) -> int:
    """Return the place in the method resolution order of the class that defines a name; -1 if the object itself has it."""
    if name in getattr(value, "__dict__", ()):
        return -1
    classes = type(value).__mro__
    return next((depth for depth, each in enumerate(classes) if name in vars(each)), len(classes))
