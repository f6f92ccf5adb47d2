"""Check the arguments of orders and schedules: one clear error with the argument, the bounds, the value and the remedy."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import MAX_N

MAX_UINT64 = (1 << 64) - 1
_WRITTEN = {MAX_N: "2^62", MAX_UINT64: "2^64 - 1"}  # how error messages write these bounds


def whole_number(name: str, value: SupportsIndex, *, at_least: int = 1, at_most: int = MAX_N, remedy: str) -> int:
    """Return `value` as a Python int after checking its bounds.

    Args:
        name: the argument, with which an error begins: "BlockShuffle: window".
        value: its value.
        at_least, at_most: bounds, both allowed.
        remedy: what to do about another value; ends the error.
    Raises:
        TypeError: it is not an integer (numpy integers are; floats and strings are not).
        ValueError: it is outside [at_least, at_most].
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; {remedy}") from None
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be in [{at_least}, {_WRITTEN.get(at_most, at_most)}], got {number}; {remedy}")
    return number


def own_int(value: Any) -> Any:
    """Convert a numpy integer to a Python int, which states and JSON can hold. Return anything else unchanged."""
    return value.item() if isinstance(value, np.integer) else value


def refuse_where(needed: str, given: NDArray[Any], wrong: NDArray[np.bool_], remedy: str) -> None:
    """Raise ValueError for the first value of `given` where `wrong` is True, if there is one.

    The message begins with `needed`, what values must be, and ends with `remedy`.
    """
    if wrong.any():
        first = int(wrong.argmax())
        number = np.count_nonzero(wrong)
        raise ValueError(f"{needed}, got {given[first]} at index {first} ({number} such of {len(given)}); {remedy}")
