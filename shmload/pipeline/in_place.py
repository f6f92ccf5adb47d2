"""Pipelines that only choose items: their dataset is read as if ShmLoader read it directly.

    Items(folder), Shuffle(), Take(1000), Collate(32)      key ──places──▶ index ──▶ folder.read_into(index, row of the batch)

Random numbers remain keyed by the key, so an item draws the same values as when it is read by `dataset[index]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from shmload.batch.ragged import Ragged
from shmload.batch.ragged_rows import RaggedRows
from shmload.batch.row_placer import SingleRow
from shmload.introspect.abilities import ability_of
from shmload.pipeline.item_sequence import Derived, ItemSequence
from shmload.pipeline.position_stages import Selected, Shuffled
from shmload.pipeline.programs import RowProgram
from shmload.worker.decoding_protocol import in_place_reader_of
from shmload.worker.in_place_dataset import InPlace, InPlaceSubset
from shmload.worker.read_plan import ReadPlan
from shmload.worker.sample_rng import keyed_by

_CHOOSING = (Derived, Selected, Shuffled)  # their items are unchanged items of the sequence below


class Choice:
    """Maps the keys of a sequence to indices of a dataset.

    Args:
        sequences: from the last stage to the first; each chooses among the items of the next one, and the last is the source.
    """

    def __init__(self, sequences: Sequence[Any]) -> None:
        *self._sequences, self._items = sequences
        self.dataset = self._items.dataset

    @classmethod
    def of(cls, sequence: ItemSequence) -> Choice | None:
        """Return the choice that a sequence makes, or None if its items are not unchanged samples of one dataset."""
        sequences: list[Any] = [sequence]
        while type(sequences[-1]) in _CHOOSING:
            sequences.append(sequences[-1].below)
        return None if sequences[-1].dataset is None else cls(sequences)

    def index(self, key: int) -> int:
        """Return the index of one key."""
        for sequence in self._sequences:
            key = sequence.position_below(key)
        index: int = key % self._items.n
        return index

    def indices(self, keys: Any) -> NDArray[np.int64]:
        """Return the indices of several keys."""
        places = np.asarray(keys, np.int64)
        for sequence in self._sequences:
            places = sequence.places(places)
        found: NDArray[np.int64] = places % self._items.n
        return found


class ChosenProgram(RowProgram):
    """A dataset that maps a key to its sample, and reads samples by the dataset's own fastest method."""

    def __init__(self, source: ItemSequence) -> None:
        super().__init__(source, [])

    @property
    def _choice(self) -> Choice:
        """Return a new Choice. Storing it would change the attribute path to the dataset, which keys the dataset's generators."""
        found = Choice.of(self._source)
        assert found is not None
        return found

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Return a function that reads several samples, or None if the dataset cannot."""
        return self._read_several if ability_of(self._choice.dataset, "__getitems__") else None

    def _read_several(self, keys: Sequence[int]) -> list[Any]:
        dataset, indices = _within_subsets(self._choice.dataset, self._choice.indices(keys))
        if are_mixed(indices, keys):
            return [sample for key in keys for sample in self._read_several([key])]
        try:
            with keyed_by(indices, keys):
                if ability_of(dataset, "__getitems__") is None:
                    return [dataset[index] for index in indices.tolist()]
                samples: list[Any] = dataset.__getitems__(indices.tolist())
        except Exception as error:
            if len(keys) > 1:
                for key in keys:
                    self._read_several([key])  # raises the item's own error, with its name
            else:
                error.add_note(f"shmload: {self._source.name(keys[0])}")
            raise
        return samples

    def in_place(self, ragged: Ragged | None) -> InPlace | None:
        """Return the dataset's method of decoding into rows, by keys, or None if it has none.

        Args:
            ragged: see `in_place_reader_of`.
        """
        choice = self._choice
        found = in_place_reader_of(choice.dataset, ragged)
        return found and ChosenInPlace(found, choice, ragged, self._source.name)


def _within_subsets(dataset: Any, indices: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Return the dataset inside torch's Subsets, which keys random numbers by its own indices, and these indices."""
    while type(dataset) is Subset:
        indices = np.array([dataset.indices[index] for index in indices.tolist()], np.int64)
        dataset = dataset.dataset
    return dataset, indices


