"""torch's TensorDataset, gathered from its tensors' memory into the batch.

Torch indexes every tensor once a sample and stacks what comes. The rows' bytes are the same without any of that. Whether it may be
done is decided by `TensorRows.takes`, batch by batch: for all but plain integers the dataset itself is asked, as torch asks it.
"""

from __future__ import annotations

from typing import Any

from shmload.batch.array_rows import ArrayRows, typed_array
from shmload.worker.reader import InPlace, are_integers


def tensors_in_place(dataset: Any) -> InPlace | None:
    """The way of a TensorDataset into rows; None if its tensors are not all plain memory."""
    if not all(type(t).__name__ == "Tensor" for t in dataset.tensors):
        return None  # a subclass may index otherwise
    try:
        return TensorRows(dataset)
    except (TypeError, ValueError):
        return None  # sparse, on a device, with a gradient


class TensorRows(InPlace):
    """The rows of a dataset's tensors; a batch is a list, as torch's collate makes it of tuples."""

    takes_all = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self._rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Whether they are plain integers and the tensors still lie where they were found: the user may have replaced them."""
        return are_integers(keys) and self._seen == _memory_of(self._dataset)

    def _read(self, indices: Any, out: Any) -> None:
        try:
            self._rows.read_batch_into(indices, out)
        except IndexError:
            for index in indices:
                self._dataset[int(index)]  # says it as torch does
            raise


def _memory_of(dataset: Any) -> list[Any] | None:
    try:
        return [(type(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in dataset.tensors]
    except (RuntimeError, AttributeError):
        return None  # no tensors with memory of their own
