"""The progress of a pass in torch mode, from which its state is made.

A resumed loader restores workers and sampler to the last snapshot, and reads the batches between the snapshot and the saved
position again without yielding them. With `snapshot_every_n_steps=1` there are none. An order is complete when its batch was
yielded, was lost to an error, or had no sample left. The number of yielded batches is not a position, because some orders yield no
batch, and with in_order=False they arrive in another order.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from shmload.engine.config import LoaderConfig
from shmload.introspect.abilities import is_stateful
from shmload.modes.dataset_pass import DatasetPass, next_pass
from shmload.modes.draw_origin import Origin
from shmload.modes.sampler_reader import SamplerReader, SamplerState, state_before
from shmload.modes.torch_samplers import is_endless
from shmload.modes.torch_state import SAMPLER, TorchState, has_own_states, identity, resume_kind
from shmload.shm import pickling
from shmload.worker.iterable_pass import RestartingIterator
from shmload.worker.note import SAME, Note
from shmload.worker.snapshot import Snapshot, own_states


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
        config: the loader's arguments for this pass.
        sampler: the pass over its sampler.
        base_seed: seed from which the workers' seeds are made.
        shared_seed: seed that all ranks share, for torch's data pipes; otherwise None.
        num_workers: number of workers, which is that of the first pass if they are persistent.

    Attributes:
        done: the complete orders.
        num_delivered: number of batches yielded.
        last_worker: the worker whose batch was delivered last.
        is_finished: whether the pass has reached its end.
        is_always_current: whether each state takes a snapshot of its own; `delivered` need not be called then.
        fetcher: with num_workers=0, torch's own reader, which has the dataset and its iterator.
        began_at: with num_workers=0 and an iterable dataset, the global generators' states when the pass began; otherwise None. The
            dataset may draw from them when a resumed pass reads it again.
    """

    def __init__(
        self, config: LoaderConfig, sampler: SamplerReader, base_seed: int, shared_seed: int | None, num_workers: int
    ) -> None:
        self._every = config.snapshot_every
        self._num_workers = num_workers
        self._identity = identity(config)
        self._is_iterable = is_endless(config.index_sampler)
        self._goes_by_number = not self._is_iterable and not config.in_order and num_workers > 1
        # if so, each state takes its own snapshot, because batches read out of order cannot be read again up to a position
        self.is_always_current = self._every == 1 or self._goes_by_number
        self.sampler, self.base_seed, self._shared_seed = sampler, base_seed, shared_seed
        self._dataset_pass = DatasetPass.begun(config, base_seed)
        self._notes: list[bytes] = [SAME] * self._num_workers
        self._first_notes = list(self._notes)  # the notes at the beginning of the pass
        self._is_current = [True] * self._num_workers
        self.fetcher: Any = None
        self.began_at: Origin | None = None
        self._began_at_texts: dict[str, str] = {}  # `began_at` as states contain it, converted once
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
            self._notes = [pickling.dumps(s) if s else SAME for s in state["workers"]]
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
        """Return the workers' snapshots between two passes, even if snapshots are rare during a pass."""
        notes = [pickle.loads(note) if note else {} for note in self._notes] or [self._read_here()]
        return [after_pass(note) for note in notes]

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """Do not count the batches that are read in this context, because they were counted before."""
        num_delivered, counts = self.num_delivered, self._counts
        self._counts = list(counts)
        yield
        self.num_delivered, self._counts = num_delivered, counts

    @property
    def num_complete(self) -> int:
        """Return the number of complete orders, for audits. For an iterable dataset, orders that ended an iterator do not count."""
        if not self._is_iterable:
            return self.done.first
        has_counted_the_end = self.is_finished and self._num_workers == 0  # an order counts before the trainer reads it
        return sum(self._counts) - has_counted_the_end

    def noted(self, worker: int, note: Note | None) -> None:
        """Keep the note of a worker's newest batch."""
        self._is_current[worker] = note is not None
        if note is not None and note.snapshot != SAME:
            self._notes[worker] = note.snapshot

    def completed(self, step: int, worker: int) -> None:
        """Record that an order is complete and did not end its worker's iterator."""
        self.done.add(step)
        self._counts[worker] += 1
        self.sampler.forget(self.done.first if self.is_always_current else self._snapshot[0])

    def delivered(self) -> None:
        """Take a snapshot if one is due after a batch was yielded. Calling this is optional if `is_always_current`."""
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
        if self._dataset_pass is not None:
            state["dataset_pass"] = self._dataset_pass.number
        if resume_kind(sampler) == SAMPLER:
            state["ahead"] = self.sampler.num_ahead
        if self._is_iterable:
            state.update(counts=list(self._counts), counted=counted, last_worker=self.last_worker, beyond=[])
        state["workers"] = [pickle.loads(note) if note else {} for note in notes] or [self._read_here()]
        if self._is_iterable and notes and not has_own_states(state["workers"]):  # the whole pass is read again
            state["workers"] = [pickle.loads(note) if note else {} for note in self._first_notes]
        return state

    def _read_here(self) -> Snapshot:
        fetcher = self.fetcher
        iterator, has_ended = getattr(fetcher, "dataset_iter", None), getattr(fetcher, "ended", False)
        if isinstance(iterator, RestartingIterator):
            iterator = iterator.iterator
        snapshot = copy.deepcopy(own_states(fetcher.dataset, iterator, has_ended=has_ended))
        if self._is_iterable and self.sampler.num_taken == 0 and "dataset" in snapshot:
            snapshot["is_over"] = True  # the dataset may still have the state of the last pass's end
        if self.began_at is not None and not has_own_states([snapshot]):
            self._began_at_texts = self._began_at_texts or self.began_at.dumps(is_torch_enough=False)
            snapshot["generators"] = self._began_at_texts
        return snapshot


def after_pass(snapshot: Snapshot) -> Snapshot:
    """Return a worker's snapshot for the pass after the one that it was taken in."""
    after: Snapshot = {name: snapshot[name] for name in ("dataset", "streams", "last_iterator") if name in snapshot}
    if "iterator" in snapshot:
        after["last_iterator"] = snapshot["iterator"]
    return {**after, "is_over": True} if "dataset" in after else after


def between_passes(note: bytes) -> bytes:
    """Return a worker's pickled snapshot as `after_pass` makes it."""
    return pickling.dumps(after_pass(pickle.loads(note))) if note else note


def fresh_state(config: LoaderConfig, finished: PassProgress | None, origin: Origin) -> TorchState:
    """Return the state before a pass.

    Args:
        config: the loader's arguments.
        finished: the last pass, if there was one. A stateful dataset continues from it if its workers do.
        origin: the generators' states from which the pass would draw.
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
    number = next_pass(config.dataset)
    return {
        **identity(config),
        **({} if number is None else {"dataset_pass": number}),
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
