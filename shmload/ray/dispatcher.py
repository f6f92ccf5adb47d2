"""Claim orders from the ring in a thread of the agent, each for the worker with the fewest tasks in progress.

In seed mode all workers share one bell and so one dispatcher; in torch mode each worker has its own bell and dispatcher. The
dispatcher itself sends the claim, so that an actor gets tasks in the order of claims. Each proxy has a thread that waits for the
reply.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from shmload.ray.actor_set import ActorSet
from shmload.ray.local_processes import LocalProcesses
from shmload.ray.worker_proxy import WorkerProxy
from shmload.shm.doorbell import Doorbell
from shmload.worker.loop import process_begin_ns
from shmload.worker.slot_memory import LOOK_AGAIN_S


class Dispatcher:
    """The claims of the workers that share a bell. A thread calls `run`.

    Args:
        actors: the actors of all workers.
        proxies: the proxies of each worker.
        orders: the bell that these workers share.
        local: the processes of this machine that claim from the same ring; None if there are none.
    """

    def __init__(
        self, actors: ActorSet, proxies: list[list[WorkerProxy]], orders: Doorbell, local: LocalProcesses | None = None
    ) -> None:
        self._actors = actors
        self._orders = orders
        self._free = [list(of_worker) for of_worker in proxies]
        self._num_each = len(proxies[0])
        self._local = local
        self._begun: dict[WorkerProxy, tuple[int, float]] = {}  # (tasks of its worker at the claim, time of the claim)
        self._back: SimpleQueue[tuple[int, WorkerProxy, float] | None] = SimpleQueue()  # free proxies, with the time
        self._sent: dict[WorkerProxy, SimpleQueue[None]] = {}
        actors.when_started.append(lambda: self._back.put(None))
        for place, of_worker in enumerate(proxies):
            for proxy in of_worker:
                self._sent[proxy] = SimpleQueue()
                start_or_exit(self._serve, place, proxy)

    def run(self) -> None:
        """Claim orders until the trainer closes the ring."""
        first = self._free[0][0].ring
        for of_worker in self._free:
            of_worker[0].ring.announce(process_begin_ns())
        while first.is_wanted:
            place = self._least_busy()
            if place < 0:
                self._take_back(LOOK_AGAIN_S)
                continue
            proxy = self._free[place][-1]
            num_under_way = self._num_each - len(self._free[place])
            began_s = monotonic()
            if proxy.ring.claim(0 if self._local is None else self._local.num_skipped(num_under_way)):
                self._free[place].pop()
                self._begun[proxy] = num_under_way, began_s
                proxy.begin()
                self._sent[proxy].put(None)
                self._take_back(0)
            else:
                self._wait()
        self._orders.post()  # as WorkerLoop.run does

    def _least_busy(self) -> int:
        """Return the place in `proxies` of the worker to claim for; -1 if none has a free proxy and an actor that may claim."""
        best, most = -1, 0
        for place, free in enumerate(self._free):
            if len(free) <= most:
                continue
            worker = free[-1].ring.worker_id
            if self._actors.is_repeating(worker) or not self._actors.may_claim(worker):
                continue
            if self._local is None or self._local.may_claim(place, self._num_each - len(free)):
                best, most = place, len(free)
        return best

    def _take_back(self, timeout_s: float) -> None:
        """Take back proxies that are free again; wait up to `timeout_s` for the first, or until an actor has started."""
        try:
            back = self._back.get(timeout_s > 0, timeout_s or None)
            while True:
                if back is not None:
                    place, proxy, ended_s = back
                    self._free[place].append(proxy)
                    if self._local is not None:
                        self._local.answered(place, *self._begun[proxy], ended_s)
                back = self._back.get_nowait()
        except Empty:
            pass

    def _wait(self) -> None:
        """Wait for orders. During that time, workers without a task are marked as waiting."""
        idle = [free[0].ring for free in self._free if len(free) == self._num_each]
        for ring in idle:
            ring.waiting(True)
        self._orders.wait(LOOK_AGAIN_S)
        for ring in idle:
            ring.waiting(False)
        self._take_back(0)

    def _serve(self, place: int, proxy: WorkerProxy) -> None:
        while True:
            self._sent[proxy].get()
            proxy.end()
            self._back.put((place, proxy, monotonic()))
            if self._local is not None:  # its actor may now be idle, and take an order that was skipped
                self._orders.post_up_to(1)


def start_or_exit(run: Callable[..., None], *args: object) -> threading.Thread:
    """Start a daemon thread that ends the agent if `run` fails, because its claim would otherwise stay open forever.

    The trainer handles the agent's death.

    Args:
        run: the function to run.
        args: its arguments.
    """

    def run_or_die() -> None:
        try:
            run(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=run_or_die, daemon=True)
    thread.start()
    return thread
