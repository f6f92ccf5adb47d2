"""What `num_workers` and `prefetch_factor` are while they are found automatically: the number now, which remembers that it is."""

from __future__ import annotations

from typing import Any

AUTO = "auto"


class AutoNumber(int):
    """The number of the moment, of an argument that was given as "auto".

    torch and the frameworks compute with `loader.num_workers`, and make other loaders from the attributes of one: given as an
    argument it means "auto" again.
    """

    def __repr__(self) -> str:
        return f"auto ({int(self)})"

    __str__ = int.__repr__


def is_auto(value: Any) -> bool:
    """Whether an argument asks to be found."""
    return isinstance(value, AutoNumber) or (isinstance(value, str) and value == AUTO)
