"""The order of a pass in torch mode, its state, and how a pass is resumed.

torch's own samplers in torch's own BatchSampler are read as arrays, because indices that are Python ints cost more than the
rest of a batch of tiny rows. A random order is drawn whole, by the same calls at the same moments as in torch, so global
generators and `generator` end where torch leaves them; this includes the extra permutation that an exhausted RandomSampler
draws. A sequential order is never built, and any place in it is reached at once.

A place in such an order is the generators' states before it was begun and the number of batches taken. A sampler that
implements the Stateful contract (`state_dict`, `load_state_dict`, on itself or on its iterator) is asked for its own state
instead.

A state contains:

    {"version", "mode": "torch", "batch_size", "drop_last", "n",    which loader it belongs to
     "position", "is_finished",                                     batches delivered; whether the pass has ended
     "check",                                                       see schedule/state_checksum.py
     "details"}                                                     the rest, as one string (see schedule/state_codec.py):

     "snapshot", "num_workers", "last_worker", "base_seed", "shared_seed",  where a resumed loader starts reading
     "done", "beyond",                                              all orders before `done` are complete, and these after it
     "counts", "counted"                                            of an iterable dataset: complete orders by worker, now and then
     "ahead"                                                        batches that the sampler had been asked for
     "generators"                                                   checksums of the global generators (see continuation.py)
     "sampler": {...}, "workers": [...]                             see SamplerReader and worker/snapshot.py

A resumed loader restores workers and sampler to `snapshot` and reads the batches between that and now again without yielding them:
none with `snapshot_every_n_steps=1`. An order is complete when its batch was yielded, was lost to an error, or had no sample left.
The number of yielded batches is not a place, because some orders yield none and with in_order=False they come in another order.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from shmload.engine.config import LoaderConfig
from shmload.errors import StateMismatch
from shmload.schedule import state as states
from shmload.schedule import state_checksum
from shmload.schedule.state_checksum import CHECK, with_checksum
from shmload.schedule.state_codec import UsersOwn, opened, sealed
from shmload.shm import travel
from shmload.torch_names import InfiniteConstantSampler
from shmload.worker.iterable_pass import BeginsAgain
from shmload.worker.note import SAME, Note
from shmload.worker.snapshot import OWN_STATES, Snapshot, own_states
from shmload.worker.torch_side import Origin, origin_of, randperm, replayed, torch_origin
from shmload.world import is_stateful

log = logging.getLogger("shmload")

TORCH_STATE_VERSION = 2  # 2: `generators`, `ahead`, and what a pass through an iterable dataset is drawn from; 1 is still read

TorchState = dict[str, Any]
SamplerState = dict[str, Any]

OWN, SAMPLER, DATASET = "by a sampler's own state", "by a sampler", "by an iterable dataset"  # how a pass is resumed


_IDENTITY = ("version", "mode", "n", "batch_size", "drop_last")
_OUTSIDE = (*_IDENTITY, "position", "is_finished")
_LISTS = ("beyond", "workers", "counts", "counted")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("position", "snapshot", "done", "num_workers", "last_worker", "passes", "ahead"), (int,)),
    **dict.fromkeys(("base_seed", "shared_seed"), (int, type(None))),
    **dict.fromkeys(_LISTS, (list,)),
    "is_finished": (bool,),
    **dict.fromkeys(("sampler", "generators"), (dict,)),
}
_OPTIONAL = ("counts", "counted", "ahead", "generators")
_OF_SAMPLER = {"taken": int, "epoch": object, "own": dict, "origin": dict, "seed_between": bool}


def packed_state(state: TorchState) -> TorchState:
    """Return a state as it is given to the user."""
    sampler, workers = dict(state["sampler"]), [dict(s) for s in state["workers"]]
    for holder, name in [(sampler, "own"), *((s, name) for s in workers for name in OWN_STATES)]:
        if name in holder:
            holder[name] = UsersOwn(holder[name])
    inside = {name: value for name, value in state.items() if name not in _OUTSIDE}
    inside.update(sampler=sampler, workers=workers)
    return with_checksum({**{name: state[name] for name in _OUTSIDE}, "details": sealed(inside)})


class Done:
    """The complete orders of a pass: all before `first`, and those in `beyond`."""

    def __init__(self, first: int = 0, beyond: Iterable[int] = ()) -> None:
        self.first, self.beyond = first, set(beyond)

    def add(self, step: int) -> None:
        """Add an order."""
        if step != self.first:
            self.beyond.add(step)
            return
        self.first += 1
        while self.beyond and self.first in self.beyond:
            self.beyond.remove(self.first)
            self.first += 1

    def __contains__(self, step: int) -> bool:
        return step < self.first or step in self.beyond


class PassProgress:
    """The progress of one pass. The loader keeps it after the iterator is gone, because a loop that was left can be resumed.

    Args:
        sampler: the pass over its sampler.

    Attributes:
        fetcher: with num_workers=0, torch's own reader, which has the dataset and its iterator.
    """

    def __init__(self, config: LoaderConfig, sampler: SamplerReader, base_seed: int, shared_seed: int | None) -> None:
        self._every = config.snapshot_every
        self._num_workers = config.total_workers
        self._identity = identity(config)
        self._is_iterable = is_endless(config.index_sampler)
        self._goes_by_number = not self._is_iterable and not config.in_order and config.total_workers > 1
        # a snapshot is then taken when a state is asked for: batches read out of order are not read again up to a place
        self.is_always_current = self._every == 1 or self._goes_by_number
        self.sampler, self.base_seed, self._shared_seed = sampler, base_seed, shared_seed
        self._notes: list[bytes] = [SAME] * self._num_workers
        self._first_notes = list(self._notes)  # of the pass's beginning
        self._is_current = [True] * self._num_workers
        self.fetcher: Any = None
        self.last_worker = self._num_workers - 1  # the one whose batch was delivered last
        self.num_delivered = 0
        self.is_finished = False
        self.done = Done()
        self._counts = [0] * max(self._num_workers, 1)  # complete orders of each worker, without those that ended its iterator
        # (step, notes, last worker, counts, the sampler's state, which is made when it is asked for)
        self._snapshot: tuple[int, list[bytes], int, list[int], SamplerState | None]
        self._take_snapshot(sampler.state(0))

    def resumed(self, state: TorchState) -> None:
        """Continue from the snapshot of a state."""
        self.num_delivered = state["position"]
        self.done = Done(state["done" if self._goes_by_number else "snapshot"], state["beyond"])
        if state["num_workers"] == self._num_workers > 0:
            self._notes = [travel.dumps(s) if s else SAME for s in state["workers"]]
            if not has_own_states(state["workers"]):
                self._first_notes = list(self._notes)
            self.last_worker = state["last_worker"]
        if self._is_iterable:
            self._counts = list(state["counted"])
        self._take_snapshot(self.sampler.state(self.done.first))
        if self._is_iterable:
            self._counts = list(state["counts"])  # batches that are read again are not counted again

    def _take_snapshot(self, sampler: SamplerState | None = None) -> None:
        self._snapshot = (self.done.first, list(self._notes), self.last_worker, list(self._counts), sampler)

    def follows(self, last: PassProgress) -> None:
        """Take over the notes of workers that have made another pass before."""
        self._notes = [between_passes(note) for note in last._notes] if self._is_iterable else last._notes
        self._first_notes = list(self._notes)
        self._take_snapshot()

    def workers_at_end(self) -> list[Snapshot]:
        """Return the workers' snapshots between two passes, however rare snapshots are during a pass."""
        notes = [pickle.loads(note) if note else {} for note in self._notes] or [self._read_here()]
        return [after_pass(note) for note in notes]

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """Do not count the batches that are read meanwhile, because they were counted before."""
        num_delivered, counts = self.num_delivered, self._counts
        self._counts = list(counts)
        yield
        self.num_delivered, self._counts = num_delivered, counts

    @property
    def num_behind(self) -> int:
        """Number of complete orders that a record counts: of an iterable dataset, without those that ended an iterator."""
        return sum(self._counts) if self._is_iterable else self.done.first

    def noted(self, worker: int, note: Note | None) -> None:
        """Keep the note of a worker's newest batch."""
        self._is_current[worker] = note is not None
        if note is not None and note.snapshot != SAME:
            self._notes[worker] = note.snapshot

    def ended(self, step: int, worker: int) -> None:
        """Record an order as complete that did not end its worker's iterator."""
        self.done.add(step)
        self._counts[worker] += 1
        self.sampler.forget(self.done.first if self.is_always_current else self._snapshot[0])

    def delivered(self) -> None:
        """Take a snapshot if one is due after a batch was yielded. Need not be called if `is_always_current`."""
        if self._every and self.done.first - self._snapshot[0] >= self._every and all(self._is_current):
            self._take_snapshot()

    def state(self) -> TorchState:
        """Return the state now; later iteration does not change it."""
        if self.is_always_current or self._num_workers == 0:
            self._take_snapshot()
        step, notes, last_worker, counted, sampler = self._snapshot
        if sampler is None:
            sampler = self.sampler.state(step)
        state: TorchState = {
            **self._identity,
            "position": self.num_delivered,
            "is_finished": self.is_finished,
            "snapshot": step,
            "done": self.done.first,
            "beyond": sorted(self.done.beyond),
            "num_workers": self._num_workers,
            "last_worker": last_worker,
            "base_seed": self.base_seed,
            "shared_seed": self._shared_seed,
            "sampler": sampler,
        }
        if order_kind(sampler) == SAMPLER:
            state["ahead"] = self.sampler.num_ahead
        if self._is_iterable:
            state.update(counts=list(self._counts), counted=counted, last_worker=self.last_worker, beyond=[])
        state["workers"] = [pickle.loads(note) if note else {} for note in notes] or [self._read_here()]
        if self._is_iterable and notes and not has_own_states(state["workers"]):  # all of the pass is read again
            state["workers"] = [pickle.loads(note) if note else {} for note in self._first_notes]
        return state

    def _read_here(self) -> Snapshot:
        fetcher = self.fetcher
        iterator, has_ended = getattr(fetcher, "dataset_iter", None), getattr(fetcher, "ended", False)
        if isinstance(iterator, BeginsAgain):
            iterator = iterator.iterator
        snapshot = copy.deepcopy(own_states(fetcher.dataset, iterator, has_ended=has_ended))
        if self._is_iterable and self.sampler.num_taken == 0 and "dataset" in snapshot:
            snapshot["is_over"] = True  # the dataset may still have the state of the last pass's end
        return snapshot


