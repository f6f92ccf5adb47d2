"""Check the arguments of pipeline stages."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

MAX_WORKERS = 16000  # SHML_MAX_WORKERS of src/layout.h


def set_whole(stage: Any, what: str, field: str, least: int, most: int) -> None:
    """Check an attribute that must be a whole number, and make it an `int`, because it may become part of a state, which is JSON.

    Args:
        stage: the stage; may be a frozen dataclass.
        what: name of the argument, for the message.
        field: name of the attribute.
        least, most: range of valid values, both included.
    Raises:
        ValueError: it is not an integer in this range.
    """
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{what} must be an integer from {least} to {most}; got {value!r}")
    object.__setattr__(stage, field, int(value))


def check_flag(what: str, value: Any) -> None:
    """Raise TypeError unless a value is a bool, because a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False; got {value!r}")


def check_function(name: str, value: Any, of: str = "one item") -> None:
    """Raise unless a value can be called.

    Args:
        name: name of the argument, for the message.
        value: the value.
        of: what the function takes, for the message.
    Raises:
        TypeError: it cannot be called, or it is a coroutine function: a coroutine is no item, and counts as true for a Filter.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of {of}; got {value!r}")
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise TypeError(f"{name} does not await coroutine functions, and {value!r} is one: give it to AsyncMap")
