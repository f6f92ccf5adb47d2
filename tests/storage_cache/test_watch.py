"""Waiting: events wake, deadlines end it, and without inotify a look is due all the same."""

from __future__ import annotations

import os
from time import monotonic

import pytest

from shmload import CacheFull
from shmload.storage import folder as watch_module
from shmload.storage.folder import LOOK_S, BudgetedFolder, FolderWatch
from tests.storage_cache.folder_kit import put


@pytest.mark.parametrize("what", ["release", "publish", "abandon", "discard"])
def test_what_may_make_room_wakes(place: str, what: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 10)
    lease, reservation = folder.lease("x"), folder.reserve(20)
    put(folder, "y", 10)
    begin = monotonic()
    with FolderWatch(place) as watch:
        {
            "release": lease.release,
            "publish": lambda: reservation.publish("z"),
            "abandon": reservation.abandon,
            "discard": lambda: folder.discard("y"),
        }[what]()
        assert watch.wait(begin + 30)
    assert monotonic() - begin < LOOK_S
    reservation.abandon()


def test_a_second_look_follows_each_event_soon(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    with FolderWatch(place) as watch:
        folder._session().process_leases.ring()
        assert watch.wait(None)
        begin = monotonic()
        assert watch.wait(None)
        assert monotonic() - begin < LOOK_S / 2


def test_without_inotify_the_deadline_holds_and_a_look_is_due(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_S", 0.01)

    class None_:  # noqa: N801  of the C library
        @staticmethod
        def inotify_init1(flags: int) -> int:
            return -1

    monkeypatch.setattr(watch_module, "_libc", None_)
    folder = BudgetedFolder(place, 100)
    with FolderWatch(place) as watch:
        assert watch.wait(None)
        assert not watch.wait(monotonic())
    put(folder, "x", 80)
    with folder.lease("x"), pytest.raises(CacheFull):
        folder.reserve(60, timeout_s=0.03)


def test_a_watch_leaves_no_descriptor(place: str) -> None:
    BudgetedFolder(place, 100)
    before = os.listdir("/proc/self/fd")
    with FolderWatch(place):
        assert len(before) < len(os.listdir("/proc/self/fd"))
    assert before == os.listdir("/proc/self/fd")
