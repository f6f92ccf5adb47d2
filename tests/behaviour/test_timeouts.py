"""timeout: a late batch is a RuntimeError, and may be delivered later."""

from __future__ import annotations

import multiprocessing
from time import monotonic
from typing import Any

import pytest

from tests.behaviour.behaviour_kit import DEADLINE_S, ErrorSummary, Numbers, batches, error_summary, raised, same_as_torch

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 0.3


class Gated(Numbers):
    """A dataset whose sample 2 waits for the gate."""

    def __init__(self, n: int = 6) -> None:
        super().__init__(n)
        self.gate = FORK.Event()

    def __getitem__(self, index: int) -> int:
        if index == 2:
            assert self.gate.wait(DEADLINE_S)
        return index


def take_patiently(stream: Any, count: int) -> list[Any]:
    """Takes `count` batches, however slow this host is."""
    found: list[Any] = []
    deadline = monotonic() + DEADLINE_S
    while len(found) < count and monotonic() < deadline:
        try:
            found.append(next(stream).tolist())
        except RuntimeError as error:
            if "timed out" not in error_summary(error).first:
                raise
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_late_batch_is_an_error_and_is_delivered_later(persistent: bool) -> None:
    def program(kind: Any) -> Any:
        dataset = Gated()
        loader = kind(dataset, num_workers=2, timeout=TIMEOUT_S, persistent_workers=persistent)
        stream = iter(loader)
        found = [*take_patiently(stream, 2), raised(lambda: next(stream)), raised(lambda: next(stream))]
        dataset.gate.set()
        return found, take_patiently(stream, 4), next(stream, "end")

    found, rest, end = same_as_torch(program)
    text = f"DataLoader timed out after {TIMEOUT_S} seconds"
    assert found == [[0], [1], *[ErrorSummary(RuntimeError, text, text)] * 2]
    assert rest == [[2], [3], [4], [5]]
    assert end == "end"


@pytest.mark.parametrize(("timeout", "shown"), [(1, "1"), (0.25, "0.25")])
def test_error_shows_the_timeout_as_it_was_given(timeout: float, shown: str) -> None:
    def program(kind: Any) -> Any:
        dataset = Gated()
        stream = iter(kind(dataset, sampler=[2], num_workers=1, timeout=timeout))
        error = raised(lambda: next(stream))
        dataset.gate.set()
        return error

    assert same_as_torch(program).first == f"DataLoader timed out after {shown} seconds"


def test_timeout_that_is_not_exceeded_changes_nothing() -> None:
    same_as_torch(lambda kind: batches(kind(Numbers(), num_workers=2, timeout=DEADLINE_S, shuffle=True)))
