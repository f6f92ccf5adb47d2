"""Restarts of failing processes, and when they are given up."""

from __future__ import annotations

from shmload.processes.restarts import RestartPolicy


def test_pause_doubles_up_to_the_maximum() -> None:
    restarts = RestartPolicy(10, pause_s=0.1, max_pause_s=0.5)
    assert [restarts.failed() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_process_that_fails_too_often_in_a_row_is_given_up() -> None:
    restarts = RestartPolicy(2)
    assert [restarts.failed() for _ in range(3)] == [0, 0, None]


def test_success_resets_the_count() -> None:
    restarts = RestartPolicy(1)
    assert [restarts.failed(), restarts.failed(after_success=True), restarts.failed()] == [0, 0, None]
    restarts.succeeded()
    assert restarts.failed() == 0


def test_process_that_fails_for_hours_is_still_restarted() -> None:
    restarts = RestartPolicy(10**6, pause_s=0.1, max_pause_s=30.0)
    restarts.in_a_row = 1100  # 2 ** 1100 exceeds a float
    assert restarts.failed() == 30.0