def has_own_states(workers: list[Snapshot]) -> bool:
    """Return whether any worker's snapshot has a state of the user's objects."""
    return any(name in snapshot for snapshot in workers for name in OWN_STATES)


def after_pass(snapshot: Snapshot) -> Snapshot:
    """Return a worker's snapshot for the pass after the one that it was taken in."""
    after: Snapshot = {name: snapshot[name] for name in ("dataset", "streams", "last_iterator") if name in snapshot}
    if "iterator" in snapshot:
        after["last_iterator"] = snapshot["iterator"]
    return {**after, "is_over": True} if "dataset" in after else after


def between_passes(note: bytes) -> bytes:
    """Return a worker's pickled snapshot as `after_pass` makes it."""
    return travel.dumps(after_pass(pickle.loads(note))) if note else note


def identity(config: LoaderConfig) -> dict[str, Any]:
    """Return the fields that identify a loader's order."""
    return {
        "version": TORCH_STATE_VERSION,
        "mode": "torch",
        "n": config.num_samples,
        "batch_size": config.batch_size,
        "drop_last": bool(config.drop_last),
    }


def fresh_state(config: LoaderConfig, finished: PassProgress | None, origin: Origin) -> TorchState:
    """Return the state before a pass.

    Args:
        origin: the generators' states that the pass would be drawn from.
        finished: the last pass, if there was one: a stateful dataset continues from it if its workers do.
    """
    workers: list[Snapshot] = []
    base_seed = None  # it is drawn when the pass begins
    if finished is not None and (config.persistent_workers or not config.num_workers):
        workers = finished.workers_at_end()
        if config.num_workers and not isinstance(config.dataset, IterDataPipe | MapDataPipe):
            base_seed = finished.base_seed  # workers that stay are not seeded again
    elif not config.num_workers and is_stateful(config.dataset):
        workers = [{"dataset": copy.deepcopy(config.dataset.state_dict())}]
    own = None if finished is None else copy.deepcopy(finished.sampler.own_at_end)
    sampler = state_before(config.index_sampler, origin, own)
    return {
        **identity(config),
        "position": 0,
        "is_finished": True,
        "snapshot": 0,
        "num_workers": config.total_workers,
        "last_worker": config.total_workers - 1,
        "done": 0,
        "beyond": [],
        "base_seed": base_seed,
        "shared_seed": None,
        "sampler": sampler,
        "workers": workers,
    }


