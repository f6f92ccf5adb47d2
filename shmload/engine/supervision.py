"""Which workers of a ring there are, and what a worker's death means.

A ring has records for the largest worker pool; the header says how many workers are wanted, and those are the first ones. A worker
whose number is not below that looks at the word between two chunks, and leaves. Nothing it did has to be done again, so a batch
cannot tell. Who was told to leave is remembered here until its process has ended: only then is such an end no death.

A dead worker's rows are done again by a new worker, or it ends the loader. In seed mode a worker is replaced as often as need be,
but a sample that ends its worker twice is given up, and so is a loader whose workers keep dying with nothing to do. In torch mode
the first death is the end, as in torch, unless `max_restarts` says otherwise: the dead worker's own random stream cannot be
recovered.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shmload._core.trainer import TrainerRing
from shmload.engine.ring import LEAST_SLOTS, RingMemory
from shmload.errors import SampleTimeout, ShmloadError, WorkerDied
from shmload.worker.failure import REMEDY, sample_at, timeout_text
from shmload.worker.pool import Death, WorkerPool, interrupts_held

if TYPE_CHECKING:
    from shmload._core.trainer import Order

log = logging.getLogger("shmload")


class WorkerSet:
    """The workers of one ring, by number.

    Attributes:
        start_s: what the newest worker took from the call that started it to its first look for work; 0 before one has come.
    """

    def __init__(self, ring: TrainerRing, pool: WorkerPool) -> None:
        self._ring = ring
        self._pool = pool
        self._called_ns: dict[int, int] = {}  # when each that is there was started
        self._told: set[int] = set()
        self.start_s = 0.0

    def start(self, num_workers: int) -> None:
        """Starts the first worker pool."""
        self._ring.num_wanted = num_workers
        now = monotonic_ns()
        self._called_ns = dict.fromkeys(range(num_workers), now)
        self._pool.start(num_workers)

    @property
    def num_wanted(self) -> int:
        """How many workers there are to be."""
        return self._ring.num_wanted

    def resize(self, num_wanted: int) -> bool:
        """Makes the worker pool that large: starts processes now, and tells others to leave.

        Returns:
            False: not all could be started; what there is stays.
        """
        self._told |= {worker for worker in self._called_ns if worker >= num_wanted}
        self._ring.num_wanted = num_wanted
        return self._staff()

    def was_told(self, worker: int) -> bool:
        """Whether this worker was told to leave: then that its process has ended is no death."""
        return worker in self._told

    def has_gone(self, worker: int) -> None:
        """Takes note that a worker that was told to leave has ended; it is started again if it is wanted again."""
        self._pool.reap(worker)
        self._ring.forget(worker)
        self._told.discard(worker)
        del self._called_ns[worker]
        self._staff()

    def _staff(self) -> bool:
        for worker in range(self._ring.num_wanted):
            if worker in self._called_ns:
                continue
            began = monotonic_ns()
            try:
                self._pool.start_worker(worker)
            except OSError as error:  # no more processes or memory for one; those that work go on
                log.warning("worker %d could not be started (%s): the loader goes on with fewer", worker, error)
                return False
            self._called_ns[worker] = began
        return True

    def is_complete(self) -> bool:
        """Whether every wanted worker is up and looks for work."""
        newest = 0
        for worker in range(self._ring.num_wanted):
            started_ns = self._ring.worker(worker)["started_ns"]
            called_ns = self._called_ns.get(worker)
            if called_ns is None or started_ns < called_ns:
                return False
            if called_ns > newest:
                newest, self.start_s = called_ns, (started_ns - called_ns) / 1e9
        return True


class Size:
    """The size of one engine: its workers, its slots, the memory behind them.

    Args:
        num_pending_copies: slots beyond those for batches under way.
    """

    def __init__(self, memory: RingMemory, worker_set: WorkerSet, num_pending_copies: int = 0) -> None:
        self._memory, self._worker_set = memory, worker_set
        self._num_spare = num_pending_copies + 2

    def resize(self, num_workers: int) -> bool:
        """Makes the worker pool that large, in seed mode; nobody is waited for. False: a process could not be started."""
        with interrupts_held():
            return self._worker_set.resize(num_workers)

    def make_room(self, num_ordered: int, budget: int) -> int:
        """Brings slots into use for so many batches under way, or parks what is free beyond.

        Args:
            budget: bytes that payloads may take in all for the sake of more slots.
        Returns:
            how many batches there is room for.
        """
        with interrupts_held():
            num_wanted = num_slots(num_ordered) + self._num_spare - 2
            return self._memory.use(num_wanted, budget) - self._num_spare

    def room(self, budget: int) -> int:
        """Batches under way that there are slots for, or can be within a budget."""
        return self._memory.room(budget) - self._num_spare

    @property
    def payload_nbytes(self) -> int:
        """Bytes reserved for batches now."""
        return self._memory.nbytes


def num_slots(num_ordered: int) -> int:
    """Slots for so many batches under way: one more is the user's, and one is free to be ordered when that comes back."""
    return max(num_ordered + 2, LEAST_SLOTS)


