"""What a worker does with one item: the pipeline's functions, one after the other, as a dataset of the loader's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmload.pipeline.stream import Keys
from shmload.worker.failure import Failure


class RowProgram:
    """A dataset: key -> the item behind the pipeline's functions. What they raise has a note that names the item."""

    def __init__(self, source: Keys, functions: Sequence[Callable[[Any], Any]]) -> None:
        self._source, self._functions = source, tuple(functions)

    def __len__(self) -> int:
        return self._source.n

    def __getitem__(self, key: int) -> Any:
        try:
            return self.value(key)
        except Exception as error:
            error.add_note(f"shmload: {self._source.name(key)}")
            raise

    def value(self, key: int) -> Any:
        """The item behind the functions."""
        value = self._source.item(key)
        try:
            for function in self._functions:
                value = function(value)
        except StopIteration as error:  # it would end the pipeline that it comes out of
            raise RuntimeError("a function of the pipeline raised StopIteration") from error
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
        try:
            self._decoder.read_into(self.value(key), out)
        except Exception as error:
            error.add_note(f"shmload: {self._source.name(key)}")
            raise


class FailedItem(NamedTuple):
    """Stands among items where one could not be made, so that the others come."""

    failure: Failure


class ItemProgram(RowProgram):
    """One whose items are made by workers and come singly: an item's exception is its own."""

    def __getitem__(self, key: int) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            return FailedItem(Failure.of(error, "in a worker of this pipeline", ""))
