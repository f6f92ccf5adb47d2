"""What killed owners leave is removed, by the reaper at once and by the janitor at the next start; the living are not touched."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

import psutil
import pytest

from shmload import ShmLoader
from shmload.shm import janitor, reaper
from shmload.shm.doorbell import posix_ipc
from shmload.shm.names import SHM_DIR
from shmload.shm.segment_group import SegmentGroup

NUM_BELLS = 1 if posix_ipc else 0  # that have names
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
    """A process that owns a group, in a process group of its own; and the group's stem."""
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
        with suppress(ProcessLookupError):  # before Python 3.13 it has a resource tracker, which outlives it
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def left(stem: str) -> set[str]:
    return {name for name in os.listdir(SHM_DIR) if name.removeprefix("sem.").startswith(stem)}


def gone_within(stem: str, seconds: float) -> bool:
    """Waits on directory events, not on the clock, until no name with the stem is left."""
    libc_fd = subprocess.Popen(["sh", "-c", "while :; do echo; done"], stdout=subprocess.PIPE)  # a pulse to re-check on
    try:
        deadline = monotonic() + seconds
        while left(stem) and monotonic() < deadline:
            select.select([libc_fd.stdout], [], [], 0.01)
        return not left(stem)
    finally:
        libc_fd.kill()
        libc_fd.communicate()


@pytest.mark.parametrize("whole_group", [False, True], ids=["alone", "with its process group"])
def test_nothing_stays_when_the_owner_is_killed(whole_group: bool) -> None:
    with owner() as (child, stem):
        assert len(left(stem)) == 2 + NUM_BELLS
        (os.killpg if whole_group else os.kill)(child.pid, signal.SIGKILL)
        child.wait()
        assert gone_within(stem, 2)


def test_a_surviving_forked_child_does_not_make_a_dead_owner_look_alive() -> None:
    with owner("forks") as (child, stem):
        child.kill()
        child.wait()
        assert gone_within(stem, 2)


def test_workers_that_do_not_end_by_themselves_are_killed_and_no_other_process() -> None:
    with owner("starts") as (child, stem), ExitStack() as stack:
        pidfds = []
        for pid in (one.pid for one in psutil.Process(child.pid).children() if one.name() == "sleep"):
            pidfds.append(os.pidfd_open(pid))
            stack.callback(os.close, pidfds[-1])
            stack.callback(signal.pidfd_send_signal, pidfds[-1], signal.SIGKILL)
        child.kill()
        child.wait()
        assert gone_within(stem, 2)  # after the kills
        watched, dismissed, watched_too, another = pidfds
        assert all(select.select([pidfd], [], [], 2)[0] for pidfd in (watched, watched_too))
        assert not select.select([dismissed, another], [], [], 0)[0]


def test_the_janitor_removes_what_the_reaper_could_not() -> None:
    with owner("no-reaper") as (child, stem):
        child.kill()
        child.wait()
        assert len(left(stem)) == 2 + NUM_BELLS
        swept = [found for found in janitor.sweep() if found.stem == stem]  # however young: a container may restart at once
        assert len(swept) == 1
        assert swept[0].nbytes >= 1 << 20
        assert left(stem) == set()


def test_a_living_neighbor_is_never_swept() -> None:
    with owner() as (_, stem):
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
        assert len(left(stem)) == 2 + NUM_BELLS


def test_a_living_neighbor_whose_ring_found_no_room_is_never_swept() -> None:
    with owner("no-room") as (_, stem):
        assert stem not in [found.stem for found in janitor.sweep(guard_s=-1)]
        assert left(stem) == {f"{stem}-control", f"sem.{stem}-ready"} if NUM_BELLS else {f"{stem}-control"}


def test_what_such_a_one_leaves_when_it_is_killed_goes_too() -> None:
    with owner("no-room") as (child, stem):
        child.kill()
        assert gone_within(stem, 2)


def test_a_stopped_reaper_does_not_hold_up_the_end() -> None:
    group = SegmentGroup()
    assert reaper._shell is not None
    os.kill(reaper._shell.pid, signal.SIGSTOP)
    group.close()
    assert reaper._shell is None


def test_a_killed_reaper_is_replaced() -> None:
    first = SegmentGroup()
    assert reaper._shell is not None
    pid = reaper._shell.pid
    os.kill(pid, signal.SIGKILL)
    reaper._shell.wait()
    second = SegmentGroup()
    assert reaper._shell.pid != pid
    second.close()
    first.close()


def test_a_look_removes_nothing() -> None:
    with owner("no-reaper") as (child, stem):
        child.kill()
        child.wait()
        assert stem in [found.stem for found in janitor.find_leftovers()]
        assert len(left(stem)) == 2 + NUM_BELLS
        assert stem in [found.stem for found in janitor.sweep()]


def test_our_own_living_groups_are_never_swept() -> None:
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


def test_an_orderly_end_says_nothing_and_leaves_nothing() -> None:
    code = "from shmload.shm.segment_group import SegmentGroup; g = SegmentGroup(); g.segment('control', 4096); g.doorbell('b'); print(g.stem)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert left(done.stdout.strip()) == set()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_the_reaper_stays_between_the_passes_of_a_loader_and_ends_with_it(how: str) -> None:
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


def test_a_forked_child_that_ends_its_copy_of_a_loader_leaves_its_parent_the_reaper() -> None:
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
