"""Handle the deaths of workers: recover their rows, replace them, or end the loader with an error.

In seed mode, a dead worker is replaced as often as needed, but a sample that ends two workers is bad, and repeated deaths of
workers with nothing to do end the loader. In torch mode, the first death ends the loader, as in torch, because the dead worker's
random stream cannot be recovered. `max_restarts` sets a limit in both modes, over the loader's whole life.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.util import is_exiting
from time import monotonic_ns
from typing import Any, TypeAlias

from shmload._core.trainer import Order, TrainerRing
from shmload.engine.config import LoaderConfig
from shmload.engine.restart_limit import RestartLimit
from shmload.engine.worker_set import WorkerSet
from shmload.errors import SampleTimeout, ShmloadError, WorkerDied
from shmload.worker.failure import REMEDY, sample_at, timeout_text
from shmload.worker.pool import Death, WorkerPool, context_of

log = logging.getLogger("shmload")

# rows that must not be read again (empty if they are unknown), and the error to raise for them
Fatal: TypeAlias = tuple[tuple[int, ...], Callable[[], ShmloadError]]

IDLE_DEATHS_MAX = 10  # deaths of workers without a claim since the last batch, at which the loader ends


class Supervisor:
    """The handler of one worker pool's deaths and timeouts.

    Args:
        ring: the trainer's end of the ring.
        pool: the worker pool.
        workers: knows the workers that are wanted, and those that are leaving.
        config: arguments of the loader.
        restarts: how many dead workers may still be replaced.
        queue: the orders that are submitted and not delivered. It is the engine's own, and not a method of the engine, because the
            cycle would keep the dataset in memory until the garbage collector runs.
        helpers: workers of other ranks, numbered after the pool's own (sharing/balancing.py); None if there are none. It has the
            methods `stack`, `kill` and `replace` of a pool.

    Attributes:
        num_idle_deaths: deaths of workers with nothing to do since the last batch; the engine sets it to 0 with each batch.
        num_taken_back: chunks that were recovered from dead workers.
    """

    def __init__(
        self,
        ring: TrainerRing,
        pool: WorkerPool,
        workers: WorkerSet,
        config: LoaderConfig,
        restarts: RestartLimit,
        queue: Iterable[Order],
        helpers: Any = None,
    ) -> None:
        self._ring, self._pool, self._workers, self._queue = ring, pool, workers, queue
        self._restarts = restarts
        self._sample_timeout_s, self._num_threads = config.sample_timeout_s, config.threads_per_worker
        self._tolerates_bad_samples = config.on_error != "raise"
        self._context = config.multiprocessing_context
        self._helpers = helpers
        self._kills: Counter[tuple[str, int]] = Counter()  # number of deaths by (description of the sample or batch, order number)
        self._poisoned: dict[int, Fatal] = {}  # by slot
        self._late: dict[int, tuple[int, int]] = {}  # by worker: order and row (-1: none begun) that were late at the last check
        self._last_pid = 0  # pid of the process that died last
        self.num_idle_deaths = 0
        self.num_taken_back = 0

    def handle(self, death: Death) -> Callable[[], WorkerDied] | None:
        """Recover a dead worker's rows and replace it. If it may not be replaced, return the error that ends the loader.

        Args:
            death: the worker, and its exit code.
        """
        held = self._ring.held_by(death.worker_id)
        if held is None and death.worker_id in self._workers.leaving:
            self._ring.recover(death.worker_id)
            self._workers.forget(death.worker_id)
            return None
        is_idle = held is None or not self._pool.reads_samples(death.worker_id)
        slot, _, number, row = held or (-1, 0, 0, -1)
        work, row, num_kills = (None, row, 0) if is_idle else self._blame(slot, row, number)
        hint = self._hint_on_start(death)
        if self._restarts.num_left == 0:
            rule = self._restarts.rule
            return _death_error(f"DataLoader worker (pid(s) {death.pid}) exited unexpectedly{hint}", death, work, rule)
        if is_idle and death.pid != self._last_pid:  # workers may share a process, which dies once
            self.num_idle_deaths += 1
            if self.num_idle_deaths >= IDLE_DEATHS_MAX:
                text = f"it is the {self.num_idle_deaths}th worker in a row to die with nothing to do"
                return _death_error(f"{death}; {text}{hint or '; check worker_init_fn and dmesg'}", death, None)
        self._last_pid = death.pid
        is_deadly = num_kills >= 2
        if is_deadly:
            self._poisoned[slot] = (row,) if row >= 0 else (), partial(WorkerDied, f"{work} ended its worker twice: {death}")
        while self._ring.recover(death.worker_id, poison=is_deadly) >= 0:  # a Ray actor holds several
            self.num_taken_back += 1
        fate = "it was about to leave" if death.worker_id in self._workers.leaving else "it is replaced"
        if not is_exiting():  # during exit Python ends its children, while a thread of the program may still read
            log.warning("%s%s; %s", death, "" if work is None else f" on {work}", fate)
        self._replace(death.worker_id)
        self._restarts.use_one()
        return None

    def _hint_on_start(self, death: Death) -> str:
        """Return the likely cause of a death, as the end of a sentence, if the worker has not begun its work; otherwise nothing."""
        has_begun = self._ring.worker(death.worker_id)["started_ns"]
        if has_begun or not death.exitcode or death.exitcode < 0 or context_of(self._context).get_start_method() == "fork":
            return ""
        return "; it died while it started and imported the program: is its code under `if __name__ == '__main__':`?"

    def end_if_timed_out(self, worker: int) -> bool:
        """Kill and replace a worker whose sample takes longer than `sample_timeout_s`. Return whether it was replaced.

        If the sample is known, it counts as bad. Otherwise the rows of the chunk are read again, one by one.

        Args:
            worker: number of the worker.
        """
        if not self._pool.reads_samples(worker):  # an actor is watched on its own machine
            return False
        held = self._ring.held_by(worker)
        since_ns = self._ring.worker(worker)["since_ns"]
        # `since_ns` is 0 while the worker does not read a sample, but waits for the trainer or collates
        has_timed_out = held is not None and since_ns and (monotonic_ns() - since_ns) / 1e9 > (self._sample_timeout_s or 0)
        if held is None or not has_timed_out:
            self._late.pop(worker, None)
            return False
        slot, _, number, row = held
        if self._late.get(worker) != (number, row):
            # check again later: the time may belong to an earlier claim, or the whole machine may have been paused
            self._late[worker] = number, row
            return False
        order = self._order_in(slot)
        if row < 0:
            batch = "a batch" if order is None else self._described(order, row)
            what = f"{batch} was claimed, and no single sample of it was begun, for"
        else:
            sample = f"sample {self._ring.worker(worker)['index']}" if order is None else self._described(order, row)
            what = f"{sample} took longer than"
        self._late.pop(worker)
        owner = self._owner_of(worker)
        stack = owner.stack(worker)
        death = owner.kill(worker)
        if death is None:
            return False
        text = timeout_text(what, self._sample_timeout_s, worker, death.pid, stack, is_thread=death.is_thread)
        if self._ring.held_by(worker) != held:
            row = -1  # it went on just before it ended, so the sample is not to blame
        if row >= 0:  # otherwise it hung before its first sample, or while it read several, which are read one by one from now on
            text += REMEDY
            self._poisoned[slot] = (row,), partial(SampleTimeout, text)
        is_raised = row >= 0 and not self._tolerates_bad_samples  # the error has the text of the warning
        log.log(logging.DEBUG if is_raised else logging.WARNING, "%s", text)
        self._ring.recover(worker, poison=row >= 0)
        self._replace(worker)
        return True

    def _replace(self, worker: int) -> None:
        """Replace a worker that has ended, unless it was about to leave."""
        if worker in self._workers.leaving:
            self._workers.forget(worker)
        else:
            self._owner_of(worker).replace(worker)
        self._ring.count_restart(worker)

    def _owner_of(self, worker: int) -> Any:
        """Return the pool or the helpers, to which the worker belongs."""
        return self._pool if self._helpers is None or worker < self._ring.num_wanted else self._helpers

    def give_up_rows(self, slot: int) -> Fatal:
        """Return the bad rows of a slot and the function that returns their error; called once, when the slot's batch is next."""
        return self._poisoned.pop(slot, ((), partial(WorkerDied, "a sample ended its worker twice")))

    def _blame(self, slot: int, row: int, number: int) -> tuple[str | None, int, int]:
        """Count the death of a worker that was reading a row of the slot, or the whole batch (-1).

        If several threads read rows at once, any of them may have been the cause. The first death then counts for the batch, whose
        rows are read one by one afterwards. A batch that is ordered again without its bad rows has a new order number, so it starts
        over with its rows read together.

        Args:
            slot: slot of the batch.
            row: row that was being read, or -1.
            number: order number of the batch.
        Returns:
            description of the sample or batch, None if it was abandoned; the row, -1 if unknown; deaths so far while reading it.
        """
        order = self._order_in(slot)
        if order is None:
            return None, row, 0
        of_batch = self._described(order, -1), number
        if self._num_threads > 1 and not self._kills[of_batch]:
            row = -1
        blamed = of_batch if row < 0 else (self._described(order, row), 0)
        self._kills[blamed] += 1
        return blamed[0], row, self._kills[blamed]

    def _order_in(self, slot: int) -> Order | None:
        return next((order for order in self._queue if order.slot == slot), None)

    def _described(self, order: Order, row: int) -> str:
        batch = self._ring.batch_of(order.step)
        if row < 0:
            return f"batch {batch} of epoch {order.epoch}"
        return sample_at(order.indices[row], order.epoch, row, batch)


def _death_error(text: str, death: Death, work: str | None, rule: str = "") -> Callable[[], WorkerDied]:
    """Return a function that makes the error of a death, with torch's own text as its cause, and `rule` in its note."""
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

    def error() -> WorkerDied:
        made = WorkerDied(text)
        made.__cause__ = RuntimeError(cause)
        if work is not None or rule:
            made.add_note(f"shmload: {death}{'' if work is None else f' while reading {work}'}{rule}")
        return made

    return error  # a function, so that each raise gets a new error: a raised one keeps its frames alive
