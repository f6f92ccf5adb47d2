"""One pass over a loader's sampler, which can be saved and resumed.

A position in the sequence of one of torch's samplers is the generators' states before the pass and the number of batches taken. A
sampler that implements the Stateful contract (`state_dict`, `load_state_dict`, on itself or on its iterator) is asked for its own
state instead.
"""

from __future__ import annotations

import copy
import logging
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Generator
from torch.utils.data.sampler import BatchSampler

from shmload.introspect.abilities import is_stateful
from shmload.modes.draw_origin import Origin, origin_of, replayed, torch_origin
from shmload.modes.sampler_start import SamplerStart
from shmload.modes.torch_samplers import batches_of, innermost, is_endless, is_torchs_own, own_generator

log = logging.getLogger("shmload")

SamplerState = dict[str, Any]


def own_keys(keys: Any) -> Any:
    """Return what a sampler has yielded for a batch in a form that stays: an iterator as a list, and lists and arrays as copies.

    A sampler may use one list for all its batches, and batches are taken ahead.
    """
    if type(keys) is list:
        return keys[:]
    if isinstance(keys, list | np.ndarray):
        return copy.copy(keys)
    if isinstance(keys, torch.Tensor):
        return keys.clone()
    return list(keys) if hasattr(keys, "__next__") else keys


def _digest(digest: int | None, keys: Any) -> int | None:
    """Return the CRC-32 of the keys of all batches so far, given that of the earlier ones.

    Return None if keys are neither integers nor texts: others may have no form that is the same in another process.
    """
    if digest is None:
        return None
    try:
        if isinstance(keys, np.ndarray | torch.Tensor):
            data = np.asarray(keys, np.int64).tobytes()
        elif isinstance(keys, str):
            data = keys.encode()
        elif isinstance(keys, list | tuple):
            data = "\0".join(keys).encode() if keys and isinstance(keys[0], str) else array("q", keys).tobytes()
        else:
            data = array("q", [keys]).tobytes()
    except (TypeError, ValueError, OverflowError):
        return None
    return zlib.crc32(data, digest)


def _taken(batches: Iterator[Any], count: int) -> list[Any]:
    return [own_keys(keys) for keys in islice(batches, count)]


