"""A packed column of str or bytes in a slot, and the list of objects made from it."""

from typing import Any

from numpy.typing import NDArray

class TextColumn:
    """Values ready to be written."""

    nbytes: int
    is_bytes: bool
    def __init__(self, values: list[Any]) -> None: ...
    def write(self, room: NDArray[Any]) -> None:
        """Writes the column at the start of `room`, which has at least `nbytes`."""

def read_text(address: int, nbytes: int, count: int, is_bytes: bool) -> list[Any]:
    """The column of `count` values at an address, as a new list; `nbytes` is how much may be read there."""
