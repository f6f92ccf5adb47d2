"""The stages a pipeline is composed of. They are plain values: what they mean together is `plan.py`'s.

Names and arguments are those of the Conveyer library (https://github.com/neonbjb/conveyer); integers beyond the first are given
by name, and what it has no word for (`uneven`, `ragged`) is ShmLoader's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.schedule import permutation
from shmload.schedule.permutation import EpochCache
from shmload.schedule.schedule import Uneven

__all__ = ["Collate", "DistributedBatchedMap", "Map", "Partition", "Permutation", "Range", "Source"]

SEED = 1234  # of sources that are given none


@dataclass(frozen=True)
class Source:
    """Where a pipeline's items come from: integers, epoch after epoch, each once in every epoch."""

    n_elements: int
    _: KW_ONLY
    repeating: bool = True
    seed: int = SEED

    def __post_init__(self) -> None:
        name = type(self).__name__
        _set_whole(self, f"{name}(n_elements)", "n_elements", 1, permutation.MAX_N)
        _set_whole(self, f"{name}(seed)", "seed", 0, permutation.MAX_UINT64)
        if not isinstance(self.repeating, bool):
            raise TypeError(f"{name}(repeating) is True or False; got {self.repeating!r}")

    @property
    def n(self) -> int:
        """Items of an epoch."""
        return self.n_elements

    @property
    def members(self) -> int:
        """What its keys are made of, for who reads them."""
        return self.n_elements

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop) of the endless row of epochs; key = item + epoch * n.

        So what is keyed by it, such as an item's random numbers, is new in every epoch (of the largest n, in the first few).
        """
        n = self.n_elements
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):
            epoch, place = divmod(start + done, n)
            part = out[done : done + n - place]
            self._fill(epoch, place, part)
            part += epoch % max(permutation.MAX_N // n, 1) * n
            done += len(part)
        return out

    def item(self, key: int) -> Any:
        """What a key stands for."""
        return key % self.n_elements

    def name(self, key: int) -> str:
        """What a key stands for, for people."""
        epoch, item = divmod(key, self.n_elements)
        return f"item {item} of epoch {epoch}"

    num_counters = 0  # a resume needs nothing besides the position

    def counters_at(self, position: int) -> list[int]:
        """None."""
        return []

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Refuses any."""
        if counters:
            raise StateMismatch(f"a {type(self).__name__} has no counters; the state has {counters!r:.200}")

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        """Writes the items from that place of an epoch on."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """Which order this is; a state saved under another is refused."""
        return f"{type(self).__name__}({self.n_elements}, seed={self.seed}, repeating={self.repeating})"


@dataclass(frozen=True)
class Range(Source):
    """The integers 0 to n_elements - 1 in their order, epoch after epoch.

    Args:
        n_elements: how many items, at least 1.
        repeating: whether another epoch follows each. False: the pipeline ends with its epoch.
        seed: 0 to 2**64 - 1; of what `shmload.sample_rng()` and the global generators draw for each item.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        out[:] = np.arange(place, place + len(out))


