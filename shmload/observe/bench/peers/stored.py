"""What peers with files of their own share: a sample as one run of bytes, and back."""

from collections.abc import Callable
from typing import Any

NUMBER_NBYTES = 8


def packed(dataset: Any, index: int) -> bytes:
    """The stored form of a sample: its payload, then its number as a little-endian int64."""
    payload: bytes
    payload, number = dataset.stored(index)
    return payload + int(number).to_bytes(NUMBER_NBYTES, "little", signed=True)


def unpacked(data: bytes, decoded: Callable[[bytes, int], Any]) -> Any:
    """The sample of what `packed` made."""
    number = int.from_bytes(data[-NUMBER_NBYTES:], "little", signed=True)
    return decoded(data[:-NUMBER_NBYTES], number)
