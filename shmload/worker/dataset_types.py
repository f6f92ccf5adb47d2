"""Types of what may be given as a dataset.

torch annotates its loader's dataset with its Dataset class and so refuses a list, whose samples it reads all the same. These types
describe what is read, so that a typed program may pass it.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Has samples by index: a list, a range, shmload's formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> T_co: ...


class DecodesSamples(Protocol):
    """Writes a sample into its row of the batch. The schema maps field names to (dtype, shape)."""

    @property
    def schema(self) -> Any: ...

    def read_into(self, index: int, out: Any, /) -> Any: ...


class DecodesBatches(Protocol):
    """Writes the samples of a batch into its rows."""

    @property
    def schema(self) -> Any: ...

    def read_batch_into(self, indices: Any, out: Any, /) -> Any: ...