def check_torch_state(state: Any, config: LoaderConfig) -> TorchState:
    """Return the state with its details unpacked, if this loader can continue from it.

    Raises:
        StateMismatch: it cannot; the message lists what differs.
    """
    if not isinstance(state, Mapping) or "mode" not in state or (state["mode"] == "torch" and "details" not in state):
        shown = f"a dict with the keys {sorted(map(str, state))}" if isinstance(state, dict) else type(state).__name__
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {shown}")
    states.check_head(state, "torch", TORCH_STATE_VERSION, f"give ShmLoader the seed {state.get('seed')!r} it was saved with")
    state_checksum.check_checksum(state)
    differing = states.differences(state, {**identity(config), "version": state.get("version")})
    loaded = _unpacked(state, config.trust_state)
    sampler = loaded["sampler"]
    saved = order_kind(sampler)
    is_by_worker = saved == DATASET or has_own_states(loaded["workers"])
    if is_by_worker and loaded["num_workers"] != config.total_workers and not state["is_finished"]:
        differing.append(f"num_workers: saved {loaded['num_workers']!r}, now {config.total_workers!r}")
    possible = _kinds_now(config)
    if saved not in possible:
        differing.append(f"order: saved {saved}, now {' or '.join(possible)}")
    if differing:
        raise StateMismatch(
            f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader with the saved values, or "
            "start a new run without this state"
        )
    return loaded


