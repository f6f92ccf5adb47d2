"""If everything is killed at once, including the reaper (as at the end of a container), the next start removes the leftovers.

Only processes of the same user remove them, and never while the owner lives, whatever PID namespaces both are in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import resource_tracker

import psutil
import pytest

from shmload.shm import janitor, reaper
from shmload.shm.names import SHM_DIR
from shmload.shm.segment_group import SegmentGroup
from tests.faults import trainer_program
from tests.faults.faults_kit import DEADLINE_S, program_env, stop
from tests.faults.killed_kit import BOUND_S, ProcessTree, files_with, kill_process, names_of, running, started

pytestmark = pytest.mark.slow(reason="each kills a trainer, which imports torch and starts workers")


def kill_all_at_once(pids: list[int]) -> None:
    """Kills all processes like a cgroup does, so that none can react to the end of the others."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            pass
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def start_another() -> str:
    """Starts another loader on this host. Returns its log of what it removed."""
    code = "import logging; logging.basicConfig(level=logging.INFO); from shmload.shm.segment_group import SegmentGroup; SegmentGroup().close()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True
    )
    return done.stderr


def clean() -> str:
    """Returns the output of `shmload clean --yes`."""
    words = [sys.executable, "-m", "shmload", "clean", "--yes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True)
    return done.stdout


@pytest.mark.parametrize("remedy", [start_another, clean])
@pytest.mark.parametrize("state", trainer_program.STATES)
def test_next_start_removes_what_killed_processes_left(state: str, remedy: Callable[[], str]) -> None:
    with running(state, "fork") as pid, ExitStack() as stack:
        stop(pid)  # it may be about to start its second worker
        tree = ProcessTree.of(pid, stack)
        (stem,) = stems = names_of(tree.pids)
        kill_all_at_once(tree.pids)
        assert tree.survivors(BOUND_S) == []
        assert files_with(stems)  # otherwise the reaper was quicker, and the test shows nothing
        words = remedy()
        assert files_with(stems) == []
        assert stem in words


@pytest.mark.parametrize("state", ["idle", "python sample", "c sample"])
def test_workers_end_with_their_trainer_even_without_its_reaper(state: str) -> None:
    with running(state, "fork") as pid, ExitStack() as stack:
        tree = ProcessTree.of(pid, stack)
        stems = names_of(tree.pids)
        (shell,) = (child for child in psutil.Process(pid).children() if child.name() == "sh")
        shell.kill()
        kill_process(pid)
        assert tree.survivors(BOUND_S) == []
        start_another()
        assert files_with(stems) == []


can_unshare = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
needs_namespaces = pytest.mark.skipif(not can_unshare, reason="needs permission for PID namespaces")
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@needs_namespaces
@pytest.mark.parametrize("state", ["full ring", "c sample"])
def test_next_start_removes_what_a_killed_container_left(state: str) -> None:
    with started(state, "fork", prefix=CONTAINER) as container, ExitStack() as stack:
        tree = ProcessTree.of(container.pid, stack)
        (stem,) = stems = names_of(tree.pids)
        for shell in (p.pid for p in psutil.Process(tree.pids[1]).children() if p.name() == "sh"):
            os.kill(shell, signal.SIGSTOP)  # otherwise the reaper may work before the kernel kills it
        os.kill(tree.pids[1], signal.SIGKILL)  # PID 1 of its namespace: the kernel kills all others with it
        assert tree.survivors(BOUND_S) == []
        assert files_with(stems)
        assert stem in start_another()
        assert files_with(stems) == []


@needs_namespaces
def test_memory_of_a_live_owner_in_another_pid_namespace_is_kept() -> None:
    with started("idle", "fork", prefix=CONTAINER) as container, ExitStack() as stack:
        tree = ProcessTree.of(container.pid, stack)
        (stem,) = stems = names_of(tree.pids)
        before = files_with(stems)
        assert before
        assert stem not in clean() + start_another()
        assert before == files_with(stems)
        os.kill(tree.pids[1], signal.SIGKILL)
        assert tree.survivors(BOUND_S) == []
        clean()


@needs_namespaces
def test_clean_in_another_pid_namespace_keeps_memory_of_a_live_owner() -> None:
    with running("idle", "fork") as pid:
        stems = names_of([pid])
        before = files_with(stems)
        words = [*CONTAINER, sys.executable, "-m", "shmload", "clean", "--yes"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True)
        assert not any(stem in done.stdout for stem in stems)
        assert before == files_with(stems)


def dead_group_of(uid: int) -> tuple[str, list[str]]:
    """Leaves the memory of a killed loader of another user. Returns its stem and files."""
    resource_tracker.ensure_running()  # another user may not be allowed to start this Python's tracker
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        reaper.enter = reaper.leave = lambda: None  # it was killed as well
        group = SegmentGroup()
        group.segment("control", 4096)
        group.doorbell("ready")
        os.write(writer, group.stem.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader) as file:
        stem = file.read()
    return stem, files_with({stem})


NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_leftovers_of_another_user_are_kept() -> None:
    stem, files = dead_group_of(NOBODY)
    assert len(files) == 2
    try:
        assert stem.startswith(f"shmload-{NOBODY}-")
        assert stem not in clean() + start_another()
        assert files == files_with({stem})
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setuid(NOBODY)
            os._exit(0 if stem in [found.stem for found in janitor.sweep()] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert files_with({stem}) == []
    finally:
        for name in files_with({stem}):
            os.unlink(f"{SHM_DIR}/{name}")
