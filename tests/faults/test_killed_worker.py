"""After SIGKILL of a worker in any state the trainer continues or closes normally, and leaves nothing."""

from __future__ import annotations

from contextlib import ExitStack

import psutil
import pytest

from tests.faults import trainer_program
from tests.faults.faults_kit import kill_and_wait
from tests.faults.killed_kit import BOUND_S, ProcessTree, files_with, first_worker, names_of, read_line, started, workers_of

pytestmark = pytest.mark.slow(reason="each starts a trainer, which imports torch and starts workers")

WORKER_CASES = [
    (state, then, method)
    for state in trainer_program.STATES
    for then in ("close", "go on")
    for method in ("fork", "forkserver", "spawn")
    if (then == "close" or "sample" not in state)  # otherwise its replacement would also take half a minute
    and (method == "fork" or state in ("python sample", "start"))
]


@pytest.mark.parametrize(("state", "then", "method"), WORKER_CASES)
def test_killed_worker_leaves_nothing(state: str, then: str, method: str) -> None:
    with started(state, method, then) as trainer, ExitStack() as stack:
        assert trainer.stdin is not None
        stems = names_of([trainer.pid])
        assert len(stems) == 1
        victim = first_worker(trainer.pid, stems)
        shells = [p.pid for p in psutil.Process(trainer.pid).children() if p.name() == "sh"]
        assert len(shells) == 1  # the reaper
        tree = ProcessTree(shells + workers_of(trainer.pid, stems), stack)
        kill_and_wait(victim)
        trainer.stdin.write(b"\n")
        trainer.stdin.flush()
        while (line := read_line(trainer)) != "done":
            assert line == "ready"  # of workers that start later
        assert files_with(stems) == []
        assert tree.survivors(BOUND_S) == []
        assert trainer.poll() is None
        assert [p.status() for p in psutil.Process(trainer.pid).children() if p.status() == "zombie"] == []
