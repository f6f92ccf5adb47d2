"""Refusals shared by the schedule's parts: what is wrong, what was needed, what was given, what to do."""

import operator
from hashlib import blake2b
from typing import Any, SupportsIndex

from numpy.typing import NDArray

__all__ = ["digest", "whole_number"]


def digest(values: NDArray[Any]) -> str:
    """16 hex digits that say which values an order was made of, for its identity."""
    return blake2b(values.tobytes(), digest_size=8).hexdigest()


def whole_number(name: str, value: SupportsIndex, *, at_least: int, at_most: int, remedy: str) -> int:
    """`value` as a Python int within its bounds.

    Raises:
        TypeError: it is no integer (a float or a string is not one, a numpy integer is).
        ValueError: it lies outside [at_least, at_most].
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; {remedy}") from None
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be in [{at_least}, {_power(at_most)}], got {number}; {remedy}")
    return number


def _power(number: int) -> str:
    """Large bounds as people write them: 2^62, 2^64 - 1."""
    if number < 1 << 32:
        return str(number)
    exponent = number.bit_length()
    if number == 1 << (exponent - 1):
        return f"2^{exponent - 1}"
    return f"2^{exponent} - 1" if number == (1 << exponent) - 1 else str(number)
