"""What a worker's death means: its rows are done again by a new worker, or it ends the loader.

In seed mode a worker is replaced as often as need be, but a sample that ends its worker twice is given up, and so is a loader whose
workers keep dying with nothing to do. In torch mode the first death is the end, as in torch, unless `max_restarts` says otherwise:
the dead worker's own random stream cannot be recovered.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shmload._core.trainer import TrainerRing
from shmload.engine.worker_set import Roster
from shmload.errors import SampleTimeout, ShmloadError, WorkerDied
from shmload.worker.crew import Crew, Death
from shmload.worker.failure import REMEDY, late_text, sample_at

if TYPE_CHECKING:
    from shmload._core.trainer import Order

log = logging.getLogger("shmload")

VAIN_DEATHS = 10  # in a row, of workers with no claim and no batch delivered between: the next would die, too


class Verdict(NamedTuple):
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


class LateGuests(Protocol):
    """The part of a crew that is asked for where a worker of another rank is late over a sample (sharing/guests.py)."""

    def stack(self, record: int) -> str:
        """As of a crew."""

    def kill(self, record: int) -> Death:
        """As of a crew."""

    def replace(self, record: int) -> None:
        """Makes way for another."""


class Supervisor:
    """Sees to the deaths of one crew.

    Args:
        roster: which workers there are to be.
        max_restarts: deaths that may be mended; None: any number.
        order_in: the order that stands in a slot, if one does.
        sample_timeout_s: how long one sample may take before its worker is ended; None: for ever.
    """

    def __init__(
        self,
        ring: TrainerRing,
        crew: Crew,
        roster: Roster,
        max_restarts: int | None,
        order_in: Callable[[int], Order | None],
        *,
        sample_timeout_s: float | None = None,
        tolerates_bad_samples: bool = False,
    ) -> None:
        self._ring = ring
        self._crew = crew
        self._roster = roster
        self._max_restarts = max_restarts
        self._order_in = order_in
        self._sample_timeout_s = sample_timeout_s
        self._tolerates_bad_samples = tolerates_bad_samples
        self.guests: LateGuests | None = None  # workers of other ranks, whose numbers are beyond the crew's
        self._kills: Counter[str] = Counter()  # by what a worker died over, in words
        self._poisoned: dict[int, FatalRow] = {}  # by slot
        self._unbegun: dict[int, int] = {}  # late worker -> the order of which it had begun no row when last looked at
        self._num_restarts = 0
        self._last_pid = 0  # of the process that died last
        self.num_vain = 0  # deaths of workers with nothing to do, since a batch came: whoever delivers one sets it back
        self.num_taken_back = 0

    def see_to(self, death: Death) -> Verdict | None:
        """Opens a dead worker's rows again and replaces it, if it is wanted; or says why that may not be."""
        held = self._ring.held_by(death.worker_id)
        if held is None and self._roster.was_told(death.worker_id):
            self._ring.recover(death.worker_id)
            self._roster.has_gone(death.worker_id)
            return None
        is_idle = held is None or not self._crew.reads_samples(death.worker_id)
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
        while self._ring.recover(death.worker_id, poison=is_deadly) >= 0:  # a Ray crew's worker holds several
            self.num_taken_back += 1
        fate = "when it was about to leave" if self._roster.was_told(death.worker_id) else "it is replaced"
        log.warning("%s%s; %s", death, "" if work is None else f" on {work}", fate)
        self._replace(death.worker_id)
        self._num_restarts += 1
        return None

    def see_to_late(self) -> int:
        """Ends and replaces workers whose sample takes too long; their batches fail over it. Returns how many."""
        if self._sample_timeout_s is None:
            return 0
        return sum(self._end_if_late(worker) for worker in range(self._ring.num_workers))

    def _end_if_late(self, worker: int) -> bool:
        if not self._crew.reads_samples(worker):  # an actor is watched where it is
            return False
        held = self._ring.held_by(worker)
        since_ns = self._ring.worker(worker)["since_ns"]
        # 0: it is at no sample, but waits for the trainer or collates
        is_late = held is not None and since_ns and (monotonic_ns() - since_ns) / 1e9 > (self._sample_timeout_s or 0)
        if held is None or not is_late:
            self._unbegun.pop(worker, None)
            return False
        slot, _, number, row = held
        if row < 0 and self._unbegun.get(worker) != number:
            self._unbegun[worker] = number  # the time may be an earlier claim's: it is looked at again
            return False
        what = self._what_is_late(worker, slot, row)
        keeper = self._keeper_of(worker)
        stack = keeper.stack(worker)
        death = keeper.kill(worker)
        text = late_text(what, self._sample_timeout_s, worker, death.pid, stack)
        if row >= 0:  # else it stood still before its first sample, which says nothing of any
            text += REMEDY
            self._poisoned[slot] = FatalRow(text, row, SampleTimeout)
        is_raised = row >= 0 and not self._tolerates_bad_samples  # with all that is said here
        log.log(logging.DEBUG if is_raised else logging.WARNING, "%s", text)
        self._ring.recover(worker, poison=row >= 0)
        self._replace(worker)
        return True

    def _what_is_late(self, worker: int, slot: int, row: int) -> str:
        order = self._order_in(slot)
        if row < 0:
            return f"{'a batch' if order is None else self._work_of(order, row)} was claimed, and no sample of it begun for"
        sample = f"sample {self._ring.worker(worker)['index']}" if order is None else self._work_of(order, row)
        return f"{sample} took longer than"

    def _replace(self, worker: int) -> None:
        """Starts another in the place of one that has ended, unless it was about to leave anyway."""
        if self._roster.was_told(worker):
            self._roster.has_gone(worker)
        else:
            self._keeper_of(worker).replace(worker)
        self._ring.count_restart(worker)

    def _keeper_of(self, worker: int) -> Crew | LateGuests:
        """Who has this worker in hand."""
        return self._crew if self.guests is None or worker < self._ring.num_wanted else self.guests

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


def _verdict(text: str, death: Death, work: str | None) -> Verdict:
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
    return Verdict(text, cause, "" if work is None else f"shmload: it was at {work}")
