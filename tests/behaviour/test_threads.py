"""Loaders in threads: one made and read anywhere, and several at the same time."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.behaviour import threaded_program
from tests.behaviour.behaviour_kit import DEADLINE_S, Numbers, alike, batches, run_program

THREE = [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_may_be_iterated_in_a_thread(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        found: list[Any] = []

        def epoch() -> None:
            found.append(batches(kind(Numbers(8), batch_size=3, num_workers=num_workers)))

        thread = threading.Thread(target=epoch)
        thread.start()
        thread.join(DEADLINE_S)
        return found

    assert alike(program) == [THREE]


def test_an_iterator_made_here_may_be_read_in_a_thread() -> None:
    def program(kind: Any) -> Any:
        found: list[Any] = []
        stream = iter(kind(Numbers(8), batch_size=3, num_workers=2))
        found.append(next(stream).tolist())
        thread = threading.Thread(target=lambda: found.extend(batches(stream)))
        thread.start()
        thread.join(DEADLINE_S)
        return found, next(stream, "end")

    assert alike(program) == (THREE, "end")


def test_a_thread_may_end_before_its_iterator() -> None:
    def program(kind: Any) -> Any:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(iter(kind(Numbers(8), batch_size=3, num_workers=2))))
        thread.start()
        thread.join(DEADLINE_S)
        return batches(made.pop())

    assert alike(program) == THREE


@pytest.mark.slow(reason="a program of many loaders in threads, which imports torch")
@pytest.mark.parametrize("name", ["torch", "shmload"])
def test_threads_may_each_iterate_a_loader_of_their_own(name: str) -> None:
    assert json.loads(run_program(threaded_program, name)[-1]) == []
