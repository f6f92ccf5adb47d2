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
from typing import TYPE_CHECKING, NamedTuple

from shmload._core.trainer import TrainerRing
from shmload.errors import WorkerDied
from shmload.worker.crew import Crew, Death

if TYPE_CHECKING:
    from shmload.engine import Order

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


class Supervisor:
    """Sees to the deaths of one crew.

    Args:
        max_restarts: deaths that may be mended; None: any number.
        order_in: the order that stands in a slot, if one does.
    """

    def __init__(
        self, ring: TrainerRing, crew: Crew, max_restarts: int | None, order_in: Callable[[int], Order | None]
    ) -> None:
        self._ring = ring
        self._crew = crew
        self._max_restarts = max_restarts
        self._order_in = order_in
        self._kills: Counter[str] = Counter()  # by what a worker died over, in words
        self._poisoned: dict[int, str] = {}  # slot -> what happened to its workers
        self._num_restarts = 0
        self._num_vain = 0
        self.num_taken_back = 0

    def see_to(self, death: Death) -> Verdict | None:
        """Opens a dead worker's rows again and replaces it; or says why that may not be."""
        held = self._ring.held_by(death.worker_id)
        work = None if held is None else self._blame(held[0], held[3])
        if self._max_restarts is not None and self._num_restarts >= self._max_restarts:
            return _verdict(f"DataLoader worker (pid(s) {death.pid}) exited unexpectedly", death, work)
        if held is None:
            self._num_vain += 1
            if self._num_vain >= VAIN_DEATHS:
                return _verdict(f"{death}, the {self._num_vain}th in a row that ended with nothing to do", death, None)
        is_deadly = held is not None and work is not None and self._kills[work] >= 2
        if is_deadly and held is not None:
            self._poisoned[held[0]] = f"{work} ended its worker twice: {death}"
        if self._ring.recover(death.worker_id, poison=is_deadly) >= 0:
            self.num_taken_back += 1
        log.warning("%s%s; it is replaced", death, "" if work is None else f" on {work}")
        self._ring.count_restart()
        self._num_restarts += 1
        self._crew.replace(death.worker_id)
        return None

    def batch_came(self) -> None:
        """Notes that workers do get something done."""
        self._num_vain = 0

    def story_of(self, slot: int) -> str:
        """What happened to the workers of a slot that was given up."""
        return self._poisoned.pop(slot, "a sample ended its worker twice")

    def _blame(self, slot: int, row: int) -> str | None:
        """Notes that a worker died over a row of the slot (-1: over the batch); says in words what it worked on."""
        order = self._order_in(slot)
        if order is None:
            return None
        work = f"batch {order.step} of epoch {order.epoch}"
        if row >= 0:
            work = f"sample {order.indices[row]} of epoch {order.epoch} (row {row} of batch {order.step})"
        self._kills[work] += 1
        return work


def _verdict(text: str, death: Death, work: str | None) -> Verdict:
    code = death.exitcode or 0
    if code < 0:
        cause = f"DataLoader worker (pid {death.pid}) is killed by signal: {signal.strsignal(-code)}. "
    else:
        cause = (
            f"DataLoader worker (pid {death.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
    return Verdict(text, cause, "" if work is None else f"shmload: it was at {work}")
