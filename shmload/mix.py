"""Several datasets as one, drawn in proportion to weights.

To anything that asks by index a Mix is its members laid end to end, as torch's ConcatDataset. What it adds is an order of its own
that a loader in seed mode asks for: schedule/mix_order.py. So workers, in-place decoding and wrappers see nothing new.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from shmload._core.mix import MAX_MEMBERS
from shmload.schedule.checks import whole_number
from shmload.schedule.mix_order import MixOrder, Stop
from shmload.schedule.permutation import MAX_N
from shmload.schedule.shares import Shares, checked_weights
from shmload.worker.reader import InPlace, in_place_of_all

__all__ = ["Mix"]


class Mix:
    """Datasets mixed by weights: every prefix of an epoch holds of each what its weight says, within one sample.

    For `ShmLoader(..., seed=...)`. Which member comes when depends on the weights alone; which of its samples on the seed and the
    epoch, or with shuffle=False on nothing. The state of a loader holds a counter for each member, and goes on with
    any number of ranks of the same global batch.

    Args:
        members: pairs of a map-style dataset and its weight. A weight is an int, float or Fraction from 0 up; a float means the
            decimal it prints as; only ratios matter. Sizes as weights give each sample once an epoch. Lengths are asked for once.
        stop: when an epoch ends. "first": before any sample comes twice, so with the first member that is used up; "all": when
            every member was seen whole, those that run out start over in a new order; "repeat": never, members start over.
        curriculum: other weights from some steps of the epoch on: {step: weights of all members}.
    Raises:
        TypeError, ValueError: a member, weight or step is not as described. By a loader: the curriculum never lets an epoch end.
    Example:
        >>> from shmload import Mix, ShmLoader
        >>> mix = Mix([(range(30), 3), (range(100, 110), 1)])
        >>> with ShmLoader(mix, batch_size=8, seed=7) as loader:
        ...     next(iter(loader)).tolist()
        [0, 1, 100, 2, 3, 4, 101, 5]
    """

    def __init__(
        self,
        members: Iterable[tuple[Any, Any]],
        *,
        stop: Stop = "first",
        curriculum: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        pairs = _checked_pairs(members)
        self.members: tuple[Any, ...] = tuple(member for member, _ in pairs)
        self.weights: tuple[Any, ...] = tuple(checked_weights([weight for _, weight in pairs], "Mix: weights"))
        self.stop: Stop = stop
        self.curriculum = _checked_curriculum(curriculum or {}, len(pairs))
        self.sizes: tuple[int, ...] = tuple(_size_of(member, number) for number, member in enumerate(self.members))
        self.cumulative_sizes: list[int] = list(accumulate(self.sizes))
        for number, size in enumerate(self.sizes):
            if size == 0 and any(weights[number] for weights in (self.weights, *self.curriculum.values())):
                raise ValueError(
                    f"Mix: a member with a weight must have samples, got none in member {number}; leave it out, or give weight 0"
                )
        self._order: tuple[tuple[bool, int], MixOrder] | None = None
        if not self.curriculum:  # else an epoch's length depends on the loader
            self.keyed_order(shuffle=True, global_batch=1)

    # ------------------------------------------------------------ the order

    def keyed_order(self, *, shuffle: bool, global_batch: int) -> MixOrder:
        """The order in which a loader takes the samples; the last one asked for is kept with what it has worked out."""
        key = (shuffle, global_batch if self.curriculum else 0)
        if self._order is None or self._order[0] != key:
            starts = [0, *(step * global_batch for step in self.curriculum)]
            if starts[-1] > MAX_N:
                raise ValueError(
                    f"Mix: a step of the curriculum must lie within 2^62 samples, got step {max(self.curriculum)} of "
                    f"{global_batch}; no epoch is so long, leave it out"
                )
            shares = Shares.of([self.weights, *self.curriculum.values()], starts=starts)
            self._order = key, MixOrder(self.sizes, shares, stop=self.stop, shuffle=shuffle)
        return self._order[1]

    def member_of(self, indices: Any) -> Any:
        """Which member samples belong to, as for a loss per member.

        Args:
            indices: one index, or an array of them: `loader.last_indices`.
        Returns:
            the member's number, or an int64 array of them.
        """
        given = np.asarray(indices)
        numbers: NDArray[np.int64] = np.searchsorted(self.cumulative_sizes, given % len(self), side="right")
        return numbers if given.ndim else int(numbers)

    def place_of(self, index: SupportsIndex) -> tuple[int, int]:
        """(member, index of the sample in it). Indices may go on behind the last, as a loader's do where a member starts over."""
        index, size = operator.index(index), len(self)
        if index < -size or size == 0:
            raise IndexError(f"Mix: an index must be at least {-size}, got {index}")
        index %= size
        number = bisect_right(self.cumulative_sizes, index)
        return number, index - (self.cumulative_sizes[number] - self.sizes[number])

    # ------------------------------------------------------------ the members end to end

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        member, place = self.place_of(index)
        return self.members[member][place]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Reads several samples, if a member can; None where none does."""
        return self._read_several if any(getattr(member, "__getitems__", None) for member in self.members) else None

    def _read_several(self, indices: Sequence[int]) -> list[Any]:
        of_member: dict[int, list[tuple[int, int]]] = {}
        for row, index in enumerate(indices):
            number, place = self.place_of(index)
            of_member.setdefault(number, []).append((row, place))
        samples: list[Any] = [None] * len(indices)
        for number, wanted in of_member.items():
            member = self.members[number]
            places = [place for _, place in wanted]
            several = getattr(member, "__getitems__", None)
            got = several(places) if several else [member[place] for place in places]
            if len(got) != len(places):
                raise ValueError(
                    f"Mix: __getitems__ of member {number} must return {len(places)} samples, it returned {len(got)}"
                )
            for (row, _), sample in zip(wanted, got, strict=True):
                samples[row] = sample
        return samples

    # ------------------------------------------------------------ decoding in place

    def in_place_reader(self) -> InPlace | None:
        """The members' common way of decoding into rows, if all have one with equal schemas."""
        return in_place_of_all(self.members, self.cumulative_sizes, is_cyclic=True)

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{type(member).__name__} of {size:,}: {weight}"
            for member, size, weight in zip(self.members[:8], self.sizes, self.weights, strict=False)
        )
        more = f", and {len(self.members) - 8} more" if len(self.members) > 8 else ""
        steps = f", curriculum at steps {', '.join(map(str, self.curriculum))}" if self.curriculum else ""
        return f"Mix({parts}{more}; stop={self.stop!r}{steps})"


