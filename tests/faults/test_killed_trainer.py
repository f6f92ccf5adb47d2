"""A trainer killed with SIGKILL in any state, alone or with its process group, leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.faults import trainer_program
from tests.faults.killed_kit import BOUND_S, ProcessTree, files_with, kill_group, kill_process, names_of, running

pytestmark = pytest.mark.slow(reason="each kills a trainer, which imports torch and starts workers")

CASES = [
    (state, kill, method)
    for state in trainer_program.STATES
    for kill in (kill_process, kill_group)
    for method in ("fork", "forkserver", "spawn")
    if method == "fork" or state in ("python sample", "start")
]


@pytest.mark.parametrize(("state", "kill", "method"), CASES)
def test_killed_trainer_leaves_nothing(state: str, kill: Callable[[int], None], method: str) -> None:
    with running(state, method) as pid, ExitStack() as stack:
        tree = ProcessTree.of(pid, stack)
        stems = names_of(tree.pids)
        assert len(stems) == 1
        assert files_with(stems)
        kill(pid)
        assert tree.survivors(BOUND_S) == []
        assert files_with(stems) == []  # the reaper belongs to the tree, and ends after its work


def test_another_running_trainer_is_not_affected() -> None:
    with running("idle", "fork") as victim, running("idle", "fork") as other, ExitStack() as stack:
        victims, others = ProcessTree.of(victim, stack), ProcessTree.of(other, stack)
        stems = names_of([other])
        before = files_with(stems)
        assert before
        kill_process(victim)
        assert victims.survivors(BOUND_S) == []
        assert before == files_with(stems)
        assert len(others.pids) == len(others.survivors(0))
        kill_group(other)
        assert others.survivors(BOUND_S) == []
