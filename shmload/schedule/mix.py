"""Mix: several datasets as one, read in proportion to weights.

As a dataset it is its members, one after the other. The proportions are in the order in which a ShmLoader in seed mode reads it
(mix_order.py).
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol, SupportsIndex, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from shmload.introspect.abilities import ability_of, overrides
from shmload.schedule.checks import own_int
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.mix_order import MixOrder, Stop
from shmload.schedule.shares import check_weights, exact_weight


def check_members(members: Sequence[Any], stop: str, mixture: str, kind: str, kinds: str, is_one: Callable[[Any], bool]) -> None:
    """Check that members are (dataset or pipeline, weight) pairs and that `stop` is a rule for the end of an epoch.

    Args:
        members: the members.
        stop: the rule.
        mixture, kind, kinds: names of the mixture, of a member, and of what a member may be, for errors.
        is_one: returns whether an object can be a member.
    Raises:
        ValueError, TypeError: a member or `stop` is not valid.
    """
    if stop not in get_args(Stop):
        raise ValueError(f'stop is "first", "all" or "repeat"; got {stop!r}')
    if not members:
        raise ValueError(f"{mixture} needs at least one ({kind}, weight); got none")
    for number, member in enumerate(members):
        if not (isinstance(member, tuple | list) and len(member) == 2 and is_one(member[0])):
            raise TypeError(f"{mixture} needs pairs of a {kinds} and its weight; member {number} is {member!r}")
    check_weights([weight for _, weight in members], len(members), mixture)


def _is_map_style(dataset: Any) -> bool:
    """Return whether samples are read by index: one by one, or, with read_into or read_batch_into, into their rows."""
    return any(hasattr(dataset, name) for name in ("__getitem__", "read_into", "read_batch_into"))


class SizedSamples(Protocol):
    """Samples with an index and a length: a list, the datasets of shmload.formats, torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


class SizedDecoder(Protocol):
    """Samples that `read_into` or `read_batch_into` writes into their rows."""

    @property
    def schema(self) -> Any: ...
    def __len__(self) -> int: ...


