"""Everything killed at once, the reaper too, as a container's or a cgroup's end does: the next start removes what is left.

And nobody but the dead owner's own user does, and never while the owner lives, whatever PID namespace either is in.
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
from tests.faults.faults_kit import DEADLINE_S, program_env
from tests.faults.killed_kit import BOUND_S, Family, files_with, kill_alone, names_of, running, started

pytestmark = pytest.mark.slow(reason="each kills a trainer, a process that imports torch and starts workers")


def kill_all_at_once(pids: list[int]) -> None:
    """As a cgroup's kill does: nobody is left to see that the others have gone."""
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
    """What the next start on this host says that it has removed."""
    code = "import logging; logging.basicConfig(level=logging.INFO); from shmload.shm.segment_group import SegmentGroup; SegmentGroup().close()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True
    )
    return done.stderr


def clean() -> str:
    """What `shmload clean --yes` says."""
    words = [sys.executable, "-m", "shmload.cli", "clean", "--yes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True)
    return done.stdout


@pytest.mark.parametrize("remedy", [start_another, clean])
@pytest.mark.parametrize("state", trainer_program.STATES)
def test_what_a_kill_of_everything_leaves_is_removed_at_once_by_the_next_start(state: str, remedy: Callable[[], str]) -> None:
    with running(state, "fork") as pid, ExitStack() as stack:
        family = Family.of(pid, stack)
        (stem,) = stems = names_of(family.pids)
        kill_all_at_once(family.pids)
        assert family.survivors(BOUND_S) == []
        assert files_with(stems)  # else this shows nothing: the reaper was quicker
        words = remedy()
        assert files_with(stems) == []
        assert stem in words


@pytest.mark.parametrize("state", ["idle", "python sample", "c sample"])
def test_workers_end_with_their_trainer_although_its_reaper_is_gone(state: str) -> None:
    with running(state, "fork") as pid, ExitStack() as stack:
        family = Family.of(pid, stack)
        stems = names_of(family.pids)
        (shell,) = (child for child in psutil.Process(pid).children() if child.name() == "sh")
        shell.kill()
        kill_alone(pid)
        assert family.survivors(BOUND_S) == []
        start_another()
        assert files_with(stems) == []


can_unshare = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
needs_namespaces = pytest.mark.skipif(not can_unshare, reason="PID namespaces are not permitted here")
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@needs_namespaces
@pytest.mark.parametrize("state", ["full ring", "c sample"])
def test_what_a_containers_end_leaves_is_removed_at_once_by_the_next_start(state: str) -> None:
    with started(state, "fork", prefix=CONTAINER) as container, ExitStack() as stack:
        family = Family.of(container.pid, stack)
        (stem,) = stems = names_of(family.pids)
        for shell in (p.pid for p in psutil.Process(family.pids[1]).children() if p.name() == "sh"):
            os.kill(shell, signal.SIGSTOP)  # else the reaper may be at its work before the kernel comes to it
        os.kill(family.pids[1], signal.SIGKILL)  # its PID 1: the kernel ends all others with it
        assert family.survivors(BOUND_S) == []
        assert files_with(stems)
        assert stem in start_another()
        assert files_with(stems) == []


@needs_namespaces
def test_a_live_owner_in_another_pid_namespace_is_untouched() -> None:
    with started("idle", "fork", prefix=CONTAINER) as container, ExitStack() as stack:
        family = Family.of(container.pid, stack)
        (stem,) = stems = names_of(family.pids)
        before = files_with(stems)
        assert before
        assert stem not in clean() + start_another()
        assert before == files_with(stems)
        os.kill(family.pids[1], signal.SIGKILL)
        assert family.survivors(BOUND_S) == []
        clean()


@needs_namespaces
def test_a_cleaner_in_another_pid_namespace_does_not_touch_a_live_owner() -> None:
    with running("idle", "fork") as pid:
        stems = names_of([pid])
        before = files_with(stems)
        words = [*CONTAINER, sys.executable, "-m", "shmload.cli", "clean", "--yes"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True)
        assert not any(stem in done.stdout for stem in stems)
        assert before == files_with(stems)


def dead_group_of(uid: int) -> tuple[str, list[str]]:
    """The stem and files of a loader that a user has had, and that was killed with everything."""
    resource_tracker.ensure_running()  # another user may not be allowed to start one of this Python's
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        reaper.enter = reaper.leave = lambda: None  # it was killed, too
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_leftovers_are_theirs() -> None:
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
