"""The value of `num_workers` and `prefetch_factor` that were given as "auto": an int that still means "auto" when passed on."""

from __future__ import annotations

from typing import Any

AUTO = "auto"


class AutoNumber(int):
    """The current number of workers or prefetched batches of an argument that was given as "auto".

    torch and the frameworks compute with `loader.num_workers`, and create other loaders from a loader's attributes. Passed as an
    argument, this number means "auto" again.
    """

    def __repr__(self) -> str:
        return f"auto ({int(self)})"

    __str__ = int.__repr__


def is_auto(value: Any) -> bool:
    """Return whether an argument is "auto", or a number that was chosen for "auto"."""
    return isinstance(value, AutoNumber) or (isinstance(value, str) and value == AUTO)
