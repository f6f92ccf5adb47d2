"""Where a pass in torch mode stands: what is saved, and the checks when it is loaded.

    {"version", "mode": "torch", "batch_size", "drop_last", "n",    which loader it was
     "position", "is_finished",                                     batches delivered
     "check",                                                       schedule/state.py
     "details"}                                                     the rest, as one string (schedule/codec.py):

     "snapshot", "num_workers", "last_worker", "base_seed", "shared_seed",  from where a resumed loader makes batches again
     "done", "beyond",                                              all orders before `done` are behind, and these after it
     "counts", "counted"                                            of an iterable dataset: orders behind, by worker, now and then
     "sampler": {...}, "workers": [...]                             see torch_order.py and worker/snapshot.py

A resumed loader puts workers and sampler where they stood at `snapshot` and reads what came between there and now again, unseen:
nothing, with `snapshot_every_n_steps=1`. An order is behind when its batch was yielded, was lost to an error or had no sample left.
How many batches were yielded says no place: some orders gave none, and with in_order=False they come as they are ready.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, MapDataPipe

from shmload.errors import StateMismatch
from shmload.modes.torch_order import SamplerReader, SamplerState, is_endless, is_torchs_own, own_state
from shmload.schedule.codec import UsersOwn, opened, sealed
from shmload.schedule.state import CHECK, check_checksum, with_checksum
from shmload.worker.generators import origin_of
from shmload.worker.snapshot import SAME, Note, Snapshot, is_stateful

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig

log = logging.getLogger("shmload")

TORCH_STATE_VERSION = 1

TorchState = dict[str, Any]

OWN, SAMPLER, DATASET = "by a sampler's own state", "by a sampler", "by an iterable dataset"  # how a pass is resumed


_OUTSIDE = ("version", "mode", "n", "batch_size", "drop_last", "position", "is_finished")


def packed_state(state: TorchState) -> TorchState:
    """As it is handed out."""
    sampler, workers = dict(state["sampler"]), [dict(s) for s in state["workers"]]
    for holder, name in [(sampler, "own"), *((s, name) for s in workers for name in ("dataset", "iterator"))]:
        if name in holder:
            holder[name] = UsersOwn(holder[name])
    inside = {name: value for name, value in state.items() if name not in _OUTSIDE}
    inside.update(sampler=sampler, workers=workers)
    return with_checksum({**{name: state[name] for name in _OUTSIDE}, "details": sealed(inside)})


class Done:
    """Which of a pass's orders are behind: all before `first`, and those in `beyond`."""

    def __init__(self, first: int = 0, beyond: Iterable[int] = ()) -> None:
        self.first, self.beyond = first, set(beyond)

    def add(self, step: int) -> None:
        """One more is."""
        if step != self.first:
            self.beyond.add(step)
            return
        self.first += 1
        while self.beyond and self.first in self.beyond:
            self.beyond.remove(self.first)
            self.first += 1

    def __contains__(self, step: int) -> bool:
        return step < self.first or step in self.beyond


