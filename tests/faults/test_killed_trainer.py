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


def words_of(pid: int) -> list[str]:
    """The command line of a process, which may end meanwhile."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return [f"process {pid}, which has ended since"]


class Family:
    """A trainer and all it has started, held by pidfds."""

    def __init__(self, pid: int, stack: ExitStack) -> None:
        self.pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        self._pidfds = [os.pidfd_open(one) for one in self.pids]
        for pidfd in self._pidfds:
            stack.callback(os.close, pidfd)

    def survivors(self, timeout_s: float) -> list[list[str]]:
        """Waits for all to end; the command lines of those that have not by then."""
        until = monotonic() + timeout_s
        left = dict(zip(self._pidfds, self.pids, strict=True))
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        while left and (wait_s := until - monotonic()) > 0:
            for pidfd, _ in poll.poll(wait_s * 1000):
                poll.unregister(pidfd)
                left.pop(pidfd)
        return [words_of(pid) for pid in left.values()]


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
            assert trainer.stdout.readline() == b"ready\n"
            yield trainer.pid
        finally:
            kill_group(trainer.pid)


@pytest.mark.parametrize(("state", "kill", "method"), CASES)
def test_nothing_stays_of_a_killed_trainer(state: str, kill: Callable[[int], None], method: str) -> None:
    with running(state, method) as pid, ExitStack() as stack:
        family = Family(pid, stack)
        stems = names_of(family.pids)
        assert len(stems) == 1
        assert files_with(stems)
        kill(pid)
        # a spawned worker watches its parent once its interpreter is up; until then it is importing, for as long as that takes
        bound_s = 5 * BOUND_S if state == "start" and method != "fork" else BOUND_S
        assert family.survivors(bound_s) == []
        assert files_with(stems) == []  # the reaper is of the family, and it ends after its work


def test_a_live_neighbour_is_untouched() -> None:
    with running("idle", "fork") as victim, running("idle", "fork") as neighbour, ExitStack() as stack:
        victims, neighbours = Family(victim, stack), Family(neighbour, stack)
        stems = names_of([neighbour])
        before = files_with(stems)
        assert before
        kill_alone(victim)
        assert victims.survivors(BOUND_S) == []
        assert before == files_with(stems)
        assert len(neighbours.pids) == len(neighbours.survivors(0))
        kill_group(neighbour)
        assert neighbours.survivors(BOUND_S) == []
