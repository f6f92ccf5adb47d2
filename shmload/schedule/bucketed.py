"""Batches of samples of similar length: what LengthBuckets and TokenBudget have in common.

    shuffle     all samples, by the keyed permutation
    sort        by length within windows of many batches, upwards and downwards in turn, so that neighbours are alike across
                windows too; equal lengths stay in shuffled order. At least four windows an epoch, lest the same samples always meet
    cut         into batches: the one step in which the two differ
    shuffle     groups of a few neighbouring batches over the whole epoch, and the batches within each group

The ranks of a step read neighbours of the sequence, which are of one group and so of similar cost; the steps are in random
order. The one short group, any of them, comes last and shifts no other.

Rejected: fixed boundaries between buckets (TensorFlow's bucket_by_sequence_length: what is left in each bucket depends on all
that came before, and rare lengths wait an epoch for their batch); sorting the whole epoch (the same samples meet in every epoch).

Batches of a fixed size whose samples have similar lengths.

Batches of any number of samples whose padded size stays within a budget.
"""

from abc import abstractmethod
from typing import Literal, NamedTuple, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.cutting import cut
from shmload._core.draws import fill_words
from shmload.schedule.permutation import (
    BATCHES_IN_GROUPS,
    GROUPS,
    SAMPLES,
    SHORT_GROUP,
    EpochCache,
    Permutation,
    digest,
    whole_number,
)
from shmload.schedule.schedule import KeyedBatches

__all__ = [
    "Bucketed",
    "LengthBuckets",
    "Padding",
    "TokenBudget",
]

MAX_LENGTH = (1 << 31) - 1
MAX_SIZE = 1 << 31
MIN_WINDOWS = 4


class Padding(NamedTuple):
    """Share of padding in the rows of an epoch, each batch padded to its longest sample."""

    share: float
    share_shuffled: float  # if the same samples were cut into batches in shuffled order


class Epoch(NamedTuple):
    """One epoch, worked out."""

    samples: NDArray[np.int64]  # indices, batch after batch as cut
    starts: NDArray[np.int64]  # of each batch in `samples`, and their end
    order: NDArray[np.int64]  # which of these batches comes when


