"""Several tasks at one actor at a time: which worker claims, which task is blamed for a death, and what persists between passes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from shmload import Ray, ShmLoader
from shmload.ray.dispatcher import Dispatcher
from shmload.ray.local_processes import LocalProcesses
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, generator
from tests.ray.ray_datasets import Deadly, Rows
from tests.ray.torch_datasets import Drawing

slow = pytest.mark.slow(reason="starts actors on a Ray cluster")


class Ring:
    """Gives `num_orders` orders to claiming workers and then closes."""

    def __init__(self, num_orders: int) -> None:
        self.num_orders = num_orders
        self.claims: list[int] = []
        self.waiting: list[int] = []


class View:
    def __init__(self, ring: Ring, worker_id: int) -> None:
        self.ring, self.worker_id = ring, worker_id

    @property
    def is_wanted(self) -> bool:
        return not self.ring.waiting

    def announce(self, begun_ns: int) -> None: ...

    def claim(self, num_left: int = 0) -> bool:
        if len(self.ring.claims) + num_left >= self.ring.num_orders:
            return False
        self.ring.claims.append(self.worker_id)
        return True

    def waiting(self, on: bool) -> None:
        if on:
            self.ring.waiting.append(self.worker_id)


class Slot:
    """A slot whose task never finishes."""

    def __init__(self, ring: Ring, worker_id: int) -> None:
        self.ring = View(ring, worker_id)

    def begin(self) -> None: ...

    def end(self) -> None:
        threading.Event().wait()


class Bell:
    def __init__(self, ring: Ring) -> None:
        self.ring, self.num_rung = ring, 0

    def post(self) -> None:
        self.num_rung += 1

    def wait(self, timeout_s: float) -> bool:
        self.ring.waiting.append(-1)  # closes the ring
        return False


class Idle:
    """Processes that have not finished anything yet."""

    def pace_of(self, worker_id: int) -> tuple[int, int]:
        return 0, 0


class Repeating:
    def __init__(self, *workers: int, starting: int = -1) -> None:
        self.workers, self.starting = workers, starting
        self.when_started: list[Any] = []

    def may_claim(self, worker: int) -> bool:
        return worker != self.starting

    def is_repeating(self, worker: int) -> bool:
        return worker in self.workers


def dispatched(num_orders: int, *repeating: int, local: LocalProcesses | None = None, starting: int = -1) -> Ring:
    ring = Ring(num_orders)
    slots: Any = [[Slot(ring, worker) for _ in range(3)] for worker in range(3)]
    bell: Any = Bell(ring)
    Dispatcher(Repeating(*repeating, starting=starting), slots, bell, local).run()  # type: ignore[arg-type]  # as much as it needs of a cluster
    assert bell.num_rung == 1  # the wake-up may have been meant for another worker, so it is passed on
    return ring


def test_worker_with_the_fewest_tasks_claims_next() -> None:
    assert dispatched(7).claims == [0, 1, 2, 0, 1, 2, 0]


def test_worker_that_repeats_a_task_gets_no_other() -> None:
    assert dispatched(4, 1).claims == [0, 2, 0, 2]


def test_worker_whose_actor_has_not_started_gets_nothing() -> None:
    assert dispatched(4, starting=0).claims == [1, 2, 1, 2]


def test_local_processes_get_the_oldest_orders_when_actors_are_busy() -> None:
    def claims(num_orders: int) -> list[int]:
        ring: Any = Idle()
        return dispatched(num_orders, local=LocalProcesses(ring, range(3, 5), 6)).claims

    assert claims(5) == [0, 1, 2]
    assert claims(6) == [0, 1, 2, 0]
    assert claims(2) == [0, 1]  # an idle worker takes an order at once


def test_only_idle_workers_are_reported_as_waiting() -> None:
    assert dispatched(1).waiting == [1, 2, -1]


@slow
def test_tasks_queued_after_a_deadly_one_are_not_blamed(cluster: Cluster, tmp_path: Path) -> None:
    ordered: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 1, "prefetch_factor": 4}
    far = ShmLoader(Deadly(str(tmp_path), {5: 3}, 32), **ordered, backend=Ray(address=cluster.address))
    with far, ShmLoader(Rows(32), **ordered) as local:
        assert_same(copied_batches(local), copied_batches(far))
    assert len(list(tmp_path.iterdir())) == 3


@slow
def test_persistent_workers_keep_their_actors_and_streams_from_pass_to_pass(cluster: Cluster) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        return ShmLoader(Drawing(), 4, shuffle=True, num_workers=1, persistent_workers=True, generator=generator(), **pool)

    with make() as local, make(backend=Ray(address=cluster.address)) as far:
        assert_same(copied_batches(local), copied_batches(far))
        actors = cluster.ask("actors")
        assert_same(copied_batches(local), copied_batches(far))
        assert actors == cluster.ask("actors")
