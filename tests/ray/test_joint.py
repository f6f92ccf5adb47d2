"""Two kinds of workers in one worker pool: each call reaches the kind that it concerns. None of these tests needs Ray."""

from __future__ import annotations

from typing import Any

import pytest

from shmload.ray.joint_pool import JointPool
from shmload.worker.pool import Death


class RecordingPool:
    """A worker pool that records its calls."""

    def __init__(self, kind: str, reads: bool, told: list[Any]) -> None:
        self.kind, self.reads, self.told = kind, reads, told
        self.pids = [10] if reads else [7, 7]

    def reads_samples(self, worker_id: int) -> bool:
        return self.reads

    def deaths(self) -> list[Death]:
        return [Death(0, pid, 1) for pid in self.pids]

    def stop(self, grace_s: float) -> None:
        self.told.append((self.kind, "stop", grace_s))
        if self.reads:
            raise KeyboardInterrupt

    def __getattr__(self, verb: str) -> Any:
        return lambda worker_id: self.told.append((self.kind, verb, worker_id))


def pool() -> tuple[JointPool, list[Any]]:
    told: list[Any] = []
    actors: Any = RecordingPool("actors", False, told)
    processes: Any = RecordingPool("processes", True, told)
    return JointPool(actors, processes, 2), told


@pytest.mark.parametrize("verb", ["start_worker", "reap", "replace", "stack", "kill"])
def test_calls_about_a_worker_go_to_its_own_kind(verb: str) -> None:
    joint, told = pool()
    for worker in range(3):
        getattr(joint, verb)(worker)
    assert told == [("actors", verb, 0), ("actors", verb, 1), ("processes", verb, 2)]
    assert [joint.reads_samples(worker) for worker in range(3)] == [False, False, True]


def test_actors_are_numbered_first_and_deaths_of_both_kinds_are_reported() -> None:
    joint, told = pool()
    assert joint.pids == [7, 7, 10]
    assert [death.pid for death in joint.deaths()] == [7, 7, 10]
    joint.start(3)
    assert [kind for kind, *_ in told] == ["processes", "actors"]  # processes first: a fork must inherit nothing of the agent


def test_interrupt_while_processes_end_leaves_no_agent() -> None:
    joint, told = pool()
    with pytest.raises(KeyboardInterrupt):
        joint.stop(0.5)
    (_, _, first_s), (kind, verb, left_s) = told
    assert (kind, verb, first_s) == ("actors", "stop", 0.5)
    assert 0 <= left_s <= 0.5