class ChosenInPlace(InPlace):
    """A dataset that decodes into rows, addressed by keys.

    Args:
        inner: the dataset's own method of decoding into rows.
        choice: maps keys to the dataset's indices.
        ragged: how fields of different shapes are delivered.
        name: key -> the item's name, for error messages.
    """

    def __init__(self, inner: InPlace, choice: Choice, ragged: Ragged | None, name: Callable[[int], str]) -> None:
        self._subsets: list[Sequence[int]] = []
        while isinstance(inner, InPlaceSubset):  # the dataset inside keys random numbers by its own indices
            self._subsets.append(inner.indices)
            inner = inner.inner
        self.schema, self.batch_type, self.name = inner.schema, inner.batch_type, inner.name
        self.reads_rows_alike, self.takes_all = inner.reads_rows_alike, inner.takes_all
        self._inner, self._choice, self._ragged, self._name = inner, choice, ragged, name
        self.read_into = inner.read_into and self._read_row
        self.read_batch_into = inner.read_batch_into and self._read_rows

    def takes(self, keys: Any) -> bool:
        """Return whether the dataset can decode the samples of these keys."""
        return self.takes_all or self._inner.takes(self._indices(keys))

    def read_ragged(self, keys: Any, rows: RaggedRows, begin: Callable[[int], bool], *, is_suspect: bool = False) -> bool:
        if self.read_batch_into is None or not (is_suspect or are_mixed(self._indices(keys), keys)):
            return super().read_ragged(keys, rows, begin)
        for row, key in enumerate(np.asarray(keys).tolist()):
            if not begin(row):
                return False
            self._read_rows([key], SingleRow(rows.out(row)))
            rows.check(row + 1)
        return True

    def _indices(self, keys: Any) -> NDArray[np.int64]:
        found = self._choice.indices(keys)
        for chosen in self._subsets:
            found = np.array([chosen[index] for index in found.tolist()], np.int64)
        return found

    def _read_row(self, key: int, out: Any) -> Any:
        read_into: Any = self._inner.read_into
        try:
            index = self._choice.index(key)
            for chosen in self._subsets:
                index = chosen[index]
            return read_into(index, out)
        except Exception as error:
            error.add_note(f"shmload: {self._name(key)}")
            raise

    def _read_rows(self, keys: Any, out: Any) -> Any:
        read_batch_into: Any = self._inner.read_batch_into
        indices = self._indices(keys)
        if are_mixed(indices, keys):
            for row, key in enumerate(keys):
                self._read_rows([key], SingleRow(out.at(row)))
            return None
        try:
            with keyed_by(indices, keys):
                return read_batch_into(indices, out)
        except Exception as error:
            if (bad := self._first_bad(keys, indices)) is not None:
                error.add_note(f"shmload: {self._name(bad)}")
            raise

    def _first_bad(self, keys: Any, indices: NDArray[np.int64]) -> int | None:
        """Return the first of several keys that cannot be read alone either."""
        layout = self.layout()
        plan = ReadPlan("read_batch_into", layout, self._ragged, is_whole=layout.is_ragged)
        for key, index in zip(np.asarray(keys).tolist(), indices.tolist(), strict=True):
            try:
                plan.try_sample(None, _ByBatch(self._inner), index)
            except Exception:
                return int(key)
        return None


class _ByBatch(InPlace):
    """A dataset that only has `read_batch_into`."""

    def __init__(self, inner: InPlace) -> None:
        self.schema, self.batch_type = inner.schema, inner.batch_type
        self.read_into, self.read_batch_into = None, inner.read_batch_into


def are_mixed(indices: NDArray[np.int64], keys: Any) -> bool:
    """Return whether two different keys have the same index. The sample then occurs twice, with different random numbers."""
    num_indices = len(set(indices.tolist()))
    return num_indices < len(indices) and num_indices < len(set(np.asarray(keys).tolist()))
