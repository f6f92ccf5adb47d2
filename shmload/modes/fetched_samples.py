"""The samples that torch's fetcher reads in the trainer's process, as `sample_rng` and `sample_info` see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from shmload._core.twister import index_of
from shmload.worker.sample_rng import Sample, key_in_pass


class FetchedSamples:
    """The sample that torch's fetcher reads at the moment.

    Args:
        base_seed: seed of the pass, which torch has drawn.
        are_read_together: whether the dataset's `__getitems__` gets the keys, or the only key; both must not be replaced.
    """

    def __init__(self, base_seed: int, *, are_read_together: bool) -> None:
        self._base_seed, self._are_read_together = base_seed, are_read_together
        self._step = 0
        self._batch: object = None  # identifies the batch that is being read; None before the first
        self._keys: Any = None  # its keys, or the only key

    def keys(self, step: int, keys: Any) -> Any:
        """Return the keys of a batch for the fetcher, which begins each sample by taking its key.

        Args:
            step: number of the batch.
            keys: the keys of the batch.
        """
        is_counted = isinstance(keys, (list, tuple)) and not self._are_read_together
        self._step, self._batch, self._keys = step, object(), _CountedKeys(keys) if is_counted else keys
        return self._keys

    @property
    def of_batch(self) -> list[Any] | None:
        """Return the keys of the batch; None if torch's fetcher gets a single key."""
        return list(self._keys) if isinstance(self._keys, (list, tuple)) else None

    @property
    def key(self) -> Any:
        """Return the key of the sample that is being read alone; None between samples."""
        keys = self._keys
        if isinstance(keys, _CountedKeys):
            return keys[keys.num_taken - 1] if keys.num_taken and not keys.are_all_read else None
        return None if isinstance(keys, (list, tuple)) else keys

    @property
    def begun(self) -> object:
        """Return an object that differs for each sample, or group of samples; None before the first."""
        keys = self._keys
        return None if isinstance(keys, _CountedKeys) and not keys.num_taken else self._batch and (self._batch, self._row)

    @property
    def _row(self) -> int:
        """Return the row of the sample that was begun last; -1 if several are read together, or a single one."""
        return self._keys.num_taken - 1 if isinstance(self._keys, _CountedKeys) else -1

    def sample(self) -> Sample:
        """Return the sample that was begun last, or the first of those that are read together."""
        keys = self._keys
        key = keys[max(self._row, 0)] if isinstance(keys, (list, tuple)) and keys else keys
        return None, 0, index_of(key), 0

    def own_key(self) -> tuple[int, int]:
        """Return the key of its generator."""
        return key_in_pass(self._base_seed, self._step, self._row)


class _CountedKeys(list[Any]):
    """The keys of a batch, and how many of them have been taken.

    The list's iterator is asked for that, by the state that it would pickle: counting in Python would cost 0.1 us a sample.
    """

    def __init__(self, keys: Any) -> None:
        super().__init__(keys)
        self._left = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        self._left = super().__iter__()
        return self._left

    @property
    def num_taken(self) -> int:
        """Return how many keys have been taken."""
        _, _, *place = cast("tuple[Any, ...]", self._left.__reduce__())
        return place[0] if place else len(self)

    @property
    def are_all_read(self) -> bool:
        """Return whether the iterator has ended, after the last sample was read."""
        return len(self._left.__reduce__()) == 2