class SamplerReader:
    """One pass over a loader's index sampler.

    Args:
        sampler: yields the keys of one batch.
        generator: the loader's own generator, if it has one.
        every: ask a stateful sampler for its state after every `every` batches, or, if 0, only when the pass begins.
        iterator: the sampler's iterator, just started as torch starts it.
        start: what the sampler was before that.
        seed_between: whether torch draws its workers' base seed after starting the iterator, not before.
        keeps_places: record the generators' states along with a stateful sampler's.
        auto_collation: whether the sampler yields batches of keys. If not, each thing that it yields is one key, even a list.

    Attributes:
        place: after a resume, the generators' states in the saved run; None if they are unknown.
        is_sliced: whether batches are slices of an array instead of the sampler's lists.
        num_taken: number of batches taken in this pass, including those of the saved run.
        own_at_end: the state of the sampler and its iterator at the end of the pass; None before that, or if neither has a state.
    """

    def __init__(
        self,
        sampler: Any,
        generator: Generator | None,
        *,
        every: int,
        iterator: Iterator[Any],
        start: SamplerStart,
        seed_between: bool,
        auto_collation: bool,
        keeps_places: bool = False,
    ) -> None:
        self._sampler, self._generator, self._every, self._auto_collation = sampler, generator, every, auto_collation
        self._own_generator = own_generator(sampler, generator)
        self._start, self._origin, self._epoch = start, start.origin, start.epoch
        self._is_seed_between, self._keeps_places = seed_between, keeps_places
        self._origin_texts: dict[str, str] | None = None
        self.place: Origin | None = None
        self._num_drawn = 0
        faster = self._faster(0)
        self._iterator: Any = faster or iterator
        self.is_sliced = faster is not None and type(sampler) is BatchSampler and is_torchs_own(sampler)
        self._ended: SamplerState | None = None  # the state of a stateful iterator that has ended
        self.num_taken = 0
        self._taken_early: list[Any] = []
        # (batches taken, digest of their keys) of a sampler whose passes can only be read again; empty for torch's own
        self._digests: deque[tuple[int, int | None]] = deque([] if is_torchs_own(sampler) else [(0, 0)])
        self._begin()

    def _begin(self, own: SamplerState | None = None) -> None:
        """Begin to record states; `own` is the sampler's present state, if it is known.

        A sampler that was just given a state may return an older one until its next batch is taken.
        """
        self._is_stateful = is_stateful(self._sampler) or is_stateful(self._iterator) or self._ended is not None
        # (batches taken, the sampler's own state, the generators')
        self._states: deque[tuple[int, Any, Origin | None]] = deque()
        self.own_at_end: SamplerState | None = None
        self._note_state(own)

    def _faster(self, num_skipped: int) -> Iterator[Any] | None:
        """Return an iterator over the same batches that can seek or has a state, or None to use torch's own."""
        sampler = self._sampler
        if type(sampler) is BatchSampler and not is_torchs_own(sampler):
            batches = _Batches(sampler)
            return batches if batches.is_stateful else iter(batches)
        if type(sampler) is BatchSampler and not self._auto_collation:
            return None  # the dataset is passed the sampler's lists as they are
        return batches_of(sampler, num_skipped)

    def resume(self, state: SamplerState, num_early: int = 1) -> None:
        """Continue where an earlier pass returned its state.

        Args:
            state: a result of `state`.
            num_early: number of batches to take while the generators are set to the saved run's states. A sampler that draws when
                its first batch is taken must draw then, unless the program has restored its generators itself.
        """
        self.num_taken = state["taken"]
        own = state.get("own")
        if own is None:
            self._start.undo()
        sampler = innermost(self._sampler)
        if "epoch" in state and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["epoch"])
            self._epoch = state["epoch"]
        if own is not None:
            if "origin" in state:
                self.place = self._go_to(Origin.loads(state["origin"]))
            self._load(copy.deepcopy(own))
            if self.num_taken == 0:
                self._take_early()
            elif self.num_taken == length_hint(self._sampler, -1) and list(islice(self._iterator, 1)):
                self._load(own)  # the sampler has already begun its next pass: return to this one's end
                self._iterator, self._ended = iter(()), own
        elif "origin" in state:
            self._origin, self._origin_texts = Origin.loads(state["origin"]), None
            if is_endless(self._sampler):
                self.place = self._go_to(self._origin)
            else:
                self._is_seed_between = state["seed_between"]
                with replayed(self._origin, self._generator, self._own_generator):
                    self._replay(num_early, state.get("digest"))
                    self.place = origin_of(None)
        self._begin(own)

    def _go_to(self, place: Origin) -> Origin:
        if self._generator is not None and place.own is not None:
            self._generator.set_state(place.own)
        return place

    def _load(self, own: SamplerState) -> None:
        if own["sampler"] is not None:
            self._sampler.load_state_dict(own["sampler"])
        self._iterator = self._faster(0) or iter(self._sampler)
        if own["iterator"] is not None:
            self._iterator.load_state_dict(own["iterator"])

    def take_first(self) -> None:
        """Take the first batch now, so that a sampler which draws for it uses the generators as they are now."""
        self._iterator = chain(_taken(self._iterator, 1), self._iterator)

    def start_after(self, state: SamplerState) -> None:
        """Begin the pass after the one that gave this state at its end."""
        if "own" not in state:
            return
        self._load(copy.deepcopy(state["own"]))
        self.num_taken = 0
        self._take_early()
        self._begin(state["own"])

    def _take_early(self) -> None:
        """Take the first batch of a pass from a sampler whose state may be that at the end of the pass before it.

        Some samplers then begin the next pass by themselves; others return an empty iterator first.
        """
        self._taken_early = _taken(self._iterator, 1)
        if not self._taken_early:
            self._iterator = self._faster(0) or iter(self._sampler)

    @property
    def num_ahead(self) -> int:
        """Return the number of batches that the sampler has been asked for so far."""
        return max(self.num_taken, self._num_drawn)

    def _replay(self, num_early: int, expected: int | None) -> None:
        """Read the pass again up to the position; `expected` is the digest of the saved run's keys, if it is known."""
        iterator = iter(self._sampler)
        if self._is_seed_between:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        faster = self._faster(self.num_taken)
        if faster is not None and is_torchs_own(self._sampler):
            iterator, num_early = (
                faster,
                max(num_early, int(self.num_taken > 0)),
            )  # a permutation is drawn whole with its first batch
        else:
            iterator = faster or iterator
            self._skip(iterator, expected)
        self._num_drawn = self.num_taken + num_early
        self._iterator = chain(_taken(iterator, num_early), iterator)

    def _skip(self, iterator: Iterator[Any], expected: int | None) -> None:
        """Take the batches of the saved run, and warn if they are others."""
        digest: int | None = 0
        for keys in islice(iterator, self.num_taken):
            digest = _digest(digest, keys) if self._digests else None
        if self._digests:
            self._digests = deque([(self.num_taken, digest)])
        if None not in (expected, digest) and expected != digest:
            log.warning(
                "%s has not begun with the batches of the saved run, so samples may be lost or read twice. Give it state_dict and "
                "load_state_dict, or let it draw from a torch.Generator in its attribute `generator`",
                type(innermost(self._sampler)).__name__,
            )

    def batches(self) -> Iterator[Any]:
        """Return an iterator over the remaining batches: the reader, which counts them, unless the sampler is torch's own."""
        return self if self._is_stateful or self._taken_early or not is_torchs_own(self._sampler) else self._iterator

    def __iter__(self) -> SamplerReader:
        return self

    def __next__(self) -> Any:
        try:
            keys = self._taken_early.pop() if self._taken_early else next(self._iterator)
        except StopIteration:
            self.own_at_end = self._own()
            raise
        self.num_taken += 1
        if self.is_sliced:
            return keys
        keys = own_keys(keys)
        if self._is_stateful:
            self._note_state()
        elif self._digests:
            self._digests.append((self.num_taken, _digest(self._digests[-1][1], keys)))
        return keys

    def _note_state(self, own: SamplerState | None = None) -> None:
        if self._is_stateful and (not self._states or (self._every and self.num_taken % self._every == 0)):
            place = torch_origin(self._generator) if self._keeps_places else None
            self._states.append((self.num_taken, own or self._own(), place))

    def _own(self) -> SamplerState | None:
        """Return the present state of the sampler and of its iterator."""
        if not self._is_stateful:
            return None
        sampler = self._sampler.state_dict() if is_stateful(self._sampler) else None
        if self._ended is not None:
            iterator = self._ended["iterator"]
        else:
            iterator = self._iterator.state_dict() if is_stateful(self._iterator) else None
        return copy.deepcopy({"sampler": sampler, "iterator": iterator})

    def forget(self, num_delivered: int) -> None:
        """Drop the states from before `num_delivered` batches were taken."""
        while len(self._states) > 1 and self._states[1][0] <= num_delivered:
            self._states.popleft()
        while len(self._digests) > 1 and self._digests[1][0] <= num_delivered:
            self._digests.popleft()

    def state(self, num_delivered: int) -> SamplerState:
        """Return the state after `num_delivered` batches were taken, or the last one before that; drop older ones."""
        state: SamplerState = {"taken": num_delivered}
        if self._epoch is not None:
            state["epoch"] = self._epoch
        if self._is_stateful:
            self.forget(num_delivered)
            state["taken"], own, place = self._states[0]
            state["own"] = copy.deepcopy(own)
            if place is not None:
                state["origin"] = place.dumps(is_torch_enough=True)
            return state
        if self._origin_texts is None:
            self._origin_texts = self._origin.dumps(is_torchs_own(self._sampler))
        state["origin"] = self._origin_texts
        if not is_endless(self._sampler):
            state["seed_between"] = self._is_seed_between
        digest = next((digest for taken, digest in self._digests if taken == num_delivered), None)
        return state if digest is None else {**state, "digest": digest}