class Mix(ConcatDataset[Any]):
    """Several datasets mixed by weights: `ShmLoader(Mix([(web, 0.7), (books, 0.3)]), batch_size=64, shuffle=True, seed=7)`.

    After any number of samples, each member has contributed its share to within one sample, counted over all ranks. Each member is
    shuffled separately, again in every epoch and every time it starts over. A state holds one counter per member and resumes on any
    world size.

    Args:
        members: (dataset, weight) pairs; map-style datasets. Weights are finite and at least 0, and need not add up to 1; a float
            means the decimal it prints as. The datasets' lengths as weights read each exactly once in an epoch. A member may be
            a Mix: its members take its place, with their shares of its weight.
        stop: when an epoch ends. "first": when the first member is used up, so nothing is repeated. "all": when every member has
            been read whole; members that run out start over. "repeat": never; the loader has no len(). A sample repeated within an
            epoch has the index `index + round * len(mix)`, so `sample_rng` draws new numbers for it.
        curriculum: maps a step of the epoch to the weights from that step on, one for each member.
    Raises:
        ValueError, TypeError: members, weights or `stop` are invalid.
    Cost: about 35 ns per draw with 10 members, 115 with 200; a jump to a position with unknown counters draws everything before it.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    Example:
        >>> from shmload import Mix, ShmLoader
        >>> loader = ShmLoader(Mix([(["a"] * 3, 3), (["b"], 1)]), batch_size=4, seed=0)
        >>> next(iter(loader))
        ['a', 'a', 'b', 'a']
    """

    def __init__(
        self,
        members: Sequence[tuple[SizedSamples | SizedDecoder, float]],
        *,
        stop: Stop = "first",
        curriculum: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        check_members(members, stop, "Mix", "dataset", "map-style dataset", _is_map_style)
        for number, (dataset, _) in enumerate(members):
            if not hasattr(dataset, "__len__"):
                raise TypeError(f"member {number} of the Mix, of type {type(dataset).__name__}, has no length: give it __len__")
        pieces = {0: [weight for _, weight in members]}
        for given, weights in (curriculum or {}).items():
            step = own_int(given)
            if not isinstance(step, int) or step < 1:
                raise ValueError(f"a curriculum gives the weights from a step on, and steps count from 1; got {step!r}")
            check_weights(weights, len(members), f"step {step} of the curriculum")
            pieces[step] = list(weights)
        datasets, self._pieces = _taken_apart([dataset for dataset, _ in members], pieces)
        super().__init__(datasets)
        self.stop = stop
        self._sizes: list[int] = []  # of the members when `_orders` was filled
        self._orders: dict[tuple[bool, int], MixOrder] = {}
        self.keyed_order(shuffle=False, global_batch=1)  # raises if sizes, weights and `stop` do not fit together

    @property
    def weights(self) -> list[Any]:
        """Return the weight of each member at the start of an epoch, as given; Fractions if a member was a Mix."""
        return list(self._pieces[0])

    @property
    def is_concatenation(self) -> bool:
        """Return whether the samples are those of the members, which workers may then read: no subclass makes others of them."""
        return not overrides(self, ("__getitem__", "__getitems__", "read_into", "read_batch_into"), ("is_concatenation",))

    def member_of(self, indices: Any) -> Any:
        """Return the member that each sample belongs to, as an index into `datasets`; for example to compute a loss per member.

        Args:
            indices: one index, or an array of indices such as `loader.last_indices`.
        Returns:
            an int, or an int64 array of the same shape.
        """
        given = np.asarray(indices)
        members: NDArray[np.int64] = np.searchsorted(self.cumulative_sizes, given % len(self), side="right")
        return members if given.ndim else int(members)

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the member of a sample and its index in that member.

        Args:
            index: at least `-len(self)`. An index of `len(self)` or more is a repeated sample.
        Returns:
            (member, index in it).
        Raises:
            IndexError: the index is below `-len(self)`.
        """
        if index < -len(self):
            raise IndexError(f"an index of this Mix is at least {-len(self)}; got {index}")
        index %= len(self)
        member = bisect_right(self.cumulative_sizes, index)
        return member, index - (self.cumulative_sizes[member - 1] if member else 0)

    def __getitem__(self, index: SupportsIndex) -> Any:
        member, place = self.place_of(operator.index(index))
        return self.datasets[member][place]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Return a function that reads several samples, or None if no member has `__getitems__`.

        It is also None if a subclass overrides `__getitem__`, which would not be called.

        A member whose `__getitems__` returns another number of samples than indices is read again, one index a call, so that
        samples keep their order; it has to decide about each sample by itself.
        """
        has_several = self.is_concatenation and any(ability_of(each, "__getitems__") for each in self.datasets)
        return self._read_several if has_several else None

    def _read_several(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several indices, in order: fewer or more if a member's `__getitems__` filters or adds samples."""
        rows_of: dict[int, list[tuple[int, int]]] = {}
        for row, index in enumerate(indices):
            member, place = self.place_of(index)
            rows_of.setdefault(member, []).append((row, place))
        samples: list[Sequence[Any]] = [()] * len(indices)  # the samples of each index
        for member, rows in rows_of.items():
            dataset, places = self.datasets[member], [place for _, place in rows]
            read = ability_of(dataset, "__getitems__")
            several = read(places) if read else [dataset[place] for place in places]
            if len(several) == len(places):
                found: list[Sequence[Any]] = [[sample] for sample in several]
            else:  # one call for each place says which index a sample belongs to
                found = [read([place]) for place in places]
            for (row, _), of_index in zip(rows, found, strict=True):
                samples[row] = of_index
        return list(chain.from_iterable(samples))

    def keyed_order(self, *, shuffle: bool, global_batch: int) -> KeyedOrder:
        """Return the order in which a loader in seed mode reads this Mix. It is cached until a member's length changes.

        Args:
            shuffle: whether each member's samples are shuffled.
            global_batch: number of samples of one step over all ranks, which converts the steps of a curriculum to positions.
        """
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
        return {**self.__dict__, "_orders": {}}  # workers need no orders


def _taken_apart(datasets: list[Any], pieces: dict[int, list[Any]]) -> tuple[list[Any], dict[int, list[Any]]]:
    """Replace each member that is a Mix by its own members, with their shares of its weight."""
    if not any(isinstance(dataset, Mix) for dataset in datasets):
        return datasets, pieces
    members: list[Any] = []
    shares: list[tuple[int, Fraction]] = []  # for each new member: the given member it came from, and its part of that weight
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Mix):
            members.append(dataset)
            shares.append((number, Fraction(1)))
            continue
        if not dataset.is_concatenation:
            raise TypeError(
                f"member {number}, a {type(dataset).__name__}, overrides how the samples of a Mix are made, and its members "
                "would be read without that: do it in the outer Mix, or in the datasets that are mixed"
            )
        if len(dataset._pieces) > 1:
            raise ValueError(f"member {number} is a Mix with a curriculum, which has no steps of its own: give it to the outer Mix")
        total = sum(map(exact_weight, dataset.weights))
        members += dataset.datasets
        shares += [(number, exact_weight(weight) / total) for weight in dataset.weights]
    return members, {step: [exact_weight(weights[number]) * share for number, share in shares] for step, weights in pieces.items()}
