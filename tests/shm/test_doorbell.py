"""Bells ring, stay within their count, and are gone with their owner."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from shmload._core.bell import IS_MONOTONIC
from shmload.shm.doorbell import Doorbell, JointBell, posix_ipc
from shmload.shm.segment_group import SegmentGroup

NAMED = pytest.mark.skipif(posix_ipc is None, reason="needs posix_ipc, which has no wheel for this Python")


def wake_each_other(there: Doorbell, back: Doorbell) -> None:
    """Rings for a forked child, which rings back."""
    pid = os.fork()
    if pid == 0:
        attached = Doorbell.attach(there.name)
        if attached.wait(30):
            Doorbell.attach(back.name).post()
        os._exit(0)
    there.post()
    assert back.wait(30)
    os.waitpid(pid, 0)


def test_a_ring_wakes_another_process() -> None:
    group = SegmentGroup()
    there, back = group.doorbell("there"), group.doorbell("back")
    wake_each_other(there, back)
    group.close()


def test_an_unrung_bell_is_not_waited_for_longer_than_asked() -> None:
    group = SegmentGroup()
    assert not group.doorbell("ready").wait(0)
    group.close()


def test_posts_do_not_pile_up_beyond_their_count() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    for _ in range(5):
        bell.post_up_to(3)
    assert bell.value == 3
    bell.drain()
    assert bell.value == 0
    group.close()


def test_bells_rung_as_one_are_each_rung() -> None:
    group = SegmentGroup()
    bells = [group.doorbell("one"), group.doorbell("other")]
    bells[0].post()
    for _ in range(2):
        JointBell(bells).post_up_to(1)
    assert [bell.value for bell in bells] == [1, 1]
    group.close()


def test_waits_are_by_the_clock_that_nobody_sets_where_the_c_library_can() -> None:
    assert hasattr(ctypes.CDLL(None), "sem_clockwait") == IS_MONOTONIC


@NAMED
def test_a_closed_bell_leaves_no_name() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    assert os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    bell.close()
    bell.close()
    assert not os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    group.close()


@pytest.fixture(params=["read-only", "without posix_ipc"])
def no_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /dev/shm is read-only, or posix_ipc is not installed."""
    if request.param != "read-only":
        monkeypatch.setattr("shmload.shm.doorbell.posix_ipc", None)
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pytest.importorskip("posix_ipc"), "Semaphore", refuse)


def test_where_no_name_can_be_made_a_bell_in_a_memfd_wakes_another_process(no_names: None) -> None:
    group = SegmentGroup()
    there, back = group.doorbell("there"), group.doorbell("back")
    assert there.name.startswith(f"/proc/{os.getpid()}/fd/")
    wake_each_other(there, back)
    group.close()


def test_a_bell_in_a_memfd_counts_and_closes_as_others_do(no_names: None) -> None:
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
def test_another_process_that_closes_a_named_bell_leaves_the_name() -> None:
    group = SegmentGroup()
    bell = group.doorbell("ready")
    Doorbell.attach(bell.name).close()
    assert os.path.exists(f"/dev/shm/sem.{bell.name[1:]}")
    group.close()


def test_a_bell_that_is_gone_cannot_be_attached() -> None:
    with pytest.raises(FileNotFoundError):
        Doorbell.attach("/shmload-no-such-bell")
