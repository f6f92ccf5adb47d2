"""What a worker does with one item: the pipeline's functions, one after the other, as a dataset of the loader's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmload.pipeline.stream import Keys
from shmload.worker.failure import Failure


class RowProgram:
    """A dataset: key -> the item behind the pipeline's functions."""

    def __init__(self, source: Keys, functions: Sequence[Callable[[Any], Any]]) -> None:
        self._source, self._functions = source, tuple(functions)

    def __len__(self) -> int:
        return self._source.n

    def __getitem__(self, key: int) -> Any:
        value = self._source.item(key)
        for function in self._functions:
            value = function(value)
        return value


class InPlaceProgram(RowProgram):
    """One whose last function decodes straight into the row it is given."""

    def __init__(self, source: Keys, functions: Sequence[Callable[[Any], Any]], decoder: Any) -> None:
        super().__init__(source, functions)
        self._decoder = decoder
        self.schema = decoder.schema
        self.batch_type = getattr(decoder, "batch_type", None)

    def read_into(self, key: int, out: Any) -> None:
        """Decodes an item into a row."""
        self._decoder.read_into(RowProgram.__getitem__(self, key), out)


class FailedItem(NamedTuple):
    """Stands among items where one could not be made, so that the others come."""

    failure: Failure


class ItemProgram(RowProgram):
    """One whose items come singly: an item's exception is its own."""

    def __getitem__(self, key: int) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            return FailedItem(
                Failure.of(error, "in a worker of this pipeline", f"shmload: item {self._source.item(key)!r}")
            )
