"""Leftovers of killed owners are removed by the reaper at once, or by the janitor at the next start; live groups are not touched."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic

import psutil
import pytest

from shmload import ShmLoader
from shmload.shm import janitor, reaper
from shmload.shm.doorbell import posix_ipc
from shmload.shm.names import SHM_DIR
from shmload.shm.segment_group import SegmentGroup

DEADLINE_S = 60.0  # it takes 0.1 s; `python -m tests.faults.matrix` measures it
NUM_BELLS = 1 if posix_ipc else 0  # named doorbells
OWNER = """
import os, sys, signal
from shmload.shm import janitor, reaper
if "no-reaper" in sys.argv:
    reaper.enter = reaper.leave = lambda: None
from shmload.shm.segment_group import SegmentGroup
if "no-room" in sys.argv:
    from shmload.shm import segment
    segment.shm_free_bytes = lambda: 0
group = SegmentGroup()
group.segment("control", 4096); group.segment("payload-0", 1 << 20); group.doorbell("ready")
if "forks" in sys.argv and os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())  # one write: the other process writes, too
    signal.pause()
if "starts" in sys.argv:
    import subprocess
    pids = [subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid for _ in range(4)]
    for pid in pids[:3]:
        reaper.watch(pid)
    reaper.forget(pids[1])
    reaper._write(f"watched {pids[3]}:1")  # a number that another process has had
