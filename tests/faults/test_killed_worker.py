"""A worker killed with SIGKILL in every state: the trainer goes on or closes as before, and nothing of either stays."""

from __future__ import annotations

from contextlib import ExitStack

import psutil
import pytest

from tests.faults import trainer_program
from tests.faults.faults_kit import kill_and_wait
from tests.faults.killed_kit import BOUND_S, Family, files_with, first_worker, names_of, said, started, workers_of

pytestmark = pytest.mark.slow(reason="each trainer is a process that imports torch and starts workers")

WORKER_CASES = [
    (state, then, method)
    for state in trainer_program.STATES
    for then in ("close", "go on")
    for method in ("fork", "forkserver", "spawn")
    if (then == "close" or "sample" not in state)  # the one that takes over would take half a minute, too
    and (method == "fork" or state in ("python sample", "start"))
]


@pytest.mark.parametrize(("state", "then", "method"), WORKER_CASES)
def test_nothing_stays_of_a_killed_worker(state: str, then: str, method: str) -> None:
    with started(state, method, then) as trainer, ExitStack() as stack:
        assert trainer.stdin is not None
        stems = names_of([trainer.pid])
        assert len(stems) == 1
        victim = first_worker(trainer.pid, stems)
        shells = [p.pid for p in psutil.Process(trainer.pid).children() if p.name() == "sh"]
        assert len(shells) == 1  # the reaper
        family = Family(shells + workers_of(trainer.pid, stems), stack)
        kill_and_wait(victim)
        trainer.stdin.write(b"\n")
        trainer.stdin.flush()
        while (line := said(trainer)) != "done":
            assert line == "ready"  # of workers that start later
        assert files_with(stems) == []
        assert family.survivors(BOUND_S) == []
        assert trainer.poll() is None
        assert [p.status() for p in psutil.Process(trainer.pid).children() if p.status() == "zombie"] == []