VAIN_DEATHS = 10  # in a row, of workers with no claim and no batch delivered between: the next would die, too


class LoaderEnd(NamedTuple):
    """A death that may not be mended: what WorkerDied says, its cause in torch's words, what the worker was at."""

    text: str
    cause: str
    note: str

    def error(self) -> WorkerDied:
        """A new exception each time: one kept would keep, by its traceback, everything alive."""
        error = WorkerDied(self.text)
        error.__cause__ = RuntimeError(self.cause)
        if self.note:
            error.add_note(self.note)
        return error


class FatalRow(NamedTuple):
    """A row whose reading ended its worker, too often or too late; -1: it is not known which."""

    text: str
    row: int
    kind: type[ShmloadError] = WorkerDied

    @property
    def rows(self) -> tuple[int, ...]:
        """The row, if it is known."""
        return () if self.row < 0 else (self.row,)

    def error(self) -> ShmloadError:
        """What to raise over it."""
        return self.kind(self.text)


class TimedHelpers(Protocol):
    """The part of a worker pool that is asked for where a worker of another rank is late over a sample (sharing/helpers.py)."""

    def stack(self, record: int) -> str:
        """As of a worker pool."""

    def kill(self, record: int) -> Death:
        """As of a worker pool."""

    def replace(self, record: int) -> None:
        """Makes way for another."""