def order_kind(sampler: SamplerState) -> str:
    """Return how a pass is resumed whose sampler has this state: OWN, SAMPLER or DATASET."""
    return OWN if "own" in sampler else SAMPLER if {"origin", "seed_between"} <= sampler.keys() else DATASET


def _kinds_now(config: LoaderConfig) -> list[str]:
    """Return the kinds that this loader's order may have: a sampler's iterator may turn out to have a state."""
    sampler = config.index_sampler
    if is_endless(sampler):
        return [DATASET]
    if is_torchs_own(sampler):
        return [SAMPLER]
    return [OWN] if own_state(sampler) is not None else [SAMPLER, OWN]


def _unpacked(state: Mapping[str, Any], is_trusted: bool) -> TorchState:
    """Return a state with its details beside the other fields.

    Raises:
        StateMismatch: `packed_state` did not make it, or it contains a pickle and is not trusted.
    """
    try:
        loaded: TorchState = {**state, **opened(state["details"], is_trusted=is_trusted)}
    except StateMismatch:
        raise
    except Exception as error:  # a pickle that is trusted may raise anything
        raise StateMismatch(f"the state's details cannot be read: {error!r}. Load what state_dict() returned") from error
    del loaded["details"], loaded[CHECK]
    found = {name: value for name, value in loaded.items() if name not in _IDENTITY}
    faults = states.faults_in(found, _KINDS, optional=_OPTIONAL, signed=("last_worker", "base_seed", "shared_seed"))
    if not faults:
        sampler = loaded["sampler"]
        is_sampler = all(isinstance(sampler[name], _OF_SAMPLER.get(name, ())) for name in sampler)
        if not is_sampler or ("taken" not in sampler and not loaded["is_finished"]):
            faults.append(f"sampler has {sorted(sampler)}")
        faults += [
            f"{name} holds the wrong things"
            for name in _LISTS
            if {type(each) for each in loaded.get(name, ())} - {dict if name == "workers" else int}
        ]
    if faults:
        raise StateMismatch(f"this is no state of a loader in torch mode: {'; '.join(faults)}. Load what state_dict() returned")
    return loaded


def not_once(keys: Any) -> Any:
    """Return a batch's keys so that they can be counted and read twice: a batch sampler may yield iterators."""
    return list(keys) if hasattr(keys, "__next__") else keys


