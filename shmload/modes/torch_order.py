"""Torch mode's order: the batches of the user's sampler, and how to come to any of them again.

torch's own samplers in torch's own BatchSampler are read as arrays: indices of Python int cost more than the whole rest of a
batch of tiny rows. A random order is drawn whole, by the same calls at the same moments as torch draws it, so global generators
and `generator` stand as after torch, the one more permutation that RandomSampler draws when it is exhausted included. One that is
no more than counting is never made whole, and any place of it is come to at once.

A position in such an order is: where the generators stood when it was begun, and how many batches were taken. A sampler that
keeps the Stateful contract (`state_dict`, `load_state_dict`, on itself or on its iterator) is asked for its own state instead.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from shmload.worker.generators import Origin, randperm, replayed
from shmload.worker.snapshot import is_stateful

SamplerState = dict[str, Any]
range_iterator = type(iter(range(0)))


class SamplerReader:
    """One pass over a loader's index sampler.

    Args:
        index_sampler: yields what one batch is made of.
        generator: the loader's own, if it was given one.
        every: a stateful sampler is asked for its state at every so many batches; 0: only at the pass's start.
        iterator: of the sampler, just begun as torch begins it.
        origin: where the generators stood before that.
        is_seed_between: whether torch draws its workers' base seed after beginning the iterator, not before.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        *,
        every: int,
        iterator: Iterator[Any],
        origin: Origin,
        is_seed_between: bool,
    ) -> None:
        self._sampler = index_sampler
        self._generator = generator
        self._every = every
        self._origin = origin
        self._is_seed_between = is_seed_between
        self._iterator: Any = self._faster(0) or iterator
        self.is_sliced = isinstance(self._iterator, _Slices)  # batches are arrays of ours, not what the sampler gives
        self.num_taken = 0
        self._taken_early: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._epoch = getattr(_innermost(self._sampler), "epoch", None)
        self._is_stateful = is_stateful(self._sampler) or is_stateful(self._iterator)
        self._states: deque[tuple[int, Any]] = deque()  # (batches taken, the sampler's own state)
        self._own_at_end: SamplerState | None = None
        self._note_state()

    def _faster(self, num_skipped: int) -> Iterator[Any] | None:
        """The same batches from an iterator that can seek, or tell its state; None: torch's own serves."""
        sampler = self._sampler
        if type(sampler) is BatchSampler and not is_torchs_own(sampler):
            batches = _Batches(sampler)
            return batches if batches.is_stateful else iter(batches)
        return batches_of(sampler, num_skipped)

    def resume(self, state: SamplerState) -> None:
        """Goes to where an earlier pass told its state."""
        self.num_taken = state["taken"]
        sampler = _innermost(self._sampler)
        if "epoch" in state and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["epoch"])
        own = state.get("own")
        if own is not None:
            self._load(own)
            if self.num_taken == _length_of(self._sampler) and list(islice(self._iterator, 1)):
                self._load(own)  # a sampler that begins its next pass by itself is put back to this one's end
                self._iterator = _Ended(own)
        elif not is_endless(self._sampler):
            self._origin = Origin.loads(state["origin"])
            self._is_seed_between = state["seed_between"]
            with replayed(self._origin, self._generator):
                self._replay()
        self._begin()

    def _load(self, own: SamplerState) -> None:
        if own["sampler"] is not None:
            self._sampler.load_state_dict(own["sampler"])
        self._iterator = self._faster(0) or iter(self._sampler)
        if own["iterator"] is not None:
            self._iterator.load_state_dict(own["iterator"])

    def start_after(self, state: SamplerState) -> None:
        """Begins the pass after one that has told this at its end."""
        if "own" not in state:
            # one that draws at its first index must do so now, while the generators stand where they are to
            self._iterator = chain(list(islice(self._iterator, 1)), self._iterator)
            return
        self._load(state["own"])
        self.num_taken = 0
        self._begin()
        self._taken_early = list(islice(self._iterator, 1))  # the sampler begins its next pass by itself
        if not self._taken_early:
            self._iterator = self._faster(0) or iter(self._sampler)
            self._begin()

    def _replay(self) -> None:
        iterator = iter(self._sampler)
        if self._is_seed_between:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        faster = self._faster(self.num_taken)
        if isinstance(faster, _Slices | range_iterator):
            iterator = faster
        else:
            iterator = faster or iterator
            next(islice(iterator, self.num_taken, self.num_taken), None)
        # as in start_after
        self._iterator = chain(list(islice(iterator, 1)), iterator)

    def batches(self) -> Iterator[Any]:
        """The batches from here on; a stateful sampler's must be taken from the reader itself, which counts them."""
        return self if self._is_stateful or self._taken_early else self._iterator

    def __iter__(self) -> SamplerReader:
        return self

    def __next__(self) -> Any:
        try:
            keys = self._taken_early.pop() if self._taken_early else next(self._iterator)
        except StopIteration:
            self._own_at_end = self._own()
            raise
        self.num_taken += 1
        if self._is_stateful:
            self._note_state()
        return keys

    def _note_state(self) -> None:
        if not self._is_stateful:
            return
        if not self._states or (self._every and self.num_taken % self._every == 0):
            self._states.append((self.num_taken, self._own()))

    def _own(self) -> SamplerState | None:
        """What the sampler and its iterator tell of themselves now."""
        if not self._is_stateful:
            return None
        sampler = self._sampler.state_dict() if is_stateful(self._sampler) else None
        iterator = self._iterator.state_dict() if is_stateful(self._iterator) else None
        return copy.deepcopy({"sampler": sampler, "iterator": iterator})

    def own_at_end(self) -> SamplerState | None:
        """What they told when the pass was at its end, however seldom they are asked on the way; None if they tell nothing."""
        return copy.deepcopy(self._own_at_end)

    def state(self, num_delivered: int) -> SamplerState:
        """Where the pass stood when so many batches had been taken, or at the last state before; what is older is forgotten."""
        state: SamplerState = {"taken": num_delivered}
        if self._epoch is not None:
            state["epoch"] = self._epoch
        if self._is_stateful:
            while len(self._states) > 1 and self._states[1][0] <= num_delivered:
                self._states.popleft()
            state["taken"], own = self._states[0]
            state["own"] = copy.deepcopy(own)
        elif not is_endless(self._sampler):
            state["origin"] = self._origin.dumps(is_torchs_own(self._sampler))
            state["seed_between"] = self._is_seed_between
        return state


