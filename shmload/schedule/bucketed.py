"""`Bucketed`: batches of samples of similar length, the common base of LengthBuckets and TokenBudget.

    shuffle     all samples, by the keyed permutation
    sort        by length within windows of many batches, ascending and descending in turn, so that neighbors are similar across
                window borders too; equal lengths stay in shuffled order. At least four windows an epoch, so that all samples meet
    cut         into batches: the only step in which the two classes differ
    shuffle     groups of a few neighboring batches over the whole epoch, and the batches within each group

The ranks of a step read neighboring batches, which are of one group and so of similar cost; the steps are in random order. One
group may be short. It comes last, whichever it is, so it shifts no other.

Rejected: fixed boundaries between buckets (TensorFlow's bucket_by_sequence_length: what remains in each bucket depends on
everything before, and rare lengths wait an epoch for their batch); sorting the whole epoch (the same samples meet in every
epoch).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.draws import fill_words
from shmload.schedule import key_streams
from shmload.schedule.checks import refuse_where, whole_number
from shmload.schedule.digest import digest
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.permutation import Permutation

MAX_LENGTH = (1 << 31) - 1
MAX_SIZE = 1 << 31
MIN_WINDOWS = 4


class Padding(NamedTuple):
    """The share of padding in an epoch whose batches are padded to their longest sample."""

    share: float
    share_shuffled: float  # the same, if batches were cut from shuffled samples without sorting


class Epoch(NamedTuple):
    """The batches of one epoch."""

    samples: NDArray[np.int64]  # indices, batch after batch
    starts: NDArray[np.int64]  # where each batch begins in `samples`, and the end of the last
    order: NDArray[np.int64]  # the order in which these batches are read


class Bucketed(KeyedBatches):
    """Base class of orders whose batches are cut from samples that were sorted by length within windows.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1. Copied.
        window: number of batches whose samples are sorted together.
        group: number of neighboring batches that stay together when the batches are shuffled.
    Thread/process safety: as EpochCache.
    """

    def __init__(self, lengths: ArrayLike, *, window: SupportsIndex, group: SupportsIndex) -> None:
        self.lengths = _checked(type(self).__name__, lengths)
        self.num_needed = len(self.lengths)
        self.window = self._size("window", window, remedy="100 batches leave little padding")
        self.group = self._size("group", group, remedy="the number of ranks suits most; 1 shuffles single batches")
        self._digest = digest(self.lengths)
        self._epochs: EpochCache[Epoch] = EpochCache()

    def _size(self, name: str, value: SupportsIndex, *, remedy: str) -> int:
        return whole_number(f"{type(self).__name__}: {name}", value, at_most=MAX_SIZE, remedy=remedy)

    @property
    def n(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def _samples_per_batch(self) -> int:
        """Return the number of samples in a batch, or the average number."""

    @abstractmethod
    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cut samples, in this order, into batches. Return the start of each batch, and the end of the last."""

    def _kept(self, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples that the epoch reads."""
        return shuffled

    def num_batches(self, *, seed: int, epoch: int) -> int:
        return len(self._epochs.get(seed, epoch, self._make).order)

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        made = self._epochs.get(seed, epoch, self._make)
        place = made.order[number]
        return made.samples[made.starts[place] : made.starts[place + 1]].copy()

    def padding(self, *, seed: int = 0, epoch: int = 0) -> Padding:
        """Return the share of padding in an epoch's batches, with and without sorting by length.

        Args:
            seed, epoch: the run and the epoch.
        Returns:
            (share, share_shuffled), each from 0 to 1, of rows padded to the longest of their batch.
        """
        made = self._epochs.get(seed, epoch, self._make)
        shuffled = self._shuffled(seed, epoch)
        return Padding(self._share(made.samples, made.starts), self._share(shuffled, self._cut(shuffled)))

    def _share(self, samples: NDArray[np.int64], starts: NDArray[np.int64]) -> float:
        lengths = self.lengths[samples].astype(np.int64)
        padded = int((np.maximum.reduceat(lengths, starts[:-1]) * np.diff(starts)).sum()) if len(starts) > 1 else 0
        return 1 - int(lengths.sum()) / padded if padded else 0.0

    def _shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return self._kept(Permutation(self.n, seed=seed, epoch=epoch, stream=key_streams.SAMPLES).take(0, self.n))

    def _make(self, seed: int, epoch: int) -> Epoch:
        samples = self._shuffled(seed, epoch)
        per_batch = self._samples_per_batch()
        window = min(self.window, max(len(samples) // (MIN_WINDOWS * per_batch), 1))
        samples = samples[_sorted(self.lengths[samples], window * per_batch)]
        starts = self._cut(samples)
        return Epoch(samples, starts, _grouped(len(starts) - 1, self.group, seed, epoch))


def _sorted(lengths: NDArray[np.int32], per_window: int, *, max_bits: int = 63) -> NDArray[np.int64]:
    """Return the places that sort samples by length within windows of `per_window`, ascending in even and descending in odd ones.

    Equal lengths keep their order. Window, length and place are sorted as one integer if `max_bits` can hold it, at a fraction of
    the cost of a stable sort.
    """
    places = np.arange(len(lengths))
    windows = places // per_window
    rising = np.where(windows % 2, int(lengths.max(initial=0)) - lengths.astype(np.int64), lengths)
    length_bits, place_bits = int(rising.max(initial=0)).bit_length(), min(per_window, len(lengths)).bit_length()
    if int(windows.max(initial=0)).bit_length() + length_bits + place_bits > max_bits:
        return np.lexsort((rising, windows))
    windows <<= length_bits + place_bits
    windows |= rising << place_bits
    windows |= places % per_window
    windows.sort()
    return (windows & ((1 << place_bits) - 1)) + places // per_window * per_window


def _grouped(num_batches: int, group: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of batches: groups of neighbors in random order, the short group last, each group shuffled inside."""
    num_full, num_short = divmod(num_batches, group)
    groups, turn = np.arange(num_batches), np.arange(num_full + 1)  # the short group comes last
    if num_full and num_short:
        before = Permutation(num_full + 1, seed=seed, epoch=epoch, stream=key_streams.SHORT_GROUP)[0] * group
        groups[before : before + num_short] = num_full * group
        groups[before + num_short :] -= num_short
    groups //= group
    if num_full:
        Permutation(num_full, seed=seed, epoch=epoch, stream=key_streams.GROUPS).fill(0, turn[:num_full])
    words = np.empty(num_batches, np.uint64)
    fill_words(words, seed=seed, epoch=epoch, stream=key_streams.BATCHES_IN_GROUPS, n=num_batches)
    return np.lexsort((words, turn[groups]))


def _checked(name: str, lengths: ArrayLike) -> NDArray[np.int32]:
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given):
        raise ValueError(
            f"{name}: lengths must be one-dimensional and not empty, got shape {given.shape}; give one for each sample"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{name}: lengths must be integers, got dtype {given.dtype}; round them up")
    wrong = (given < 0) | (given > MAX_LENGTH)
    refuse_where(f"{name}: lengths must be in [0, 2^31 - 1]", given, wrong, "count in a larger unit")
    return given.astype(np.int32)