def own_state(index_sampler: Any) -> SamplerState | None:
    """Return a stateful sampler's state between two passes; None if the sampler has no state."""
    if is_stateful(index_sampler):
        return {"sampler": copy.deepcopy(index_sampler.state_dict()), "iterator": None}
    inner = innermost(index_sampler)
    if type(index_sampler) is BatchSampler and is_stateful(inner):
        return {"sampler": None, "iterator": {"sampler": copy.deepcopy(inner.state_dict()), "iterator": None}}
    return None


def state_before(index_sampler: Any, origin: Origin, own: SamplerState | None = None) -> SamplerState:
    """Return the state before a pass over a sampler.

    Args:
        index_sampler: the loader's index sampler.
        origin: the generators' states from which the pass would draw.
        own: the state that a stateful sampler had at the end of the previous pass.
    """
    state: SamplerState = {"taken": 0, "origin": origin.dumps(is_torchs_own(index_sampler))}
    if not is_endless(index_sampler):
        state["seed_between"] = False
    if own is None:
        own = own_state(index_sampler)
    return state if own is None else {**state, "own": own}


class _Batches:
    """torch's BatchSampler over a user's sampler that may have a state, or whose iterator may."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches
        self._iterator: Any = iter(batches.sampler)

    @property
    def is_stateful(self) -> bool:
        """Return whether the sampler or its iterator has a state."""
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
        """Return the states of the sampler and of its iterator; None for one that has no state."""
        parts: dict[str, Any] = {"sampler": self._batches.sampler, "iterator": self._iterator}
        return {name: part.state_dict() if is_stateful(part) else None for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        sampler: Any = self._batches.sampler
        if state["sampler"] is not None:
            sampler.load_state_dict(state["sampler"])
        self._iterator = iter(sampler)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])
