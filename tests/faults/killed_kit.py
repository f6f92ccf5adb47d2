"""Starts trainers for tests that kill them (trainer_program.py), and finds surviving processes and leftover names."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

import psutil

from shmload.shm.names import SHM_DIR
from tests.faults import trainer_program
from tests.faults.faults_kit import DEADLINE_S, await_readable, program_env

BOUND_S = 60.0  # it takes 0.1 s; a process that misses the kill never ends
STEM = re.compile(r"shmload-\d+-[0-9a-f]{12}")


def names_of(pids: list[int]) -> set[str]:
    """Returns the stems of the shared memory that these processes have mapped."""
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


def command_line_of(pid: int) -> list[str]:
    """Returns the command line of a process, which may end in the meantime."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return [f"process {pid}, which has ended since"]


class ProcessTree:
    """A trainer and its descendants, held by pidfds."""

    def __init__(self, pids: list[int], stack: ExitStack) -> None:
        self.pids = pids
        self._pidfds = [os.pidfd_open(one) for one in self.pids]
        for pidfd in self._pidfds:
            stack.callback(os.close, pidfd)

    @classmethod
    def of(cls, pid: int, stack: ExitStack) -> ProcessTree:
        """Returns a trainer and all its descendants."""
        return cls([pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))], stack)

    def survivors(self, timeout_s: float) -> list[list[str]]:
        """Waits for all to end. Returns the command lines of those that have not ended in time."""
        until = monotonic() + timeout_s
        left = dict(zip(self._pidfds, self.pids, strict=True))
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        while left and (ended := poll.poll(max(until - monotonic(), 0) * 1000)):
            for pidfd, _ in ended:
                poll.unregister(pidfd)
                left.pop(pidfd)
        return [command_line_of(pid) for pid in left.values()]


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


@contextmanager
def started(state: str, method: str, then: str = "hang", prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a trainer and waits until it is in the state."""
    trainer = subprocess.Popen(
        [*prefix, sys.executable, "-u", trainer_program.__file__, state, method, then],
        bufsize=0,  # a buffer would hold the second of two lines, and `read_line` would wait for the descriptor
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=program_env(),
    )
    with trainer:
        try:
            assert read_line(trainer) == "ready"
            yield trainer
        finally:
            kill_group(trainer.pid)


@contextmanager
def running(state: str, method: str) -> Iterator[int]:
    """Starts such a trainer and yields its pid."""
    with started(state, method) as trainer:
        yield trainer.pid


def read_line(trainer: subprocess.Popen[bytes]) -> str:
    """Returns the next line of a trainer. On a loaded machine importing torch in three processes takes a while."""
    assert trainer.stdout is not None
    await_readable(trainer.stdout.fileno(), 4 * DEADLINE_S)
    return trainer.stdout.readline().decode().strip()


def workers_of(pid: int, stems: set[str]) -> list[int]:
    """Returns the descendants of a trainer that have mapped its memory."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if names_of([child.pid]) & stems]


def first_worker(pid: int, stems: set[str]) -> int:
    """Waits for the first descendant of the trainer that has mapped its memory."""
    until = monotonic() + DEADLINE_S
    while monotonic() < until:
        workers = workers_of(pid, stems)
        if workers:
            return workers[0]
        select.select([], [], [], 0.01)
    raise AssertionError("no worker has started")
