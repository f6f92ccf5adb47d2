"""Doorbells wake processes, limit their count, and disappear with their owner."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from shmload._core.bell import IS_MONOTONIC
from shmload.shm.doorbell import Doorbell, JointBell, posix_ipc
from shmload.shm.segment_group import SegmentGroup

NAMED = pytest.mark.skipif(posix_ipc is None, reason="needs posix_ipc, which has no wheel for this Python")


def assert_wake_each_other(there: Doorbell, back: Doorbell) -> None:
    """Wakes a forked child, which wakes this process in turn."""
    pid = os.fork()
    if pid == 0:
        attached = Doorbell.attach(there.name)
        if attached.wait(30):
            Doorbell.attach(back.name).post()
        os._exit(0)
    there.post()
    assert back.wait(30)
    os.waitpid(pid, 0)


def test_post_wakes_another_process() -> None:
    group = SegmentGroup()
    there, back = group.doorbell("there"), group.doorbell("back")
    assert_wake_each_other(there, back)
    group.close()


def test_wait_ends_at_its_timeout() -> None:
    group = SegmentGroup()
    assert not group.doorbell("ready").wait(0)
    group.close()


def test_posts_do_not_accumulate() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    for _ in range(5):
        bell.post_up_to(3)
    assert bell.value == 3
    bell.drain()
    assert bell.value == 0
    group.close()


def test_bells_posted_together_are_all_posted() -> None:
    group = SegmentGroup()
    bells = [group.doorbell("one"), group.doorbell("other")]
    bells[0].post()
    for _ in range(2):
        JointBell(bells).post_up_to(1)
    assert [bell.value for bell in bells] == [1, 1]
    group.close()


def test_waits_use_the_monotonic_clock_if_the_c_library_can() -> None:
    assert hasattr(ctypes.CDLL(None), "sem_clockwait") == IS_MONOTONIC


@NAMED
def test_closed_bell_leaves_no_name() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    assert os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    bell.close()
    bell.close()
    assert not os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    group.close()


@pytest.fixture(params=["read-only", "without posix_ipc"])
def no_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a read-only /dev/shm or a missing posix_ipc."""
    if request.param != "read-only":
        monkeypatch.setattr("shmload.shm.doorbell.posix_ipc", None)
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pytest.importorskip("posix_ipc"), "Semaphore", refuse)


def test_memfd_bell_wakes_another_process_if_names_are_impossible(no_names: None) -> None:
    group = SegmentGroup()
    there, back = group.doorbell("there"), group.doorbell("back")
    assert there.name.startswith(f"/proc/{os.getpid()}/fd/")
    assert_wake_each_other(there, back)
    group.close()


def test_memfd_bell_counts_and_closes_like_others(no_names: None) -> None:
    group = SegmentGroup()
    before = len(os.listdir("/proc/self/fd"))
    bell = group.doorbell("ready")
    attached = Doorbell.attach(bell.name)
    for _ in range(5):
        attached.post_up_to(3)
    assert (bell.value, bell.wait(0), bell.value) == (3, True, 2)
    bell.drain()
    assert (attached.value, attached.wait(0)) == (0, False)
    attached.close()
    bell.close()
    bell.close()
    assert before == len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Doorbell.attach(bell.name)
    group.close()


@NAMED
def test_close_in_another_process_keeps_the_name() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    Doorbell.attach(bell.name).close()
    assert os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    group.close()


def test_closed_bell_cannot_be_attached() -> None:
    with pytest.raises(FileNotFoundError):
        Doorbell.attach("/shmload-no-such-bell")
