"""A trainer killed with SIGKILL, alone or with its process group, in every state: nothing of it stays."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

import psutil
import pytest
import trainer_program
from faults_kit import await_readable, program_env

from shmload.shm.names import SHM_DIR

pytestmark = pytest.mark.slow
BOUND_S = 2.0
STEM = re.compile(r"shmload-\d+-[0-9a-f]{12}")


def names_of(pids: list[int]) -> set[str]:
    """The stems under which these processes hold shared memory."""
    stems: set[str] = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                stems.update(STEM.findall(file.read()))
        except OSError:
            pass
    return stems


def files_with(stems: set[str]) -> list[str]:
    return [name for name in os.listdir(SHM_DIR) if any(stem in name for stem in stems)]


def await_all(pids: list[int], pidfds: list[int], until: float) -> list[int]:
    """Waits for processes to end; the pids of those that have not by then."""
    left = dict(zip(pidfds, pids, strict=True))
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    while left and (wait_s := until - monotonic()) > 0:
        for pidfd, _ in poll.poll(wait_s * 1000):
            poll.unregister(pidfd)
            left.pop(pidfd)
    return list(left.values())


def kill_alone(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


CASES = [
    (state, kill, method)
    for state in trainer_program.STATES
    for kill in (kill_alone, kill_group)
    for method in ("fork", "forkserver", "spawn")
    if method == "fork" or state in ("python sample", "start")
]


@contextmanager
def running(state: str, method: str) -> Iterator[int]:
    """The pid of a trainer that has come into the state."""
    trainer = subprocess.Popen(
        [sys.executable, trainer_program.__file__, state, method],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=program_env(),
    )
    with trainer:
        try:
            assert trainer.stdout is not None
            await_readable(trainer.stdout.fileno())
            assert b"ready\n" == trainer.stdout.readline()
            yield trainer.pid
        finally:
            kill_group(trainer.pid)


@pytest.mark.parametrize(("state", "kill", "method"), CASES)
def test_nothing_stays_of_a_killed_trainer(state: str, kill: Callable[[int], None], method: str) -> None:
    with running(state, method) as pid, ExitStack() as stack:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        stems = names_of(pids)
        assert len(stems) == 1
        assert files_with(stems)
        began = monotonic()
        kill(pid)
        left = await_all(pids, pidfds, began + BOUND_S)
        assert [] == [psutil.Process(one).cmdline() for one in left]
        assert [] == files_with(stems)  # the reaper is of the family, and it ends after its work


def test_a_live_neighbour_is_untouched() -> None:
    with running("idle", "fork") as victim, running("idle", "fork") as neighbour:
        family = psutil.Process(victim).children(recursive=True)
        workers = psutil.Process(neighbour).children(recursive=True)
        stems = names_of([neighbour])
        before = files_with(stems)
        assert before
        assert len(workers) >= 2
        kill_alone(victim)
        _, alive = psutil.wait_procs(family, timeout=BOUND_S)
        assert [] == alive
        assert before == files_with(stems)
        assert all(worker.is_running() for worker in workers)
        kill_group(neighbour)
        _, alive = psutil.wait_procs(workers, timeout=BOUND_S)
        assert [] == alive
