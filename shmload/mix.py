"""Mix: several datasets as one, read in proportion to weights.

As a dataset it is its members end to end. The proportions are in the order in which a ShmLoader in seed mode reads it
(`schedule/mix_order.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.mix_order import MixOrder, Stop, check_stop, check_weights


class Mix(ConcatDataset[Any]):
    """Datasets mixed by weights: `ShmLoader(Mix([(web, 0.7), (books, 0.3)]), batch_size=64, shuffle=True, seed=7)`.

    After any number of samples each member has had its share of them within one sample, counted over all ranks. Each member is
    shuffled by itself, anew in each epoch and each time it begins again. A state holds one counter for each member and resumes on
    any world size.

    Args:
        members: (dataset, weight) pairs; map-style datasets. Weights are finite and at least 0, and need not add up to 1; the
            datasets' lengths as weights read each exactly once in an epoch. A member may be a Mix: its members take its place, with
            their shares of its weight.
        stop: when an epoch ends. "first": when the first member's share is used up: nothing is repeated. "all": when every member
            has been read whole; those that run out begin again. "repeat": never; the loader has no len().
        curriculum: step of the epoch -> the weights from then on, one for each member.
    Raises:
        ValueError, TypeError: for what cannot be mixed.
    Cost: about 45 ns a draw with 10 members; a jump to a place whose counters are not known draws all that lies before.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    Example:
        >>> from shmload import Mix, ShmLoader
        >>> loader = ShmLoader(Mix([(["a"] * 3, 3), (["b"], 1)]), batch_size=4, seed=0)
        >>> next(iter(loader))
        ['a', 'a', 'b', 'a']
    """

    is_concatenation = True  # so that workers find what its members can do

    def __init__(
        self,
        members: Sequence[tuple[Dataset[Any], float]],
        *,
        stop: Stop = "first",
        curriculum: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        check_stop(stop)
        if not members:
            raise ValueError("a Mix needs at least one (dataset, weight); got none")
        for number, member in enumerate(members):
            if not (isinstance(member, tuple | list) and len(member) == 2 and hasattr(member[0], "__getitem__")):
                raise TypeError(
                    f"a Mix needs pairs of a map-style dataset and its weight; member {number} is {member!r}"
                )
            if not hasattr(member[0], "__len__"):
                raise TypeError(
                    f"member {number} of the Mix, a {type(member[0]).__name__}, has no length: give it __len__"
                )
        check_weights([weight for _, weight in members], len(members), "a Mix")
        pieces = {0: [weight for _, weight in members]}
        for step, weights in (curriculum or {}).items():
            if not isinstance(step, int) or step < 1:
                raise ValueError(f"a curriculum says from which step on weights hold, 1 or later; got {step!r}")
            check_weights(weights, len(members), f"step {step} of the curriculum")
            pieces[step] = list(weights)
        datasets, self._pieces = _taken_apart([dataset for dataset, _ in members], pieces)
        super().__init__(datasets)
        self.stop = stop
        self._sizes: list[int] = []  # that the orders are made for
        self._orders: dict[tuple[bool, int], MixOrder] = {}
        self.keyed_order(shuffle=False, global_batch=1)  # raises what does not go together

    @property
    def weights(self) -> list[float]:
        """Each member's weight at an epoch's start."""
        return list(self._pieces[0])

    def member_of(self, index: int) -> int:
        """Which member a sample is of: its place in `datasets`, for the indices that `loader.last_indices` gives."""
        return bisect_right(self.cumulative_sizes, index)

    def keyed_order(self, *, shuffle: bool, global_batch: int) -> KeyedOrder:
        """The order in which a loader in seed mode reads it."""
        sizes = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]  # they have lengths
        if sizes != self._sizes:  # a member has grown
            self._sizes, self._orders = sizes, {}
            self.cumulative_sizes = self.cumsum(self.datasets)  # type: ignore[no-untyped-call]  # torch's own
        key = (shuffle, global_batch if len(self._pieces) > 1 else 1)
        if key not in self._orders:
            weights = {step * global_batch: weights for step, weights in self._pieces.items()}
            self._orders[key] = MixOrder(sizes, weights, stop=self.stop, shuffle=shuffle)
        return self._orders[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}  # workers need none


def _taken_apart(datasets: list[Any], pieces: dict[int, list[float]]) -> tuple[list[Any], dict[int, list[float]]]:
    """The members with those of mixtures among them in their place."""
    if not any(isinstance(dataset, Mix) for dataset in datasets):
        return datasets, pieces
    members: list[Any] = []
    shares: list[tuple[int, Fraction]] = []  # of each member: which it came from, and its part of that one's weight
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Mix):
            members.append(dataset)
            shares.append((number, Fraction(1)))
            continue
        if len(dataset._pieces) > 1:
            raise ValueError(
                f"member {number} is a Mix with a curriculum, which has no steps of its own: give it to the outer Mix"
            )
        total = sum(map(Fraction, dataset.weights))
        members += dataset.datasets
        shares += [(number, Fraction(weight) / total) for weight in dataset.weights]
    return members, {
        step: [_number(Fraction(weights[number]) * share) for number, share in shares]
        for step, weights in pieces.items()
    }


def _number(weight: Fraction) -> float:
    return int(weight) if weight.denominator == 1 else float(weight)
