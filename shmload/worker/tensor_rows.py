"""torch's TensorDataset, gathered from the memory of its tensors directly into the batch.

torch indexes every tensor once per sample and stacks the results. The bytes of the rows are the same without that.
`TensorRows.takes` decides for each batch whether this is allowed: keys other than plain integers are passed to the dataset, as
torch does."""

from __future__ import annotations

from typing import Any

from shmload.batch.array_rows import ArrayRows, typed_array
from shmload.batch.registered_functions import collates_as_shipped
from shmload.worker.in_place_dataset import InPlace, are_integers


def tensors_in_place(dataset: Any) -> InPlace | None:
    """Return how to read a TensorDataset in place; None if a tensor is not plain memory."""
    if not all(type(t).__name__ == "Tensor" for t in dataset.tensors):
        return None  # a subclass may index differently
    try:
        return TensorRows(dataset)
    except (TypeError, ValueError):
        return None  # sparse, on a device, with a gradient


class TensorRows(InPlace):
    """Rows of a TensorDataset's tensors; a batch is a list, as torch's collate makes of tuples."""

    takes_all = False
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self._rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Return whether the keys are plain integers, the tensors are still the same (a program may replace them), and the program
        has not changed how torch collates samples.
        """
        return collates_as_shipped() and are_integers(keys) and self._seen == _memory_of(self._dataset)

    def _read(self, indices: Any, out: Any) -> None:
        try:
            self._rows.read_batch_into(indices, out)
        except IndexError:
            for index in indices:
                self._dataset[int(index)]  # raises as torch does
            raise


def _memory_of(dataset: Any) -> list[Any] | None:
    try:
        return [(type(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in dataset.tensors]
    except (RuntimeError, AttributeError):
        return None  # a tensor has no memory of its own