class Progress:
    """How far one pass has come. The loader keeps it when the iterator is gone: a loop that was left is resumed, too.

    Args:
        sampler: the pass over its sampler.
    """

    def __init__(self, config: LoaderConfig, sampler: SamplerReader, base_seed: int, shared_seed: int | None) -> None:
        self._every = config.snapshot_every
        self._num_workers = config.total_workers
        self._identity = identity(config)
        self._is_iterable = is_endless(config.index_sampler)
        self._goes_by_number = not self._is_iterable and not config.in_order and config.total_workers > 1
        # then the snapshot is of now, whenever someone asks; what is read out of order is not read again up to a place
        self.is_always_current = self._every == 1 or self._goes_by_number
        self._sampler = sampler
        self.base_seed, self._shared_seed = base_seed, shared_seed
        self._notes: list[bytes] = [SAME] * self._num_workers
        self._is_current = [True] * self._num_workers
        self._fetcher: Any = None
        self.last_worker = self._num_workers - 1  # whose batch was delivered last
        self.num_delivered = 0
        self.is_finished = False
        self.done = Done()
        self._counts = [0] * max(self._num_workers, 1)  # orders behind that were no iterator's end, by worker
        # (step, notes, last worker, counts, the sampler's state); the last is made when it is asked for
        self._snapshot: tuple[int, list[bytes], int, list[int], SamplerState | None]
        self._take_snapshot()
        self._snapshot = (*self._snapshot[:4], sampler.state(0))

    def resumed(self, state: TorchState) -> None:
        """Stands where that state's snapshot was taken."""
        self.num_delivered = state["position"]
        self.done = Done(state["done" if self._goes_by_number else "snapshot"], state["beyond"])
        if state["num_workers"] == self._num_workers > 0:
            self._notes = [pickle.dumps(s) if s else SAME for s in state["workers"]]
            self.last_worker = state["last_worker"]
        if self._is_iterable:
            self._counts = list(state["counted"])
        self._take_snapshot()
        self._snapshot = (*self._snapshot[:4], self._sampler.state(self.done.first))
        if self._is_iterable:
            self._counts = list(state["counts"])  # what comes between is read again by worker, and not counted again

    def _take_snapshot(self) -> None:
        self._snapshot = (self.done.first, list(self._notes), self.last_worker, list(self._counts), None)

    def follows(self, last: Progress) -> None:
        """The same workers have made another pass before."""
        self._notes = [between_passes(note) for note in last._notes] if self._is_iterable else last._notes
        self._take_snapshot()

    def read_by(self, fetcher: Any) -> None:
        """Names torch's own reader, which knows the dataset and its iterator, with num_workers=0."""
        self._fetcher = fetcher

    def workers_at_end(self) -> list[Snapshot]:
        """Where workers stand between two passes, however seldom they are asked on the way."""
        told = [pickle.loads(note) if note else {} for note in self._notes] or [copy.deepcopy(self._read_here())]
        return [{name: of[name] for name in ("dataset", "streams") if name in of} for of in told]

    def sampler_at_end(self) -> SamplerState | None:
        """What a stateful sampler told at the end of a finished pass; None if it is none."""
        return self._sampler.own_at_end()

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """A while in which batches are read that have been counted."""
        num_delivered, counts = self.num_delivered, self._counts
        self._counts = list(counts)
        yield
        self.num_delivered, self._counts = num_delivered, counts

    def noted(self, worker: int, note: Note | None) -> None:
        """What came with the newest batch of a worker."""
        self._is_current[worker] = note is not None
        if note is not None and note.snapshot != SAME:
            self._notes[worker] = note.snapshot

    def ended(self, step: int, worker: int) -> None:
        """An order is behind, and was not the end of its worker's iterator."""
        self.done.add(step)
        self._counts[worker] += 1

    def delivered(self) -> None:
        """One more batch has been handed to the user, and counted; asked for unless `is_always_current`."""
        if self._every and self.done.first - self._snapshot[0] >= self._every and all(self._is_current):
            self._take_snapshot()

    def state(self) -> TorchState:
        """The state now; later iteration does not change it."""
        if self.is_always_current or self._num_workers == 0:
            self._take_snapshot()
        step, notes, last_worker, counted, sampler = self._snapshot
        if sampler is None:
            sampler = self._sampler.state(step)
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
        if self._is_iterable:
            state.update(counts=list(self._counts), counted=counted, last_worker=self.last_worker, beyond=[])
        if self._num_workers:
            state["workers"] = [pickle.loads(note) if note else {} for note in notes]
        else:
            state["workers"] = [copy.deepcopy(self._read_here())]
        return state

    def _read_here(self) -> Snapshot:
        fetcher, snapshot = self._fetcher, {}
        iterator = getattr(fetcher, "dataset_iter", None)
        if iterator is not fetcher.dataset and is_stateful(fetcher.dataset):
            snapshot["dataset"] = fetcher.dataset.state_dict()
        if is_stateful(iterator):
            snapshot["iterator"] = iterator.state_dict()  # type: ignore[union-attr]  # None has none
        if getattr(fetcher, "ended", False):
            snapshot["has_ended"] = True
        return snapshot


def between_passes(note: bytes) -> bytes:
    """A worker's snapshot without what it says of a pass through its iterable dataset."""
    snapshot: Snapshot = pickle.loads(note) if note else {}
    of_pass = snapshot.keys() & {"iterator", "has_ended"}
    return pickle.dumps({name: snapshot[name] for name in snapshot.keys() - of_pass}) if of_pass else note


def identity(config: LoaderConfig) -> dict[str, Any]:
    """Which order it is, as far as numbers say."""
    return {
        "version": TORCH_STATE_VERSION,
        "mode": "torch",
        "n": config.num_samples,
        "batch_size": config.batch_size,
        "drop_last": bool(config.drop_last),
    }