class Supervisor:
    """Sees to the deaths of one worker pool.

    Args:
        worker_set: which workers there are to be.
        max_restarts: deaths that may be mended; None: any number.
        order_in: the order that stands in a slot, if one does.
        sample_timeout_s: how long one sample may take before its worker is ended; None: for ever.
    """

    def __init__(
        self,
        ring: TrainerRing,
        pool: WorkerPool,
        worker_set: WorkerSet,
        max_restarts: int | None,
        order_in: Callable[[int], Order | None],
        *,
        sample_timeout_s: float | None = None,
        tolerates_bad_samples: bool = False,
    ) -> None:
        self._ring = ring
        self._pool = pool
        self._worker_set = worker_set
        self._max_restarts = max_restarts
        self._order_in = order_in
        self._sample_timeout_s = sample_timeout_s
        self._tolerates_bad_samples = tolerates_bad_samples
        self.helpers: TimedHelpers | None = None  # workers of other ranks, whose numbers are beyond the worker pool's
        self._kills: Counter[str] = Counter()  # by what a worker died over, in words
        self._poisoned: dict[int, FatalRow] = {}  # by slot
        self._unbegun: dict[int, int] = {}  # late worker -> the order of which it had begun no row when last looked at
        self._num_restarts = 0
        self._last_pid = 0  # of the process that died last
        self.num_vain = 0  # deaths of workers with nothing to do, since a batch came: whoever delivers one sets it back
        self.num_taken_back = 0

    def see_to(self, death: Death) -> LoaderEnd | None:
        """Opens a dead worker's rows again and replaces it, if it is wanted; or says why that may not be."""
        held = self._ring.held_by(death.worker_id)
        if held is None and self._worker_set.was_told(death.worker_id):
            self._ring.recover(death.worker_id)
            self._worker_set.has_gone(death.worker_id)
            return None
        is_idle = held is None or not self._pool.reads_samples(death.worker_id)
        work = None if held is None or is_idle else self._blame(held[0], held[3])
        if self._max_restarts is not None and self._num_restarts >= self._max_restarts:
            return _verdict(f"DataLoader worker (pid(s) {death.pid}) exited unexpectedly", death, work)
        if is_idle and death.pid != self._last_pid:  # an agent of many workers dies once
            self.num_vain += 1
            if self.num_vain >= VAIN_DEATHS:
                return _verdict(f"{death}, the {self.num_vain}th in a row that ended with nothing to do", death, None)
        self._last_pid = death.pid
        is_deadly = held is not None and work is not None and self._kills[work] >= 2
        if is_deadly and held is not None:
            self._poisoned[held[0]] = FatalRow(f"{work} ended its worker twice: {death}", held[3])
        while self._ring.recover(death.worker_id, poison=is_deadly) >= 0:  # a Ray worker pool's worker holds several
            self.num_taken_back += 1
        fate = "when it was about to leave" if self._worker_set.was_told(death.worker_id) else "it is replaced"
        log.warning("%s%s; %s", death, "" if work is None else f" on {work}", fate)
        self._replace(death.worker_id)
        self._num_restarts += 1
        return None

    def see_to_timeouts(self) -> int:
        """Ends and replaces workers whose sample takes too long; their batches fail over it. Returns how many."""
        if self._sample_timeout_s is None:
            return 0
        return sum(self._end_if_timed_out(worker) for worker in range(self._ring.num_workers))

    def _end_if_timed_out(self, worker: int) -> bool:
        if not self._pool.reads_samples(worker):  # an actor is watched where it is
            return False
        held = self._ring.held_by(worker)
        since_ns = self._ring.worker(worker)["since_ns"]
        # 0: it is at no sample, but waits for the trainer or collates
        has_timed_out = held is not None and since_ns and (monotonic_ns() - since_ns) / 1e9 > (self._sample_timeout_s or 0)
        if held is None or not has_timed_out:
            self._unbegun.pop(worker, None)
            return False
        slot, _, number, row = held
        if row < 0 and self._unbegun.get(worker) != number:
            self._unbegun[worker] = number  # the time may be an earlier claim's: it is looked at again
            return False
        what = self._what_timed_out(worker, slot, row)
        owner = self._owner_of(worker)
        stack = owner.stack(worker)
        death = owner.kill(worker)
        text = timeout_text(what, self._sample_timeout_s, worker, death.pid, stack)
        if row >= 0:  # else it stood still before its first sample, which says nothing of any
            text += REMEDY
            self._poisoned[slot] = FatalRow(text, row, SampleTimeout)
        is_raised = row >= 0 and not self._tolerates_bad_samples  # with all that is said here
        log.log(logging.DEBUG if is_raised else logging.WARNING, "%s", text)
        self._ring.recover(worker, poison=row >= 0)
        self._replace(worker)
        return True

    def _what_timed_out(self, worker: int, slot: int, row: int) -> str:
        order = self._order_in(slot)
        if row < 0:
            return f"{'a batch' if order is None else self._work_of(order, row)} was claimed, and no sample of it begun for"
        sample = f"sample {self._ring.worker(worker)['index']}" if order is None else self._work_of(order, row)
        return f"{sample} took longer than"

    def _replace(self, worker: int) -> None:
        """Starts another in the place of one that has ended, unless it was about to leave anyway."""
        if self._worker_set.was_told(worker):
            self._worker_set.has_gone(worker)
        else:
            self._owner_of(worker).replace(worker)
        self._ring.count_restart(worker)

    def _owner_of(self, worker: int) -> WorkerPool | TimedHelpers:
        """Who has this worker in hand."""
        return self._pool if self.helpers is None or worker < self._ring.num_wanted else self.helpers

    def death_over(self, slot: int) -> FatalRow:
        """What happened to the workers of a slot that was given up."""
        return self._poisoned.pop(slot, FatalRow("a sample ended its worker twice", -1))

    def _blame(self, slot: int, row: int) -> str | None:
        """Notes that a worker died over a row of the slot (-1: over the batch); says in words what it worked on."""
        order = self._order_in(slot)
        if order is None:
            return None
        work = self._work_of(order, row)
        self._kills[work] += 1
        return work

    def _work_of(self, order: Order, row: int) -> str:
        batch = self._ring.batch_of(order.step)
        if row < 0:
            return f"batch {batch} of epoch {order.epoch}"
        return sample_at(order.indices[row], order.epoch, row, batch)


def _verdict(text: str, death: Death, work: str | None) -> LoaderEnd:
    code = death.exitcode or 0
    if code < 0:
        cause = f"DataLoader worker (pid {death.pid}) is killed by signal: {signal.strsignal(-code)}. "
        if -code == signal.SIGBUS:
            cause += "It is possible that dataloader's workers are out of shared memory. "
            cause += "Please try to raise your shared memory limit."
    else:
        cause = (
            f"DataLoader worker (pid {death.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
    return LoaderEnd(text, cause, "" if work is None else f"shmload: it was at {work}")