class SamplerReader:
    """One pass over a loader's index sampler.

    Args:
        sampler: yields the keys of one batch.
        generator: the loader's own, if it was given one.
        every: ask a stateful sampler for its state every so many batches; 0: only when the pass begins.
        iterator: of the sampler, just begun as torch begins it.
        origin: the generators' states before that.
        seed_between: whether torch draws its workers' base seed after beginning the iterator, not before.
        keeps_places: record the generators' states along with a stateful sampler's.

    Attributes:
        place: after a resume, the generators' states in the saved run; None if they are unknown.
    """

    def __init__(
        self,
        sampler: Any,
        generator: Generator | None,
        *,
        every: int,
        iterator: Iterator[Any],
        origin: Origin,
        seed_between: bool,
        keeps_places: bool = False,
    ) -> None:
        self._sampler, self._generator, self._every = sampler, generator, every
        self._origin, self._is_seed_between, self._keeps_places = origin, seed_between, keeps_places
        self._origin_texts: dict[str, str] | None = None
        self.place: Origin | None = None
        self._num_drawn = 0
        faster = self._faster(0)
        self._iterator: Any = faster or iterator
        # whether batches are slices of an array, not what the sampler yields
        self.is_sliced = faster is not None and type(sampler) is BatchSampler and is_torchs_own(sampler)
        self._ended: SamplerState | None = None  # the state of a stateful iterator that has ended
        self.num_taken = 0
        self._taken_early: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._epoch = getattr(_innermost(self._sampler), "epoch", None)
        self._is_stateful = is_stateful(self._sampler) or is_stateful(self._iterator) or self._ended is not None
        # (batches taken, the sampler's own state, the generators')
        self._states: deque[tuple[int, Any, Origin | None]] = deque()
        self.own_at_end: SamplerState | None = None  # however rare snapshots are; None: sampler and iterator have no state
        self._note_state()

    def _faster(self, num_skipped: int) -> Iterator[Any] | None:
        """Return an iterator over the same batches that can seek or has a state; None: torch's own is used."""
        sampler = self._sampler
        if type(sampler) is BatchSampler and not is_torchs_own(sampler):
            batches = _Batches(sampler)
            return batches if batches.is_stateful else iter(batches)
        return batches_of(sampler, num_skipped)

    def resume(self, state: SamplerState, num_early: int = 1) -> None:
        """Continue where an earlier pass gave its state.

        Args:
            num_early: take so many batches while the generators are the saved run's. A sampler that draws when its first batch is
                taken must draw then, unless the program has restored its generators itself.
        """
        self.num_taken = state["taken"]
        sampler = _innermost(self._sampler)
        if "epoch" in state and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["epoch"])
        own = state.get("own")
        if own is not None:
            if "origin" in state:
                self.place = self._go_to(Origin.loads(state["origin"]))
            self._load(own)
            if self.num_taken == length_hint(self._sampler, -1) and list(islice(self._iterator, 1)):
                self._load(own)  # the sampler has begun its next pass by itself: back to this one's end
                self._iterator, self._ended = iter(()), own
        elif "origin" in state:
            self._origin, self._origin_texts = Origin.loads(state["origin"]), None
            if is_endless(self._sampler):
                self.place = self._go_to(self._origin)
            else:
                self._is_seed_between = state["seed_between"]
                with replayed(self._origin, self._generator):
                    self._replay(num_early)
                    self.place = origin_of(None)
        self._begin()

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
        self._iterator = chain(list(islice(self._iterator, 1)), self._iterator)

    def start_after(self, state: SamplerState) -> None:
        """Begin the pass after the one that gave this state at its end."""
        if "own" not in state:
            return
        self._load(state["own"])
        self.num_taken = 0
        self._begin()
        self._taken_early = list(islice(self._iterator, 1))  # the sampler begins its next pass by itself
        if not self._taken_early:
            self._iterator = self._faster(0) or iter(self._sampler)
            self._begin()

    @property
    def num_ahead(self) -> int:
        """Number of batches that the sampler has been asked for so far."""
        return max(self.num_taken, self._num_drawn)

    def _replay(self, num_early: int) -> None:
        iterator = iter(self._sampler)
        if self._is_seed_between:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        faster = self._faster(self.num_taken)
        if faster is not None and is_torchs_own(self._sampler):
            iterator, num_early = faster, max(num_early, int(self.num_taken > 0))  # an order is drawn whole with its first batch
        else:
            iterator = faster or iterator
            next(islice(iterator, self.num_taken, self.num_taken), None)
        self._num_drawn = self.num_taken + num_early
        self._iterator = chain(list(islice(iterator, num_early)), iterator)

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
        if self._is_stateful:
            self._note_state()
        return keys

    def _note_state(self) -> None:
        if self._is_stateful and (not self._states or (self._every and self.num_taken % self._every == 0)):
            place = torch_origin(self._generator) if self._keeps_places else None
            self._states.append((self.num_taken, self._own(), place))

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
        """Drop the states from before so many batches were taken."""
        while len(self._states) > 1 and self._states[1][0] <= num_delivered:
            self._states.popleft()

    def state(self, num_delivered: int) -> SamplerState:
        """Return the state when so many batches had been taken, or the last one before that; drop older ones."""
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
        return state


