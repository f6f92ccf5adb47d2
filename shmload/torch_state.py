"""Where a pass in torch mode stands: what is saved, and the checks when it is loaded.

    {"version", "mode": "torch", "batch_size", "drop_last", "n",    which loader it was
     "position", "is_finished",                                     batches delivered
     "details"}                                                     the rest, as one string (opaque.py):

     "snapshot", "num_workers", "last_worker", "base_seed", "shared_seed",  from where a resumed loader makes batches again
     "sampler": {...}, "workers": [...]                             see torch_order.py and worker/snapshot.py

A resumed loader puts
workers and sampler where they stood at `snapshot` and reads what is between there and `position` again, unseen: nothing, with
`snapshot_every_n_steps=1`.
"""

from __future__ import annotations

import copy
import logging
import pickle
from typing import TYPE_CHECKING, Any

from shmload.errors import StateMismatch
from shmload.generators import origin_of
from shmload.opaque import UsersOwn, opened, sealed
from shmload.torch_order import SamplerReader, SamplerState, is_endless, is_torchs_own
from shmload.worker.notes import Note
from shmload.worker.snapshot import SAME, Snapshot, is_stateful

if TYPE_CHECKING:
    from shmload.loader import ShmLoader

log = logging.getLogger("shmload")

TORCH_STATE_VERSION = 1

TorchState = dict[str, Any]


_OUTSIDE = ("version", "mode", "n", "batch_size", "drop_last", "position", "is_finished")


def packed_state(state: TorchState) -> TorchState:
    """As it is handed out."""
    sampler, workers = dict(state["sampler"]), [dict(s) for s in state["workers"]]
    for holder, name in [(sampler, "own"), *((s, name) for s in workers for name in ("dataset", "iterator"))]:
        if name in holder:
            holder[name] = UsersOwn(holder[name])
    inside = {name: value for name, value in state.items() if name not in _OUTSIDE}
    inside.update(sampler=sampler, workers=workers)
    return {**{name: state[name] for name in _OUTSIDE}, "details": sealed(inside)}


class Progress:
    """How far one pass has come. The loader keeps it when the iterator is gone: a loop that was left is resumed, too.

    Args:
        sampler: the pass over its sampler.
    """

    def __init__(self, loader: ShmLoader[Any], sampler: SamplerReader, base_seed: int, shared_seed: int | None) -> None:
        self._every = loader.snapshot_every_n_steps
        self.is_always_current = self._every == 1  # then the snapshot is of now, whenever someone asks
        self._num_workers = loader.crew_size
        self._identity = identity(loader)
        self._is_ordered = loader.in_order or loader.crew_size < 2
        self._sampler = sampler
        self._base_seed, self._shared_seed = base_seed, shared_seed
        self._notes: list[bytes] = [SAME] * self._num_workers
        self._is_current = [True] * self._num_workers
        self._fetcher: Any = None
        self.last_worker = self._num_workers - 1  # whose batch was delivered last
        self.num_delivered = 0
        self.is_finished = False
        # (step, notes, last worker, the sampler's state); the last is made when it is asked for
        self._snapshot: tuple[int, list[bytes], int, SamplerState | None] = (
            0,
            list(self._notes),
            self.last_worker,
            sampler.state(0),
        )

    def resumed(self, state: TorchState) -> None:
        """Stands where that state's snapshot was taken."""
        self.num_delivered = state["snapshot"]
        if state["num_workers"] == self._num_workers > 0:
            self._notes = [pickle.dumps(s) if s else SAME for s in state["workers"]]
            self.last_worker = state["last_worker"]
        self._take_snapshot()
        self._snapshot = (*self._snapshot[:3], self._sampler.state(self.num_delivered))

    def _take_snapshot(self) -> None:
        self._snapshot = (self.num_delivered, list(self._notes), self.last_worker, None)

    def follows(self, last: Progress) -> None:
        """The same workers have made another pass before."""
        self._notes = last._notes
        self._take_snapshot()

    def read_by(self, fetcher: Any) -> None:
        """Names torch's own reader, which knows the dataset and its iterator, with num_workers=0."""
        self._fetcher = fetcher

    def noted(self, worker: int, note: Note | None) -> None:
        """What came with the newest batch of a worker."""
        self._is_current[worker] = note is not None
        if note is not None and note.snapshot != SAME:
            self._notes[worker] = note.snapshot

    def delivered(self) -> None:
        """One more batch has been handed to the user, and counted; asked for unless `is_always_current`."""
        if self._every and self.num_delivered - self._snapshot[0] >= self._every and all(self._is_current):
            self._take_snapshot()

    def state(self) -> TorchState:
        """The state now; later iteration does not change it."""
        if not self._is_ordered:
            log.warning(
                "with in_order=False and several workers a state counts batches and does not say which: a resumed run may read "
                "some again and leave out others"
            )
        if self.is_always_current:
            self._take_snapshot()
        step, notes, last_worker, sampler = self._snapshot
        if sampler is None:
            sampler = self._sampler.state(step)
        state: TorchState = {
            **self._identity,
            "position": self.num_delivered,
            "is_finished": self.is_finished,
            "snapshot": step,
            "num_workers": self._num_workers,
            "last_worker": last_worker,
            "base_seed": self._base_seed,
            "shared_seed": self._shared_seed,
            "sampler": sampler,
        }
        if self._num_workers:
            state["workers"] = [pickle.loads(note) if note else {} for note in notes]
        else:
            state["snapshot"], state["workers"] = self.num_delivered, [copy.deepcopy(self._read_here())]
            state["sampler"] = self._sampler.state(self.num_delivered)
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