os.write(1, group.stem.encode() + b"\\n")
signal.pause()
"""


@contextmanager
def owner(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a process that owns a group, in its own process group; yields the process and the group's stem."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    lines = [child.stdout.readline().strip() for _ in range(2 if "forks" in options else 1)]
    try:
        yield child, next(line for line in lines if line.startswith("shmload"))
    finally:
        with suppress(ProcessLookupError):  # before Python 3.13, its resource tracker outlives it
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def names_left(stem: str) -> set[str]:
    return {name for name in os.listdir(SHM_DIR) if name.removeprefix("sem.").startswith(stem)}


def are_gone(stem: str) -> bool:
    """Waits until no name with the stem is left, or until DEADLINE_S have passed."""
    pause, deadline = threading.Event(), monotonic() + DEADLINE_S
    while names_left(stem) and monotonic() < deadline:
        pause.wait(0.01)
    return not names_left(stem)


@pytest.mark.parametrize("whole_group", [False, True], ids=["alone", "with its process group"])
def test_nothing_remains_when_the_owner_is_killed(whole_group: bool) -> None:
    with owner() as (child, stem):
        assert len(names_left(stem)) == 2 + NUM_BELLS
        (os.killpg if whole_group else os.kill)(child.pid, signal.SIGKILL)
        child.wait()
        assert are_gone(stem)


def test_a_surviving_forked_child_does_not_make_a_dead_owner_look_alive() -> None:
    with owner("forks") as (child, stem):
        child.kill()
        child.wait()
        assert are_gone(stem)


def test_only_workers_that_do_not_end_by_themselves_are_killed() -> None:
    with owner("starts") as (child, stem), ExitStack() as stack:
        pidfds = []
        for pid in (one.pid for one in psutil.Process(child.pid).children() if one.name() == "sleep"):
            pidfds.append(os.pidfd_open(pid))
            stack.callback(os.close, pidfds[-1])
            stack.callback(signal.pidfd_send_signal, pidfds[-1], signal.SIGKILL)
        child.kill()
        child.wait()
        assert are_gone(stem)  # after the kills
        watched, dismissed, watched_too, another = pidfds
        assert all(select.select([pidfd], [], [], DEADLINE_S)[0] for pidfd in (watched, watched_too))
        assert not select.select([dismissed, another], [], [], 0)[0]


def test_janitor_removes_what_the_reaper_could_not() -> None:
    with owner("no-reaper") as (child, stem):
        child.kill()
        child.wait()
        assert len(names_left(stem)) == 2 + NUM_BELLS
        swept = [found for found in janitor.sweep() if found.stem == stem]  # at any age, because a container may restart at once
        assert len(swept) == 1
        assert swept[0].nbytes >= 1 << 20
        assert names_left(stem) == set()


def test_live_group_is_never_swept() -> None:
    with owner() as (_, stem):
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
        assert len(names_left(stem)) == 2 + NUM_BELLS


def test_live_group_with_its_ring_in_memfds_is_never_swept() -> None:
    with owner("no-room") as (_, stem):
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
        assert names_left(stem) == {f"{stem}-control", f"sem.{stem}-ready"} if NUM_BELLS else {f"{stem}-control"}


def test_leftovers_of_a_killed_group_with_memfds_are_removed() -> None:
    with owner("no-room") as (child, stem):
        child.kill()
        assert are_gone(stem)


def test_stopped_reaper_does_not_delay_the_exit() -> None:
    group = SegmentGroup()
    assert reaper._shell is not None
    os.kill(reaper._shell.pid, signal.SIGSTOP)
    group.close()
    assert reaper._shell is None


def test_killed_reaper_is_replaced() -> None:
    first = SegmentGroup()
    assert reaper._shell is not None
    pid = reaper._shell.pid
    os.kill(pid, signal.SIGKILL)
    reaper._shell.wait()
    second = SegmentGroup()
    assert reaper._shell.pid != pid
    second.close()
    first.close()


def test_ending_reaper_removes_nothing_of_the_next_group() -> None:
    """Another thread may make a group of the same process before the shell of the last one has ended."""
    stem = f"shmload-test-reaper-{os.getpid()}"
    path = Path(f"/dev/shm/{stem}-next")
    shell = subprocess.Popen(["/bin/sh", "-c", reaper._SCRIPT, stem], stdin=subprocess.PIPE)
    assert shell.stdin is not None
    path.touch()
    try:
        shell.communicate(b"bye\n")
        assert path.exists()
    finally:
        path.unlink()


def test_listing_leftovers_removes_nothing() -> None:
    with owner("no-reaper") as (child, stem):
        child.kill()
        child.wait()
        assert stem in [found.stem for found in janitor.find_leftovers()]
        assert len(names_left(stem)) == 2 + NUM_BELLS
        assert stem in [found.stem for found in janitor.sweep()]


def test_own_live_groups_are_never_swept() -> None:
    group = SegmentGroup()
    group.segment("control", 4096)
    assert group.stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
    group.close()


def test_foreign_names_are_never_swept() -> None:
    path = f"{SHM_DIR}/shmload-not-ours"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    try:
        janitor.sweep(guard_s=-1)
        assert os.path.exists(path)
    finally:
        os.unlink(path)


def test_normal_exit_prints_nothing_and_leaves_nothing() -> None:
    code = "from shmload.shm.segment_group import SegmentGroup; g = SegmentGroup(); g.segment('control', 4096); g.doorbell('b'); print(g.stem)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert names_left(done.stdout.strip()) == set()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_reaper_lives_as_long_as_its_loader(how: str) -> None:
    loader = ShmLoader(range(4), num_workers=1)  # type: ignore[var-annotated]  # whose samples are of no interest
    shells = []
    for _ in range(2):
        assert len(list(loader)) == 4
        shells.append(reaper._shell)
    assert shells[0] is shells[1] is not None
    assert shells[0].poll() is None
    if how == "closed":
        loader.close()
    del loader
    gc.collect()
    assert reaper._shell is None


def test_child_that_closes_its_copy_of_a_loader_keeps_its_parents_reaper() -> None:
    loader = ShmLoader(range(4), num_workers=1)  # type: ignore[var-annotated]  # as above
    list(loader)
    shell = reaper._shell
    assert shell is not None
    pid = os.fork()
    if pid == 0:
        del loader
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    reaper._write("board /nowhere")  # its pipe is open
    assert shell.poll() is None
    loader.close()