def _checked_pairs(members: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    pairs = list(members)
    if not 1 <= len(pairs) <= MAX_MEMBERS:
        raise ValueError(
            f"Mix: there must be 1 to {MAX_MEMBERS} members, got {len(pairs)}; give [(dataset, weight), ...]"
        )
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"Mix: members must be pairs (dataset, weight), got {pair!r} for member {number}")
        if isinstance(pair[0], Mix):
            raise TypeError(
                f"Mix: a member must be a dataset of its own, member {number} is a Mix; give its members to this one, with "
                "their weights multiplied by its"
            )
    return [(member, weight) for member, weight in pairs]


def _size_of(member: Any, number: int) -> int:
    can_be_asked = (
        hasattr(member, "__getitem__") or getattr(member, "__getitems__", None) or hasattr(member, "read_into")
    )
    try:
        size = len(member)
    except (TypeError, NotImplementedError):
        size = -1
    if size < 0 or not (can_be_asked or hasattr(member, "read_batch_into")):
        raise TypeError(
            f"Mix: a member must have __len__ and __getitem__, {type(member).__name__} (member {number}) has not both; "
            "an iterable dataset cannot be mixed by index, read it into a list or shards first"
        )
    return size


def _checked_curriculum(given: Mapping[int, Sequence[Any]], num_members: int) -> dict[int, tuple[Any, ...]]:
    """Weights by step, in the order of the steps."""
    found = {}
    for step, weights in given.items():
        number = whole_number(
            "Mix: a step of the curriculum",
            step,
            at_least=1,
            at_most=MAX_N,
            remedy="step 0 has the members' own weights",
        )
        if not isinstance(weights, Iterable) or len(several := tuple(weights)) != num_members:
            raise ValueError(
                f"Mix: the curriculum must give {num_members} weights at step {number}, one for each member, got {weights!r}"
            )
        found[number] = tuple(checked_weights(several, f"Mix: weights at step {number}"))
    return dict(sorted(found.items()))