def identity(loader: ShmLoader[Any]) -> dict[str, Any]:
    """Which order it is, as far as numbers say."""
    try:
        n: int | None = len(loader.dataset)  # type: ignore[arg-type]  # it need not have a length
    except (TypeError, NotImplementedError):
        n = None
    return {
        "version": TORCH_STATE_VERSION,
        "mode": "torch",
        "n": n,
        "batch_size": loader.batch_size,
        "drop_last": bool(loader.drop_last),
    }


def fresh_state(loader: ShmLoader[Any], finished: Progress | None) -> TorchState:
    """The state before a pass: the next one would draw its order from the generators as they stand now.

    Args:
        finished: the pass before, if there was one: a stateful dataset goes on from there if its workers do, too.
    """
    workers: list[Snapshot] = []
    if finished is not None and (loader.persistent_workers or not loader.num_workers):
        workers = finished.state()["workers"]
    sampler: SamplerState = {}
    if not is_endless(loader._index_sampler):
        sampler["origin"] = origin_of(loader.generator).dumps(is_torchs_own(loader._index_sampler))
    if finished is not None and "own" in (ended := finished.state()["sampler"]):
        sampler["own"], sampler["taken"] = ended["own"], ended["taken"]
    return {
        **identity(loader),
        "position": 0,
        "is_finished": True,
        "snapshot": 0,
        "num_workers": loader.crew_size,
        "last_worker": loader.crew_size - 1,
        "base_seed": 0,
        "shared_seed": None,
        "sampler": sampler,
        "workers": workers,
    }


def check_torch_state(state: Any, loader: ShmLoader[Any]) -> TorchState:
    """The state itself, if this loader can go on from it.

    Raises:
        StateMismatch: it cannot; says what differs.
    """
    if not isinstance(state, dict) or "mode" not in state or (state["mode"] == "torch" and "details" not in state):
        raise StateMismatch(f"a state is a dict as state_dict() returns it, got {_shown(state)}")
    if state["mode"] != "torch":
        raise StateMismatch(
            f"this state is of mode {state['mode']!r}, the loader is in torch mode (seed=None): give ShmLoader the seed "
            f"{state.get('seed')!r} it was saved with"
        )
    version = state.get("version")
    if not isinstance(version, int) or version > TORCH_STATE_VERSION:
        raise StateMismatch(
            f"this state has format version {version!r}, this shmload reads up to {TORCH_STATE_VERSION}: install a newer one"
        )
    differing = [
        f"{name}: saved {state.get(name)!r}, now {now!r}"
        for name, now in identity(loader).items()
        if state.get(name) != now
    ]
    loaded: TorchState = {**state, **opened(state["details"])}
    is_in_parts = "origin" not in loaded["sampler"] and "own" not in loaded["sampler"]  # an iterable dataset, by worker
    own_states = any("dataset" in s or "iterator" in s for s in loaded["workers"])
    if (own_states or is_in_parts) and loaded["num_workers"] != loader.crew_size and not state["is_finished"]:
        differing.append(f"num_workers: saved {loaded['num_workers']!r}, now {loader.crew_size!r}")
    if differing:
        raise StateMismatch(
            f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader with the saved values, or "
            "start a new run without this state"
        )
    del loaded["details"]
    return loaded


def _shown(value: Any) -> str:
    return f"a dict with the keys {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
