"""Programs: the datasets that workers read. They map a key to the result of a pipeline's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmload.batch.ragged import ragged_of
from shmload.modes.default_collate import collated
from shmload.pipeline.block_context import IN_WORKER
from shmload.pipeline.item_sequence import ItemSequence
from shmload.worker.failure import Failure
from shmload.worker.stage_engine import Each, FailedItem, apply_functions, with_note


class RowProgram:
    """A dataset: key -> the item after the pipeline's functions. Errors of functions get a note that names the item.

    Args:
        source: sequence of the items.
        stages: the functions.
    """

    def __init__(self, source: ItemSequence, stages: Sequence[Each]) -> None:
        self._source, self._stages = source, {stage.name: stage for stage in stages}  # an error of pickling shows the keys

    def __len__(self) -> int:
        return self._source.n

    def __getitem__(self, key: int) -> Any:
        stage = None
        try:
            item = self._source.item(key)
            for stage in self._stages.values():  # like `apply_functions`, but without an extra call per item
                item = stage.function(item)
        except Exception as error:
            error = with_note(error, "" if stage is None else stage.name, self._source.name(key))
            raise error
        return item


class InPlaceProgram(RowProgram):
    """A program whose last function decodes directly into a row of the batch."""

    def __init__(self, source: ItemSequence, stages: Sequence[Each]) -> None:
        super().__init__(source, stages[:-1])
        self._last = stages[-1].name
        decoder: Any = stages[-1].function
        self._decoder = decoder
        self.schema = decoder.schema
        self.batch_type = getattr(decoder, "batch_type", None)

    def read_into(self, key: int, out: Any) -> Any:
        """Decode an item into a row."""
        last = Each(self._last, lambda item: self._decoder.read_into(item, out))
        return apply_functions((last,), self[key], self._source.name, key)


class ItemProgram(RowProgram):
    """A program for single items made by workers. It returns the exception of an item in its place."""

    def __getitem__(self, key: int) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            return FailedItem(Failure.of(error, IN_WORKER, ""))


class BatchProgram:
    """A function that collates items, and applies functions to the batch."""

    def __init__(self, ragged: Any, stages: Sequence[Each]) -> None:
        self._ragged, self._stages = ragged_of(ragged, None, is_torch_mode=False), {stage.name: stage for stage in stages}

    def __call__(self, items: list[Any]) -> Any:
        return apply_functions(self._stages.values(), collated(items, self._ragged))