def own_state(index_sampler: Any) -> SamplerState | None:
    """Return a stateful sampler's state between two passes; None if the sampler has no state."""
    if is_stateful(index_sampler):
        return {"sampler": copy.deepcopy(index_sampler.state_dict()), "iterator": None}
    inner = _innermost(index_sampler)
    if type(index_sampler) is BatchSampler and is_stateful(inner):
        return {"sampler": None, "iterator": {"sampler": copy.deepcopy(inner.state_dict()), "iterator": None}}
    return None


def state_before(index_sampler: Any, origin: Origin, own: SamplerState | None = None) -> SamplerState:
    """Return the state before a pass over a sampler.

    Args:
        index_sampler: the loader's.
        origin: the generators' states that the pass would be drawn from.
        own: what a stateful sampler gave at the end of the pass before.
    """
    state: SamplerState = {"taken": 0, "origin": origin.dumps(is_torchs_own(index_sampler))}
    if not is_endless(index_sampler):
        state["seed_between"] = False
    if own is None:
        own = own_state(index_sampler)
    return state if own is None else {**state, "own": own}


def _innermost(index_sampler: Any) -> Any:
    return getattr(index_sampler, "sampler", index_sampler)


def is_endless(index_sampler: Any) -> bool:
    """Return whether this is the sampler that torch uses for an iterable dataset."""
    return isinstance(_innermost(index_sampler), InfiniteConstantSampler)


def is_torchs_own(index_sampler: Any) -> bool:
    """Return whether the order depends on torch's generators alone."""
    kinds = (type(index_sampler), type(_innermost(index_sampler)))
    return all(kind.__module__.startswith("torch.utils.data") for kind in kinds)


class _Batches:
    """torch's BatchSampler over a user's sampler that may have a state, or whose iterator may."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches
        self._iterator: Any = iter(batches.sampler)

    @property
    def is_stateful(self) -> bool:
        """Whether the sampler or its iterator has a state."""
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
        """Load what `state_dict` returned."""
        sampler: Any = self._batches.sampler
        if state["sampler"] is not None:
            sampler.load_state_dict(state["sampler"])
        self._iterator = iter(sampler)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])


def batches_of(index_sampler: Any, num_skipped: int = 0) -> Iterator[Any] | None:
    """Return an iterator over what one of torch's own samplers yields, with batches as arrays; None for another sampler.

    Args:
        index_sampler: the loader's.
        num_skipped: leave out so many at the beginning.
    """
    if type(index_sampler) is SequentialSampler:  # samples come one by one
        return iter(range(len(index_sampler))[num_skipped:])
    if type(index_sampler) is not BatchSampler:
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        return _slices(index_sampler, None, num_skipped)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _slices(index_sampler, sampler, num_skipped)
    return None


def _slices(batch_sampler: BatchSampler, random: RandomSampler | None, num_skipped: int) -> Iterator[NDArray[np.int64]]:
    """Yield the batches of an order, which is drawn when the first is asked for, as torch's samplers do."""
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
        # torch's sampler draws one more order and does not use it, which moves the user's generator
        randperm(n, generator)
    rest = n % batch_size
    if rest and not batch_sampler.drop_last and num_skipped * batch_size < n:
        yield indices(n - rest, n)
