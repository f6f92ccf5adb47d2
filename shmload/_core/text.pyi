"""A packed column of str or bytes in a slot, and the list of objects made from it."""

from typing import Any

from numpy.typing import NDArray

BYTES: int
ASCII: int
UTF8: int

class TextColumn:
    """Values ready to be written; `kind` is BYTES, ASCII or UTF8."""

    nbytes: int
    kind: int
    def __init__(self, values: list[Any]) -> None: ...
    def write(self, room: NDArray[Any]) -> None:
        """Write the column to the start of `room`, which has at least `nbytes`."""

def read_text(address: int, nbytes: int, count: int, kind: int) -> list[Any]:
    """Return the column of `count` values of a kind at an address as a new list; `nbytes` may be read there."""
