"""Types of objects that a loader accepts as a dataset.

torch annotates its loader's dataset with its Dataset class, so type checkers refuse a list although torch can read it. These types
describe every object that a loader can read, so a typed program may pass it.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """An object that returns samples by index: a list, a range, shmload's formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> T_co: ...


class DecodesSamples(Protocol):
    """An object that writes a sample into its row of the batch. The schema maps field names to (dtype, shape)."""

    @property
    def schema(self) -> Any: ...

    def read_into(self, index: int, out: Any, /) -> Any: ...


class DecodesBatches(Protocol):
    """An object that writes several samples into their rows of the batch, in one call."""

    @property
    def schema(self) -> Any: ...

    def read_batch_into(self, indices: Any, out: Any, /) -> Any: ...