def own_state(index_sampler: Any) -> SamplerState | None:
    """What a stateful sampler tells of itself between two passes; None if it is none."""
    if is_stateful(index_sampler):
        return {"sampler": copy.deepcopy(index_sampler.state_dict()), "iterator": None}
    inner = _innermost(index_sampler)
    if type(index_sampler) is BatchSampler and is_stateful(inner):
        return {"sampler": None, "iterator": {"sampler": copy.deepcopy(inner.state_dict()), "iterator": None}}
    return None


def _innermost(index_sampler: Any) -> Any:
    return getattr(index_sampler, "sampler", index_sampler)


def _length_of(index_sampler: Any) -> int:
    try:
        return len(index_sampler)
    except TypeError:
        return -1


def is_endless(index_sampler: Any) -> bool:
    """Whether it is what torch puts in the place of a sampler for an iterable dataset."""
    return isinstance(_innermost(index_sampler), _InfiniteConstantSampler)


def is_torchs_own(index_sampler: Any) -> bool:
    """Whether the order depends on torch's generators alone."""
    kinds = (type(index_sampler), type(_innermost(index_sampler)))
    return all(kind.__module__.startswith("torch.utils.data") for kind in kinds)


class _Ended:
    """A stateful iterator at its end."""

    def __init__(self, own: SamplerState) -> None:
        self._own = own

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def state_dict(self) -> Any:
        """As it was."""
        return self._own["iterator"]

    def load_state_dict(self, state: Any) -> None:
        """Never asked for: it is at its end for good."""


class _Batches:
    """torch's BatchSampler over a sampler of the user's, which may have a state, or its iterator may."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches
        self._iterator: Any = iter(batches.sampler)

    @property
    def is_stateful(self) -> bool:
        """Whether one of the two has."""
        return is_stateful(self._batches.sampler) or is_stateful(self._iterator)

    def __iter__(self) -> Iterator[list[Any]]:
        while batch := next(self, None):
            yield batch

    def __next__(self) -> list[Any]:
        batch = list(islice(self._iterator, self._batches.batch_size))
        if not batch or (self._batches.drop_last and len(batch) < self._batches.batch_size):
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state and its iterator's; None for one that has none."""
        parts: dict[str, Any] = {"sampler": self._batches.sampler, "iterator": self._iterator}
        return {name: part.state_dict() if is_stateful(part) else None for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        sampler: Any = self._batches.sampler
        if state["sampler"] is not None:
            sampler.load_state_dict(state["sampler"])
        self._iterator = iter(sampler)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])


class _Slices:
    """The batches of an order that is drawn when the first is asked for, as torch's samplers draw it."""

    def __init__(self, batch_sampler: BatchSampler, random: RandomSampler | None, num_skipped: int) -> None:
        self._slices = _slices(batch_sampler, random, num_skipped)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self._slices

    def __next__(self) -> NDArray[np.int64]:
        return next(self._slices)


def batches_of(index_sampler: Any, num_skipped: int = 0) -> Iterator[Any] | None:
    """What the sampler yields, without the first few, if it is one of torch's own; batches as arrays. Else None."""
    if type(index_sampler) is SequentialSampler:  # samples come one by one
        return iter(range(len(index_sampler))[num_skipped:])
    if type(index_sampler) is not BatchSampler:
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        return _Slices(index_sampler, None, num_skipped)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _Slices(index_sampler, sampler, num_skipped)
    return None


def _slices(batch_sampler: BatchSampler, random: RandomSampler | None, num_skipped: int) -> Iterator[NDArray[np.int64]]:
    n, batch_size = len(batch_sampler.sampler), batch_sampler.batch_size  # type: ignore[arg-type]  # both have a length
    generator, order = None, None
    if random is not None:
        generator = random.generator
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            generator.manual_seed(seed)
        order = randperm(n, generator).numpy()

    def indices(first: int, end: int) -> NDArray[np.int64]:
        return np.arange(first, end) if order is None else order[first:end]

    for first in range(num_skipped * batch_size, n - batch_size + 1, batch_size):
        yield indices(first, first + batch_size)
    if random is not None and random.generator is not None:
        # torch's sampler draws an order it then takes nothing of, which moves the user's
        randperm(n, generator)
    rest = n % batch_size
    if rest and not batch_sampler.drop_last and num_skipped * batch_size < n:
        yield indices(n - rest, n)
