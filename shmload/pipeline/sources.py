"""Sources: Range, Permutation, Items, Generate and Stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmload.introspect.abilities import package_ability
from shmload.pipeline.item_sequence import SEED, ItemSequence, PositionSequence
from shmload.pipeline.methods import Fluent
from shmload.pipeline.stage_names import argument_text
from shmload.pipeline.stream_sequence import StreamItems
from shmload.schedule import permutation
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.permutation import MAX_N
from shmload.worker.stage_arguments import MAX_WORKERS, check_flag, set_whole
from shmload.worker.stage_engine import with_note


@dataclass(frozen=True)
class Source(Fluent, ItemSequence):
    """A source of integers, each of which occurs once in every epoch."""

    n_elements: int
    _: KW_ONLY
    repeating: bool = True
    seed: int = SEED

    def __post_init__(self) -> None:
        name = type(self).__name__
        set_whole(self, f"{name}(n_elements)", "n_elements", 1, permutation.MAX_N)
        set_whole(self, f"{name}(seed)", "seed", 0, MAX_UINT64)
        check_flag(f"{name}(repeating)", self.repeating)
        identity = f"{name}({self.n_elements}, seed={self.seed}, repeating={self.repeating})"
        self.__dict__.update(n=self.n_elements, members=self.n_elements, identity=identity)

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the keys at positions [start, stop); key = item + epoch * n.

        So random numbers, which are keyed by the key, are new in every epoch; they recur after MAX_N // n epochs.
        """
        n = self.n_elements
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):
            epoch, first = divmod(start + done, n)
            part = out[done : done + n - first]
            self._fill(epoch, first, part)
            part += epoch % max(permutation.MAX_N // n, 1) * n
            done += len(part)
        return out

    def _fill(self, epoch: int, first: int, out: NDArray[np.int64]) -> None:
        """Write the items of an epoch, beginning at a position."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Source):
    """The integers 0 to n_elements - 1 in order, epoch after epoch.

    Args:
        n_elements: number of items, at least 1.
        repeating: whether epochs follow each other without end; if False, each pass is one epoch.
        seed: seed of the items' random numbers from `shmload.sample_rng()` and the global generators, 0 to 2**64 - 1.
    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    is_fixed = True

    def _fill(self, epoch: int, first: int, out: NDArray[np.int64]) -> None:
        out[:] = np.arange(first, first + len(out))

    def key(self, position: int) -> int:
        return position


@dataclass(frozen=True)
class Permutation(Source):
    """The integers 0 to n_elements - 1 in a random order, a new one in every epoch; each occurs once.

    All of them are permuted, in constant memory: see `shmload.Permutation`.

    Args:
        n_elements: number of items, at least 1.
        repeating: whether epochs follow each other without end; if False, each pass is one epoch.
        seed: seed of the order, and of the items' random numbers from `shmload.sample_rng()` and the global generators, 0 to
            2**64 - 1.
    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def _fill(self, epoch: int, first: int, out: NDArray[np.int64]) -> None:
        self._orders.get(self.seed, epoch, self._order).fill(first, out)

    @cached_property
    def _orders(self) -> EpochCache[permutation.Permutation]:
        return EpochCache()  # one per source, because a Join may have many members

    def _order(self, seed: int, epoch: int) -> permutation.Permutation:
        return permutation.Permutation(self.n_elements, seed=seed, epoch=epoch)


class Items(Fluent, PositionSequence):
    """The items of a sequence or dataset, in order. It must have a length and be indexable.

    Args:
        items: a list, an array, a dataset of torch or `shmload.formats`, or a `RemoteDataset`, which keeps its own order of
            each epoch. Each worker reads its own copy.
        repeating: whether epochs follow each other without end.
        seed: seed of the items' random numbers from `shmload.sample_rng()` and the global generators, 0 to 2**64 - 1.
        n_workers: number of worker processes that it requests, in addition to those of DistributedBatchedMap.
    Raises:
        ValueError, TypeError: it is empty, or cannot be indexed.
    """

    def __init__(self, items: Any, *, repeating: bool = False, seed: int = SEED, n_workers: int = 0) -> None:
        name = type(items).__name__
        keyed_items = package_ability(items, "keyed_items")
        self.is_keyed = keyed_items is not None  # its items are read by (position, epoch)
        items = items if keyed_items is None else keyed_items()
        try:
            n = len(items) if hasattr(items, "__getitem__") and not hasattr(items, "keys") else None
        except TypeError:  # raised by an array without dimensions, or a class
            n = None
        if n is None:
            raise TypeError(
                f"Items needs something with a length that is indexed by 0, 1, ...; got {name}. For an iterable use Stream"
            )
        if not n:
            raise ValueError(f"Items: a pipeline needs at least one item; this {name} has none")
        check_flag("Items(repeating)", repeating)
        self.items, self.n_workers = items, n_workers
        self.is_fixed = not (self.is_keyed and items.order.shuffle)
        order = package_ability(items, "order_identity")
        made_of = f"Items({name} of {n}, seed={seed}, repeating={repeating}{f', {order}' * (order is not None)})"
        super().__init__(n, made_of, repeating=repeating, seed=seed)
        set_whole(self, "Items(seed)", "seed", 0, MAX_UINT64)
        set_whole(self, "Items(n_workers)", "n_workers", 0, MAX_WORKERS)

    @property
    def label(self) -> str:
        """Return the display name of the source, with its arguments."""
        return f"Items({type(self.items).__name__} of {self.n})"

    @property
    def dataset(self) -> Any:
        return None if self.is_keyed else self.items

    @property
    def held(self) -> Sequence[tuple[str, Any]]:
        return [(self.identity, self.items)]

    def item(self, key: int) -> Any:
        if self.is_keyed:
            epoch, index = divmod(key, self.n)
            return self.items.item(index, epoch)
        return self.items[key % self.n]


class Generate(Fluent, PositionSequence):
    """Items that a function draws or computes for each position.

    Args:
        fn: position -> item; positions continue across epochs. Random numbers from `shmload.sample_rng()` are keyed by the item.
        n_elements: number of items of an epoch, at least 1.
        repeating: whether epochs follow each other without end.
        seed: seed of the items' random numbers from `shmload.sample_rng()` and the global generators, 0 to 2**64 - 1.
    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def __init__(self, fn: Callable[[int], Any], n_elements: int, *, repeating: bool = False, seed: int = SEED) -> None:
        if not callable(fn):
            raise TypeError(f"Generate(fn) must be a function of a position; got {fn!r}")
        self.fn, self.n_elements = fn, n_elements
        set_whole(self, "Generate(n_elements)", "n_elements", 1, MAX_N)
        check_flag("Generate(repeating)", repeating)
        made_of = f"Generate({self.n_elements}, seed={seed}, repeating={repeating})"
        super().__init__(self.n_elements, made_of, repeating=repeating, seed=seed)
        set_whole(self, "Generate(seed)", "seed", 0, MAX_UINT64)

    def item(self, key: int) -> Any:
        try:
            return self.fn(key)
        except Exception as error:
            error = with_note(error, "Generate")
            raise error


@dataclass(frozen=True, eq=False)
class Stream(Fluent):
    """The items of an iterable, in its order, for data without a length or an index.

    The trainer of every rank reads all of it; workers run the stages. An epoch is one pass over it. It should deliver the same
    items in each pass, except for changes by `set_epoch(epoch)`, which is called before each pass if it exists. An error of the
    iterable is raised in place of its item and ends the epoch, as it ends a generator.

    Args:
        iterable: an iterable, which is iterated again for each epoch, or a function that returns an iterator. An iterator has only
            one epoch.
        resume: "state" resumes by the iterable's own state, which becomes part of the pipeline's, if the iterable or its iterator
            has `state_dict()` and `load_state_dict()`; "count" reads the earlier items again. Use "count" for an iterable whose own
            state is not exact, such as a shuffled dataset of Hugging Face, whose state lacks its buffer.
        seed: seed of the random numbers of a block of items, 0 to 2**64 - 1.
        n_workers: number of worker processes that it requests, in addition to those of DistributedBatchedMap.
    Raises:
        ValueError, TypeError: it is not iterable, or another argument is invalid.
    Example:
        >>> from shmload.pipeline import Stream
        >>> words = Stream(lambda: iter("a bc d".split()))
        >>> list(words.filter(lambda word: len(word) < 2).batch(2))
        [['a', 'd']]
    """

    iterable: Any
    _: KW_ONLY
    resume: Literal["state", "count"] = "state"
    seed: int = SEED
    n_workers: int = 0

    def __post_init__(self) -> None:
        if not (callable(self.iterable) or hasattr(self.iterable, "__iter__")):
            raise TypeError(
                f"Stream needs an iterable, or a function that makes an iterator; got {type(self.iterable).__name__}. For data "
                "with a length and an index use Items"
            )
        if self.resume not in ("state", "count"):
            raise ValueError(f'Stream(resume) is "state" or "count"; got {self.resume!r}')
        set_whole(self, "Stream(seed)", "seed", 0, MAX_UINT64)
        set_whole(self, "Stream(n_workers)", "n_workers", 0, MAX_WORKERS)

    @property
    def label(self) -> str:
        """Return the display name of the source, with its arguments."""
        return f"Stream({argument_text(self.iterable) if callable(self.iterable) else type(self.iterable).__name__})"

    def as_source(self) -> StreamItems:
        """Return its items for the plan of a pipeline."""
        return StreamItems(self.iterable, self.resume, self.seed, self.n_workers)
