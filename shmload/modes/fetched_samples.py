"""The samples that torch's fetcher reads in the trainer's process, as `sample_rng` and `sample_info` see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shmload.worker.sample_reader import index_of
from shmload.worker.sample_rng import Sample, key_in_pass


class FetchedSamples:
    """The sample that torch's fetcher reads at the moment.

    Args:
        base_seed: seed of the pass, which torch has drawn.
        are_read_together: whether the dataset's `__getitems__` gets the keys, or the only key; both must not be replaced.

    Attributes:
        begun: an object that is replaced for each sample, or group of samples; None before the first.
        key: key of the sample that is being read alone; None between samples.
        of_batch: the keys of the batch that is being read; None if torch's fetcher gets a single key.
    """

    def __init__(self, base_seed: int, *, are_read_together: bool) -> None:
        self._base_seed, self._are_read_together = base_seed, are_read_together
        self.begun: object = None
        self._step, self._row = 0, 0
        self._key: Any = None
        self.key: Any = None
        self.of_batch: list[Any] | None = None

    def keys(self, step: int, keys: Any) -> Any:
        """Return the keys of a batch for the fetcher, which begins each sample by taking its key.

        Args:
            step: number of the batch.
            keys: the keys of the batch.
        """
        self._step = step
        self.of_batch = list(keys) if isinstance(keys, (list, tuple)) else None
        if not self._are_read_together and isinstance(keys, (list, tuple)):
            return _BeginningKeys(self, keys)
        are_several = isinstance(keys, (list, tuple))
        self.begin(-1, keys[0] if are_several and keys else keys)
        self.key = None if are_several else keys
        return keys

    def begin(self, row: int, key: Any) -> None:
        """Begin the sample of a row of the batch, or several at once if `row` is -1."""
        self._row, self._key, self.key = row, key, key
        self.begun = object()

    def sample(self) -> Sample:
        """Return the sample that was begun last."""
        return None, 0, index_of(self._key), 0

    def own_key(self) -> tuple[int, int]:
        """Return the key of its generator."""
        return key_in_pass(self._base_seed, self._step, self._row)


class _BeginningKeys(list[Any]):
    """The keys of a batch, each of which begins its sample when it is taken."""

    def __init__(self, samples: FetchedSamples, keys: Any) -> None:
        super().__init__(keys)
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        for row, key in enumerate(super().__iter__()):
            self._samples.begin(row, key)
            yield key
        self._samples.key = None