@dataclass(frozen=True)
class Permutation(Source):
    """The integers 0 to n_elements - 1 in a random order, another in every epoch, each once in every epoch.

    All n_elements are permuted, whatever their number, in memory that does not grow with it: `shmload.Permutation` says how.

    Args:
        n_elements: how many items, at least 1.
        repeating: whether another epoch follows each. False: the pipeline ends with its epoch.
        seed: 0 to 2**64 - 1; of the order, and of what `shmload.sample_rng()` and the global generators draw for each item.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    @cached_property
    def _orders(self) -> EpochCache[permutation.Permutation]:
        return EpochCache()

    def _fill(self, epoch: int, place: int, out: NDArray[np.int64]) -> None:
        self._orders.get(self.seed, epoch, self._order).fill(place, out)

    def _order(self, seed: int, epoch: int) -> permutation.Permutation:
        return permutation.Permutation(self.n_elements, seed=seed, epoch=epoch)


@dataclass(frozen=True)
class Partition:
    """Each rank's own part of the items: disjoint, and together all of them.

    Ranks take turns, batch by batch behind a Collate and item by item without one, so that all have come equally far after equal
    steps. It may stand anywhere before Collate: what a rank does not deliver it does not load.

    Args:
        rank: of this process, from 0.
        n_ranks: how many processes share the items.
        uneven: what the last step of a pipeline that does not repeat does with less than a whole round: "pad" gives ranks without
            one of their own something from the epoch's start (`valid` says how many rows are real), "drop" leaves the rest out,
            "exact" lets the first ranks have more. A repeating pipeline has no last step.
    Raises:
        ValueError: `rank` is no rank of `n_ranks`, or `uneven` none of these words.
    """

    rank: int
    n_ranks: int
    _: KW_ONLY
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        _set_whole(self, "Partition(n_ranks)", "n_ranks", 1, 1 << 31)
        _set_whole(self, "Partition(rank)", "rank", 0, self.n_ranks - 1)
        if self.uneven not in ("pad", "drop", "exact"):
            raise ValueError(f'Partition(uneven) is "pad", "drop" or "exact"; got {self.uneven!r}')


@dataclass(frozen=True)
class Map:
    """A function of each item; behind Collate, of each batch, in the trainer.

    Before Collate it runs where items are loaded: in the workers of a DistributedBatchedMap, wherever in the pipeline that
    stands, or in the trainer if there is none.

    Args:
        fn: item -> item, or batch -> batch.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _check_function("Map(fn)", self.fn)


@dataclass(frozen=True)
class DistributedBatchedMap:
    """A function of each item, run by worker processes ahead of need, in order.

    Args:
        mapping_fn: item -> value. What it draws at random is the item's own: from `shmload.sample_rng()`, or from the global
            generators of random, numpy and torch, which are seeded for each item. An object with `schema` and `read_into(item,
            out)` instead decodes straight into the batch, if it is the last before Collate (docs/own_format.md).
        n_workers: processes, for this rank. Several of these stages share one worker pool of all their processes.
        buffer_size: items loaded ahead; two batches of each worker always are. None: just these.
        timeout: seconds one item may take; then its worker is ended, and the error says where it was. None: for ever.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    mapping_fn: Any
    n_workers: int
    buffer_size: int | None = None
    timeout: float | None = 60 * 60

    def __post_init__(self) -> None:
        if not hasattr(self.mapping_fn, "read_into"):
            _check_function("DistributedBatchedMap(mapping_fn)", self.mapping_fn)
        _set_whole(self, "DistributedBatchedMap(n_workers)", "n_workers", 1, 16000)
        if self.buffer_size is not None:
            _set_whole(self, "DistributedBatchedMap(buffer_size)", "buffer_size", 1, 1 << 31)
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and 0 < self.timeout < math.inf):
            raise ValueError(
                f"DistributedBatchedMap(timeout) is a number of seconds above 0 or None; got {self.timeout!r}"
            )


@dataclass(frozen=True)
class Collate:
    """So many items as one batch: arrays and numbers stacked as tensors, in the slot, strings and what cannot be stacked as lists.

    Args:
        batch_size: items of one rank's batch.
        return_partial_batch: False leaves out a last batch that is shorter. A repeating pipeline has none: its batches go on
            across the ends of epochs.
        ragged: how fields come whose shapes differ from item to item: "list", "pad", "jagged", "nested", or by field
            (docs/samples.md).
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    batch_size: int
    return_partial_batch: bool = True
    _: KW_ONLY
    ragged: Any = "list"

    def __post_init__(self) -> None:
        _set_whole(self, "Collate(batch_size)", "batch_size", 1, 1 << 31)
        if not isinstance(self.return_partial_batch, bool):
            raise TypeError(f"Collate(return_partial_batch) is True or False; got {self.return_partial_batch!r}")


def _set_whole(stage: Any, what: str, field: str, least: int, most: int) -> None:
    """Checks a whole number, and makes it Python's own: it comes into states, which are JSON."""
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{what} is a whole number from {least} to {most}; got {value!r}")
    object.__setattr__(stage, field, int(value))


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} is a function of one item; got {value!r}")
