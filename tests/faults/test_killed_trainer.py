"""A trainer killed with SIGKILL, alone or with its process group, in every state: nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.faults import trainer_program
from tests.faults.killed_kit import BOUND_S, Family, files_with, kill_alone, kill_group, names_of, running

pytestmark = pytest.mark.slow(reason="each kills a trainer, a process that imports torch and starts workers")

CASES = [
    (state, kill, method)
    for state in trainer_program.STATES
    for kill in (kill_alone, kill_group)
    for method in ("fork", "forkserver", "spawn")
    if method == "fork" or state in ("python sample", "start")
]


@pytest.mark.parametrize(("state", "kill", "method"), CASES)
def test_nothing_stays_of_a_killed_trainer(state: str, kill: Callable[[int], None], method: str) -> None:
    with running(state, method) as pid, ExitStack() as stack:
        family = Family.of(pid, stack)
        stems = names_of(family.pids)
        assert len(stems) == 1
        assert files_with(stems)
        kill(pid)
        assert family.survivors(BOUND_S) == []
        assert files_with(stems) == []  # the reaper is of the family, and it ends after its work


def test_a_live_neighbor_is_untouched() -> None:
    with running("idle", "fork") as victim, running("idle", "fork") as neighbor, ExitStack() as stack:
        victims, neighbors = Family.of(victim, stack), Family.of(neighbor, stack)
        stems = names_of([neighbor])
        before = files_with(stems)
        assert before
        kill_alone(victim)
        assert victims.survivors(BOUND_S) == []
        assert before == files_with(stems)
        assert len(neighbors.pids) == len(neighbors.survivors(0))
        kill_group(neighbor)
        assert neighbors.survivors(BOUND_S) == []
