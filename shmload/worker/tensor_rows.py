"""Gather rows of torch's TensorDataset from the memory of its tensors directly into the batch.

torch indexes every tensor once for each sample and stacks the results. Gathering gives the same bytes. `TensorRows.takes` decides
for each batch whether this is certain; otherwise, the dataset itself is indexed, as torch does.
"""

from __future__ import annotations

from typing import Any

from shmload.batch.array_rows import ArrayRows, typed_array
from shmload.batch.registered_functions import collates_as_shipped
from shmload.worker.in_place_dataset import InPlace, are_integers


def tensors_in_place(dataset: Any) -> InPlace | None:
    """Return the in-place reader of a TensorDataset; None if a tensor is not plain memory."""
    if not all(type(t).__name__ == "Tensor" for t in dataset.tensors):
        return None  # a subclass may index differently
    try:
        return TensorRows(dataset)
    except (TypeError, ValueError):
        return None  # sparse, on a device, with a gradient


class TensorRows(InPlace):
    """The in-place reader of a TensorDataset. A batch is a list, as in torch's collate of tuples.

    Raises:
        TypeError, ValueError: a tensor is not plain memory.
    """

    takes_all = False
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self._rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Return whether rows of these keys may be gathered.

        They may if the keys are plain integers, the tensors are still the same (a program may replace them), and the program has
        not changed torch's collate.
        """
        return collates_as_shipped() and are_integers(keys) and self._seen == _memory_of(self._dataset)

    def _read(self, indices: Any, out: Any) -> None:
        try:
            self._rows.read_batch_into(indices, out)
        except IndexError:
            for index in indices:
                self._dataset[int(index)]  # raises torch's error
            raise


def _memory_of(dataset: Any) -> list[Any] | None:
    try:
        return [(type(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in dataset.tensors]
    except (RuntimeError, AttributeError):
        return None  # a tensor has no memory of its own
