"""Checks of the arguments of stages."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_WORKERS = 16000


def set_whole(stage: Any, what: str, field: str, least: int, most: int) -> None:
    """Check an attribute that is a whole number, and make it an `int`, because it may become part of a state, which is JSON."""
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{what} must be an integer from {least} to {most}; got {value!r}")
    object.__setattr__(stage, field, int(value))


def check_flag(what: str, value: Any) -> None:
    """Check a flag: a string such as "no" would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False; got {value!r}")


def check_function(name: str, value: Any, of: str = "one item") -> None:
    """Check that a value can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of {of}; got {value!r}")