def fresh_state(config: LoaderConfig, finished: Progress | None) -> TorchState:
    """The state before a pass: the next one would draw its order from the generators as they stand now.

    Args:
        finished: the pass before, if there was one: a stateful dataset goes on from there if its workers do, too.
    """
    workers: list[Snapshot] = []
    base_seed = None  # drawn when the pass begins
    if finished is not None and (config.persistent_workers or not config.num_workers):
        workers = finished.workers_at_end()
        if config.num_workers and not isinstance(config.dataset, IterDataPipe | MapDataPipe):
            base_seed = finished.base_seed  # workers that stay are not seeded anew
    elif not config.num_workers and is_stateful(config.dataset):
        workers = [{"dataset": copy.deepcopy(config.dataset.state_dict())}]
    sampler: SamplerState = {}
    if not is_endless(config.index_sampler):
        sampler["origin"] = origin_of(config.generator).dumps(is_torchs_own(config.index_sampler))
    own = None if finished is None else finished.sampler_at_end()
    if own is None:
        own = own_state(config.index_sampler)
    if own is not None:
        sampler["own"], sampler["taken"] = own, 0
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
    """The state itself, if this loader can go on from it.

    Raises:
        StateMismatch: it cannot; says what differs.
    """
    if not isinstance(state, Mapping) or "mode" not in state or (state["mode"] == "torch" and "details" not in state):
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {_shown(state)}")
    if state["mode"] != "torch":
        raise StateMismatch(
            f"this state is of mode {state['mode']!r}, the loader is in torch mode (seed=None): give ShmLoader the seed "
            f"{state.get('seed')!r} it was saved with"
        )
    version = state.get("version")
    if type(version) is not int or version > TORCH_STATE_VERSION:
        raise StateMismatch(
            f"this state has format version {version!r}, this shmload reads up to {TORCH_STATE_VERSION}: install a newer one"
        )
    check_checksum(state)
    differing = [
        f"{name}: saved {state.get(name)!r}, now {now!r}"
        for name, now in identity(config).items()
        if state.get(name) != now
    ]
    loaded = _unpacked(state, config.trust_state)
    is_in_parts = _kind_of(loaded["sampler"]) == DATASET  # an iterable one, by worker
    own_states = any("dataset" in s or "iterator" in s for s in loaded["workers"])
    if (own_states or is_in_parts) and loaded["num_workers"] != config.total_workers and not state["is_finished"]:
        differing.append(f"num_workers: saved {loaded['num_workers']!r}, now {config.total_workers!r}")
    saved, possible = _kind_of(loaded["sampler"]), _kinds_now(config)
    if saved not in possible:
        differing.append(f"order: saved {saved}, now {' or '.join(possible)}")
    if differing:
        raise StateMismatch(
            f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader with the saved values, or "
            "start a new run without this state"
        )
    return loaded


def _kind_of(sampler: SamplerState) -> str:
    """What a pass goes on by."""
    return OWN if "own" in sampler else SAMPLER if "origin" in sampler else DATASET


def _kinds_now(config: LoaderConfig) -> list[str]:
    """What this loader's may be; whether an iterator of a sampler's has a state is not known before there is one."""
    sampler = config.index_sampler
    if is_endless(sampler):
        return [DATASET]
    if is_torchs_own(sampler):
        return [SAMPLER]
    return [OWN] if own_state(sampler) is not None else [SAMPLER, OWN]


_NUMBER = (int,)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("position", "snapshot", "done", "num_workers", "last_worker", "passes"), _NUMBER),
    **dict.fromkeys(("base_seed", "shared_seed"), (int, type(None))),
    **dict.fromkeys(("beyond", "workers", "counts", "counted"), (list,)),
    "is_finished": (bool,),
    "sampler": (dict,),
}
_OF_ITERABLES = {"counts", "counted"}
_OF_SAMPLER = {"taken": int, "epoch": object, "own": dict, "origin": dict, "seed_between": bool}


def _unpacked(state: Mapping[str, Any], is_trusted: bool) -> TorchState:
    """All of a state, side by side.

    Raises:
        StateMismatch: it is not made as `packed_state` makes one, or holds a pickle and is not trusted.
    """
    try:
        loaded: TorchState = {**state, **opened(state["details"], is_trusted=is_trusted)}
    except StateMismatch:
        raise
    except Exception as error:  # a pickle that is trusted may raise anything
        raise StateMismatch(
            f"the state's details cannot be read: {error!r}. Load what state_dict() returned"
        ) from error
    del loaded["details"], loaded[CHECK]
    needed = _KINDS.keys() | set(_OUTSIDE)
    faults = [f"{name} is missing" for name in sorted(needed - _OF_ITERABLES - loaded.keys())]
    faults += [f"{name} is unknown" for name in sorted(loaded.keys() - needed)]
    faults += [
        f"{name} is {loaded[name]!r:.100}"
        for name, kinds in _KINDS.items()
        if name in loaded and not (type(loaded[name]) in kinds and _is_counted(name, loaded[name]))
    ]
    if not faults:
        sampler = loaded["sampler"]
        is_sampler = all(isinstance(sampler[name], _OF_SAMPLER.get(name, ())) for name in sampler)
        if not is_sampler or ("taken" not in sampler and not loaded["is_finished"]):
            faults.append(f"sampler has {sorted(sampler)}")
        if not all(isinstance(told, dict) for told in loaded["workers"]):
            faults.append("workers are no dicts")
    if faults:
        raise StateMismatch(
            f"this is no state of a loader in torch mode: {'; '.join(faults)}. Load what state_dict() returned"
        )
    return loaded


def _is_counted(name: str, value: Any) -> bool:
    """Whether what should be numbers from 0 on is."""
    if name in ("beyond", "counts", "counted"):
        return all(type(number) is int and number >= 0 for number in value)
    return type(value) is not int or value >= 0 or name in ("last_worker", "base_seed", "shared_seed")


def _shown(value: Any) -> str:
    return f"a dict with the keys {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
