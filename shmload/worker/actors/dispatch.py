"""Who claims: one thread for the workers that share a bell, which gives each claim to the worker with the least under way.

In seed mode all workers share one bell, and so one dispatcher; in torch mode each worker has its own of both. A claim is sent to
its actor by the dispatcher, so that an actor is asked in the order of claims; a thread of the stand-in's own waits for what comes.

Where processes of this machine claim from the same ring, `beside.py` says which orders are left to them.
"""

from __future__ import annotations

import os
import threading
import traceback
from queue import Empty, SimpleQueue
from time import monotonic

from shmload.shm.doorbell import Doorbell
from shmload.worker.actors.beside import Beside
from shmload.worker.actors.cluster import Cluster
from shmload.worker.actors.stand_in import StandIn
from shmload.worker.birth import process_begin_ns
from shmload.worker.slot_memory import LOOK_AGAIN_S


class Dispatcher:
    """Claims for some workers.

    Args:
        stand_ins: of each worker.
        orders: the bell that these workers share.
        beside: the processes of this machine that claim from the same ring, if there are any.
    """

    def __init__(
        self, cluster: Cluster, stand_ins: list[list[StandIn]], orders: Doorbell, beside: Beside | None = None
    ) -> None:
        self._cluster = cluster
        self._orders = orders
        self._free = [list(of_worker) for of_worker in stand_ins]
        self._num_each = len(stand_ins[0])
        self._beside = beside
        self._begun: dict[
            StandIn, tuple[int, float]
        ] = {}  # errands its worker had when it claimed, and when; if anyone asks
        self._back: SimpleQueue[tuple[int, StandIn, float]] = SimpleQueue()  # that are free again, and since when
        self._sent: dict[StandIn, SimpleQueue[None]] = {}
        for place, of_worker in enumerate(stand_ins):
            for stand_in in of_worker:
                self._sent[stand_in] = SimpleQueue()
                threading.Thread(target=self._serve, args=(place, stand_in), daemon=True).start()

    def run(self) -> None:
        """Claims until the trainer closes the ring."""
        first = self._free[0][0].ring
        for of_worker in self._free:
            of_worker[0].ring.announce(process_begin_ns())
        while first.is_wanted:
            place = self._least_busy()
            if place < 0:
                self._take_back(LOOK_AGAIN_S)
                continue
            stand_in = self._free[place][-1]
            num_under_way = self._num_each - len(self._free[place])
            began_s = monotonic()
            if stand_in.ring.claim(0 if self._beside is None else self._beside.num_left(num_under_way)):
                self._free[place].pop()
                self._begun[stand_in] = num_under_way, began_s
                stand_in.begin()
                self._sent[stand_in].put(None)
                self._take_back(0)
            else:
                self._wait()
        self._orders.post()  # as Body.run

    def _least_busy(self) -> int:
        """The worker to claim for; -1: none has a stand-in to spare, or would be done in time."""
        best, most = -1, 0
        for place, free in enumerate(self._free):
            if len(free) <= most or self._cluster.is_repeating(free[-1].ring.worker_id):
                continue
            if self._beside is None or self._beside.may_claim(place, self._num_each - len(free)):
                best, most = place, len(free)
        return best

    def _take_back(self, timeout_s: float) -> None:
        """Takes back stand-ins that are free again; waits so long for the first."""
        try:
            place, stand_in, ended_s = self._back.get(timeout_s > 0, timeout_s or None)
            while True:
                self._free[place].append(stand_in)
                if self._beside is not None:
                    self._beside.answered(place, *self._begun[stand_in], ended_s)
                place, stand_in, ended_s = self._back.get_nowait()
        except Empty:
            pass

    def _wait(self) -> None:
        """Waits for orders; says so of workers that have nothing under way."""
        idle = [free[0].ring for free in self._free if len(free) == self._num_each]
        for ring in idle:
            ring.waiting(True)
        self._orders.wait(LOOK_AGAIN_S)
        for ring in idle:
            ring.waiting(False)
        self._take_back(0)

    def _serve(self, place: int, stand_in: StandIn) -> None:
        try:
            while True:
                self._sent[stand_in].get()
                stand_in.end()
                self._back.put((place, stand_in, monotonic()))
                if self._beside is not None:  # its actor may have nothing left to do, and take what was left alone
                    self._orders.post_up_to(1)
        except BaseException:  # its claim would stay open for ever: the trainer must see a death
            traceback.print_exc()
            os._exit(1)
