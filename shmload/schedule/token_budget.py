"""`TokenBudget`: batches of any number of samples whose padded size stays within a budget."""

from __future__ import annotations

from typing import Literal, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.cutting import cut
from shmload.schedule.bucketed import MAX_SIZE, Bucketed
from shmload.schedule.checks import whole_number

Oversized = Literal["raise", "alone"]


class TokenBudget(Bucketed):
    """Shuffled batches of samples of similar length, each with as many samples as fit: longest * samples <= max_tokens.

    Every batch costs about the same, so ranks stay balanced. Every sample is read once per epoch. The number of batches may
    differ by a few between epochs; `len(loader)` is that of the current epoch.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1 (0 counts as 1); an array, a list or a tensor. Copied.
        max_tokens: the largest padded size of a batch.
        max_samples: the largest number of samples in a batch, or None for any number.
        window: approximate number of batches that are sorted together; at most a quarter of the epoch. A larger window leaves less
            padding, a smaller one mixes samples better.
        group: number of batches of similar length that follow each other; they have similar numbers of samples.
        oversized: what to do with a sample longer than max_tokens: "raise" an error now, or put it "alone" in a batch.
    Raises:
        TypeError, ValueError: the lengths are invalid, an argument is out of bounds, or a sample is too long.
    Cost: as LengthBuckets.
    Example:
        >>> order = TokenBudget(range(1, 1001), max_tokens=2000)
        >>> batch = order.batch(0, seed=7, epoch=0) + 1  # a length is here an index plus one
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
        self.max_tokens = whole_number("TokenBudget: max_tokens", max_tokens, remedy="give what a batch may hold")
        self.max_samples = (
            None if max_samples is None else self._size("max_samples", max_samples, remedy="None leaves it to max_tokens")
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
