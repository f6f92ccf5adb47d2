"""Gather rows of torch's TensorDataset from the memory of its tensors directly into the batch.

torch indexes every tensor once for each sample and stacks the results. Gathering gives the same bytes. `TensorRows.takes` decides
for each batch whether this is certain; otherwise, the dataset itself is indexed, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shmload.batch.array_rows import ArrayRows, PooledRows, typed_array
from shmload.batch.registered_functions import collates_as_shipped
from shmload.worker.in_place_dataset import InPlace, InPlaceConcat, are_integers


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

    Attributes:
        rows: the rows of its tensors.

    Raises:
        TypeError, ValueError: a tensor is not plain memory.
    """

    takes_all = False
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.rows = ArrayRows({str(i): typed_array(i, t) for i, t in enumerate(dataset.tensors)})
        self._seen = _memory_of(dataset)
        self.schema, self.batch_type, self.read_into = self.rows.schema, list, None
        self.read_batch_into = self._read

    def takes(self, keys: Any) -> bool:
        """Return whether rows of these keys may be gathered.

        They may if the keys are plain integers, the tensors are still the same (a program may replace them), and the program has
        not changed torch's collate.
        """
        return collates_as_shipped() and are_integers(keys) and self.is_unchanged

    @property
    def is_unchanged(self) -> bool:
        """Return whether the tensors are still the same."""
        return self._seen == _memory_of(self._dataset)

    def _read(self, indices: Any, out: Any) -> None:
        try:
            self.rows.read_batch_into(indices, out)
        except IndexError:
            for index in indices:
                self._dataset[int(index)]  # raises torch's error
            raise


class ConcatenatedTensors(InPlaceConcat):
    """The in-place reader of many TensorDatasets, concatenated: the rows of a batch are gathered at once, whatever their members.

    Args:
        members: the readers of the datasets.
        ends, is_cyclic: as for `InPlaceConcat`.
    Raises:
        ValueError: the rows of a member are not contiguous, or a member has changed its length.
    """

    def __init__(self, members: list[TensorRows], ends: Sequence[int], *, is_cyclic: bool) -> None:
        super().__init__(list(members), ends, is_cyclic=is_cyclic)
        if list(accumulate(member.rows.num_rows for member in members)) != list(ends):
            raise ValueError("a member has changed its length since they were concatenated")
        self._tensors, self._pool = members, PooledRows([member.rows for member in members])
        self.read_batch_into = self._read_pooled

    def takes(self, keys: Any) -> bool:
        """Return whether rows of these keys may be gathered: see `TensorRows.takes`."""
        if not (collates_as_shipped() and are_integers(keys)):
            return False
        return all(self._tensors[which].is_unchanged for which in set(self.located(keys)[0].tolist()))

    def _read_pooled(self, keys: Any, out: Any) -> None:
        self._pool.read_into(*self.located(keys), out)


def _memory_of(dataset: Any) -> list[Any] | None:
    try:
        return [(type(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in dataset.tensors]
    except (RuntimeError, AttributeError):
        return None  # a tensor has no memory of its own
