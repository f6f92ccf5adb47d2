"""What a worker does with one item: the pipeline's functions, one after the other, as a dataset of the loader's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmload.pipeline.stream import Keys
from shmload.worker.failure import Failure, no_end


def called(function: Callable[[Any], Any], value: Any, stage: str) -> Any:
    """What a stage's function makes of an item or a batch. Its StopIteration is an error: it would end the pipeline."""
    try:
        return function(value)
    except StopIteration as error:
        raise no_end(error, f"the function of {stage},") from error


class RowProgram:
    """A dataset: key -> the item behind the pipeline's functions. What they raise has a note that names the item.

    Args:
        stages: what each function's stage is called, for people.
    """

    def __init__(self, source: Keys, functions: Sequence[Callable[[Any], Any]], stages: Sequence[str]) -> None:
        self._source, self._functions, self._stages = source, tuple(functions), tuple(stages)

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
        for function, stage in zip(self._functions, self._stages, strict=False):
            value = called(function, value, stage)
        return value


class InPlaceProgram(RowProgram):
    """One whose last function decodes straight into the row it is given."""

    def __init__(
        self, source: Keys, functions: Sequence[Callable[[Any], Any]], stages: Sequence[str], decoder: Any
    ) -> None:
        super().__init__(source, functions, stages)
        self._decoder = decoder
        self.schema = decoder.schema
        self.batch_type = getattr(decoder, "batch_type", None)

    def read_into(self, key: int, out: Any) -> None:
        """Decodes an item into a row."""
        try:
            called(lambda item: self._decoder.read_into(item, out), self.value(key), self._stages[-1])
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
