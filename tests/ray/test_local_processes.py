"""The share of work that actors leave to processes of this machine. None of these tests needs Ray."""

from __future__ import annotations

from typing import Any

from shmload.ray.local_processes import HALF_LIFE_S, LocalProcesses


class Ring:
    """Reports the pace of processes 3 and 4: one batch a second."""

    def __init__(self) -> None:
        self.num_chunks = 5

    def pace_of(self, worker_id: int) -> tuple[int, int]:
        assert worker_id in (3, 4)
        return self.num_chunks, self.num_chunks * 10**9


def measured(took_s: float, num_under_way: int = 0) -> tuple[LocalProcesses, list[float]]:
    """Returns the division of work between two processes with 8 batches ordered ahead and an actor whose answer took `took_s`."""
    now = [100.0]
    ring: Any = Ring()
    local = LocalProcesses(ring, range(3, 5), 8, lambda: now[0])
    local.answered(0, 0, 0.0, 10.0)  # the actor was still starting
    local.answered(0, num_under_way, 100.0 - took_s, 100.0)
    return local, now


def test_actor_gets_a_batch_only_if_processes_will_not_wait_for_it() -> None:
    assert measured(4.0)[0].may_claim(0, 0)
    assert not measured(4.1)[0].may_claim(0, 0)


def test_time_in_an_actors_queue_is_not_taken_for_its_speed_or_another_actors() -> None:
    local, _ = measured(9.0, 1)
    assert not local.may_claim(0, 1)
    assert local.may_claim(0, 0)
    assert local.may_claim(1, 1)


def test_slow_actor_is_tried_again() -> None:
    local, now = measured(7.0)
    assert not local.may_claim(0, 0)
    now[0] += HALF_LIFE_S
    assert local.may_claim(0, 0)


def test_answer_of_an_actor_that_was_starting_is_not_measured() -> None:
    ring: Any = Ring()
    local = LocalProcesses(ring, range(3, 5), 8, lambda: 100.0)
    for began_s in (0.0, 1.0):
        local.answered(0, 0, began_s, 99.0 + began_s)
        assert local.may_claim(0, 0)


def test_nothing_is_known_before_processes_have_finished_a_batch() -> None:
    ring: Any = Ring()
    local = LocalProcesses(ring, range(3, 5), 8, lambda: 100.0)
    ring.num_chunks = 0
    local.answered(0, 0, 0.0, 1.0)
    local.answered(0, 0, 2.0, 100.0)
    assert local.may_claim(0, 0)
    ring.num_chunks = 1
    assert not local.may_claim(0, 0)