class Bucketed(KeyedBatches):
    """Batches cut from samples that were sorted by length within windows.

    Thread/process safety: as EpochCache's.
    """

    def __init__(self, lengths: ArrayLike, *, window: SupportsIndex, group: SupportsIndex) -> None:
        self.lengths = _checked(type(self).__name__, lengths)
        self.window = self._size("window", window, remedy="100 batches leave little padding")
        self.group = self._size("group", group, remedy="the number of ranks suits most; 1 shuffles single batches")
        self._digest = digest(self.lengths)
        self._epochs: EpochCache[Epoch] = EpochCache()

    def _size(self, name: str, value: SupportsIndex, *, remedy: str) -> int:
        return whole_number(f"{type(self).__name__}: {name}", value, at_least=1, at_most=MAX_SIZE, remedy=remedy)

    @property
    def n(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def _samples_per_batch(self) -> int:
        """How many samples a batch has, or has on average."""

    @abstractmethod
    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where batches of these samples, in this order, start; and their end."""

    def _kept(self, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that the epoch reads."""
        return shuffled

    def num_batches(self, *, seed: int, epoch: int) -> int:
        return len(self._epochs.get(seed, epoch, self._make).order)

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        made = self._epochs.get(seed, epoch, self._make)
        place = made.order[number]
        return made.samples[made.starts[place] : made.starts[place + 1]].copy()

    def padding(self, *, seed: int = 0, epoch: int = 0) -> Padding:
        """How much of an epoch's batches is padding, and how much it would be without sorting.

        Args:
            seed, epoch: which epoch of which run.
        Returns:
            (share, share_shuffled), both from 0 to 1, of rows padded to the longest of their batch.
        """
        made = self._epochs.get(seed, epoch, self._make)
        shuffled = self._shuffled(seed, epoch)
        return Padding(self._share(made.samples, made.starts), self._share(shuffled, self._cut(shuffled)))

    def _share(self, samples: NDArray[np.int64], starts: NDArray[np.int64]) -> float:
        lengths = self.lengths[samples].astype(np.int64)
        padded = int((np.maximum.reduceat(lengths, starts[:-1]) * np.diff(starts)).sum()) if len(starts) > 1 else 0
        return 1 - int(lengths.sum()) / padded if padded else 0.0

    def _shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return self._kept(Permutation(self.n, seed=seed, epoch=epoch, stream=SAMPLES).take(0, self.n))

    def _make(self, seed: int, epoch: int) -> Epoch:
        samples = self._shuffled(seed, epoch)
        per_batch = self._samples_per_batch()
        window = min(self.window, max(len(samples) // (MIN_WINDOWS * per_batch), 1))
        samples = samples[_sorted(self.lengths[samples], window * per_batch)]
        starts = self._cut(samples)
        return Epoch(samples, starts, _grouped(len(starts) - 1, self.group, seed, epoch))


def _sorted(lengths: NDArray[np.int32], per_window: int, *, max_bits: int = 63) -> NDArray[np.int64]:
    """The places of samples sorted by length within windows, upwards in even ones; equal lengths in their given order.

    Window, length and place are sorted as one number where `max_bits` hold them, at a fraction of the cost of a stable sort.
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
    """Which batch comes when: groups of neighbours in random order, the short group last, each shuffled within."""
    num_full, num_short = divmod(num_batches, group)
    groups, turn = np.arange(num_batches), np.empty(num_full + 1, np.int64)
    turn[num_full] = num_full
    if num_full and num_short:
        before = Permutation(num_full + 1, seed=seed, epoch=epoch, stream=SHORT_GROUP)[0] * group
        groups[before : before + num_short] = num_full * group
        groups[before + num_short :] -= num_short
    groups //= group
    if num_full:
        Permutation(num_full, seed=seed, epoch=epoch, stream=GROUPS).fill(0, turn[:num_full])
    words = np.empty(num_batches, np.uint64)
    fill_words(words, seed=seed, epoch=epoch, stream=BATCHES_IN_GROUPS, n=num_batches)
    return np.lexsort((words, turn[groups]))


def _checked(name: str, lengths: ArrayLike) -> NDArray[np.int32]:
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given):
        raise ValueError(
            f"{name}: lengths must be one-dimensional and not empty, got shape {given.shape}; give one for each sample"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{name}: lengths must be integers, got dtype {given.dtype}; round them up")
    wrong = np.flatnonzero((given < 0) | (given > MAX_LENGTH))
    if len(wrong):
        raise ValueError(
            f"{name}: lengths must be in [0, 2^31 - 1], got {given[wrong[0]]} at index {wrong[0]} "
            f"({len(wrong)} such of {len(given)}); count in a larger unit"
        )
    return given.astype(np.int32)


class LengthBuckets(Bucketed):
    """Shuffled batches of `batch_size` samples of similar length: little padding, and every sample once an epoch.

    `window` batches are sorted together: more of them leave less padding, fewer let more samples meet. `group` batches of
    similar length stand next to each other in the epoch, for the ranks of one step; take a multiple of the world size, or 1
    with a single rank.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1; an array, a list or a tensor. Copied.
        batch_size: samples of a batch; one batch an epoch may be shorter.
        window: batches whose samples are sorted together; a quarter of the epoch at most.
        group: batches of similar length that follow each other.
        drop_last: leave out n % batch_size samples, others in each epoch, instead of the shorter batch.
    Raises:
        TypeError, ValueError: the lengths are no lengths, or an argument is outside its bounds.
    Cost: O(n log n) at an epoch's first batch, 0.05 s for 10^6 samples, then 1 us a batch. Held: 4 bytes a sample, and 8 a
        sample and 16 a batch for each of the two newest epochs.
    Example:
        >>> order = LengthBuckets(range(1, 1001), batch_size=10)
        >>> len(order.batch(0, seed=7, epoch=0))
        10
        >>> [round(share, 2) for share in order.padding()]
        [0.03, 0.45]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: SupportsIndex,
        window: SupportsIndex = 100,
        group: SupportsIndex = 8,
        drop_last: bool = False,
    ) -> None:
        super().__init__(lengths, window=window, group=group)
        self.batch_size = self._size("batch_size", batch_size, remedy="a batch has at least one sample")
        if not isinstance(drop_last, bool):
            raise TypeError(f"LengthBuckets: drop_last must be True or False, got {drop_last!r}")
        self.drop_last = drop_last

    @property
    def identity(self) -> str:
        return (
            f"length_buckets(n={self.n}, lengths={self._digest}, batch_size={self.batch_size}, window={self.window}, "
            f"group={self.group}, drop_last={self.drop_last})"
        )

    def num_batches(self, *, seed: int, epoch: int) -> int:
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def _samples_per_batch(self) -> int:
        return self.batch_size

    def _kept(self, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
        return shuffled[: self.n - self.n % self.batch_size] if self.drop_last else shuffled

    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.append(np.arange(0, len(samples), self.batch_size), len(samples))

    def __repr__(self) -> str:
        return (
            f"LengthBuckets({self.n:,} lengths, batch_size={self.batch_size}, window={self.window}, group={self.group})"
        )


MAX_TOKENS = 1 << 62
Oversized = Literal["raise", "alone"]


class TokenBudget(Bucketed):
    """Shuffled batches of samples of similar length, each with as many as fit: longest * samples <= max_tokens.

    So every batch costs about the same, whatever its lengths, and ranks stay balanced. Every sample comes once an epoch. The
    number of batches may differ by a few from epoch to epoch, `len(loader)` says the current one's.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1, 0 counting as 1; an array, a list or a tensor. Copied.
        max_tokens: the most that a batch may hold, padding included.
        max_samples: the most samples of a batch; None: any number.
        window: about how many batches are sorted together, a quarter of the epoch at most. More leave less padding, fewer let
            more samples meet.
        group: batches of similar length that follow each other: their samples are about equally many.
        oversized: what a sample longer than max_tokens means: "raise", an error here and now; "alone", a batch of its own.
    Raises:
        TypeError, ValueError: the lengths are no lengths, or an argument is outside its bounds, or a sample is too long.
    Cost: as LengthBuckets.
    Example:
        >>> order = TokenBudget(range(1, 1001), max_tokens=2000)
        >>> batch = order.batch(0, seed=7, epoch=0) + 1  # here a sample is as long as its number
        >>> int(batch.max()) * len(batch) <= 2000
        True
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        max_tokens: SupportsIndex,
        max_samples: SupportsIndex | None = None,
        window: SupportsIndex = 100,
        group: SupportsIndex = 8,
        oversized: Oversized = "raise",
    ) -> None:
        super().__init__(lengths, window=window, group=group)
        self.max_tokens = whole_number(
            "TokenBudget: max_tokens", max_tokens, at_least=1, at_most=MAX_TOKENS, remedy="give what a batch may hold"
        )
        self.max_samples = (
            None
            if max_samples is None
            else self._size("max_samples", max_samples, remedy="None leaves it to max_tokens")
        )
        if oversized not in get_args(Oversized):
            raise ValueError(f"TokenBudget: oversized must be 'raise' or 'alone', got {oversized!r}")
        self.oversized = oversized
        longest = int(self.lengths.argmax())
        if oversized == "raise" and self.lengths[longest] > self.max_tokens:
            raise ValueError(
                f"TokenBudget: no sample may be longer than max_tokens={self.max_tokens}, sample {longest} has length "
                f"{self.lengths[longest]} ({np.count_nonzero(self.lengths > self.max_tokens)} such of {self.n}); truncate or "
                "leave out, raise max_tokens, or give oversized='alone' for a batch of its own"
            )
        mean = max(int(self.lengths.sum(dtype=np.int64)) // self.n, 1)
        self._mean_samples = min(max(self.max_tokens // mean, 1), self.max_samples or MAX_SIZE)

    @property
    def identity(self) -> str:
        return (
            f"token_budget(n={self.n}, lengths={self._digest}, max_tokens={self.max_tokens}, max_samples={self.max_samples}, "
            f"window={self.window}, group={self.group}, oversized={self.oversized})"
        )

    def _samples_per_batch(self) -> int:
        return self._mean_samples

    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.empty(len(samples) + 1, np.int64)
        num_batches = cut(self.lengths[samples].astype(np.int64), self.max_tokens, self.max_samples or MAX_SIZE, starts)
        starts[num_batches] = len(samples)
        return starts[: num_batches + 1].copy()

    def __repr__(self) -> str:
        return (
            f"TokenBudget({self.n:,} lengths, max_tokens={self.max_tokens}, max_samples={self.max_samples}, "
            f"window={self.window}, group={self.group})"
        )
