"""Loaders in threads: made in one thread and read in another, and several at the same time."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.behaviour import threaded_program
from tests.behaviour.behaviour_kit import DEADLINE_S, Numbers, batches, run_program, same_as_torch

THREE = [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_can_be_iterated_in_a_thread(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        found: list[Any] = []

        def epoch() -> None:
            found.append(batches(kind(Numbers(8), batch_size=3, num_workers=num_workers)))

        thread = threading.Thread(target=epoch)
        thread.start()
        thread.join(DEADLINE_S)
        return found

    assert same_as_torch(program) == [THREE]


def test_iterator_made_in_the_main_thread_can_be_read_in_another() -> None:
    def program(kind: Any) -> Any:
        found: list[Any] = []
        stream = iter(kind(Numbers(8), batch_size=3, num_workers=2))
        found.append(next(stream).tolist())
        thread = threading.Thread(target=lambda: found.extend(batches(stream)))
        thread.start()
        thread.join(DEADLINE_S)
        return found, next(stream, "end")

    assert same_as_torch(program) == (THREE, "end")


def test_thread_can_end_before_its_iterator() -> None:
    def program(kind: Any) -> Any:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(iter(kind(Numbers(8), batch_size=3, num_workers=2))))
        thread.start()
        thread.join(DEADLINE_S)
        return batches(made.pop())

    assert same_as_torch(program) == THREE


@pytest.mark.slow(reason="runs a program with many loaders in threads, which imports torch")
@pytest.mark.parametrize("name", ["torch", "shmload"])
def test_threads_can_each_iterate_another_loader(name: str) -> None:
    assert json.loads(run_program(threaded_program, name)[-1]) == []
