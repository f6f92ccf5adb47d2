"""What may be given as a dataset, in types: torch's own, anything with `__getitem__`, and what decodes into rows.

torch's annotation asks for its Dataset class and so refuses a list, whose samples its loader reads all the same. These protocols
say what is really read, so that a typed program may pass it.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Samples by number: a list, a range, shmload's formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> T_co: ...


class SizedSamples(Samples[T_co], Protocol[T_co]):
    """Samples of which it is known how many there are."""

    def __len__(self) -> int: ...


class DecodesSamples(Protocol):
    """Writes a sample into its row of the batch. The schema says what a row is: name -> (dtype, shape)."""

    @property
    def schema(self) -> Any: ...

    def read_into(self, index: int, out: Any, /) -> Any: ...


class DecodesBatches(Protocol):
    """Writes a batch into its rows."""

    @property
    def schema(self) -> Any: ...

    def read_batch_into(self, indices: Any, out: Any, /) -> Any: ...
