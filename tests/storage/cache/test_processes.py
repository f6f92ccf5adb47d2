"""Leases and reservations across forks and ends of processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmload import CacheFull
from shmload.processes.file_lock import FileLock
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.file_lease import Lease
from tests.storage.cache.folder_kit import being_written, files_on_disk, names, put, users

DEADLINE_S = 60


@contextmanager
def child(body: Callable[[], object]) -> Iterator[int]:
    """Forks a process that runs `body`, reports that and then blocks; yields its process id."""
    ready, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kept = body()  # noqa: F841  what it holds lives until it is killed
            os.write(writing, b"x")
            signal.pause()
            status = 0
        finally:
            os._exit(status)
    try:
        os.close(writing)
        assert select.select([ready], [], [], DEADLINE_S)[0]
        assert os.read(ready, 1) == b"x", "the child failed; its traceback is above"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


def test_killed_process_holds_nothing_and_waiters_continue_at_once(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "held", 60)
    with child(lambda: (folder.lease("held"), folder.reserve(40))) as pid:
        with pytest.raises(CacheFull, match=r"1 being written.*60 of them are leased, 0 by this process"):
            folder.reserve(1)
        os.kill(pid, signal.SIGKILL)
        with folder.reserve(100, timeout_s=DEADLINE_S) as reservation:
            reservation.publish("new")
    assert (files_on_disk(place), being_written(place), len(users(place))) == ({"new": 100}, {}, 1)


def test_copy_that_ends_in_a_child_closes_none_of_the_childs_files(tmp_path: Path) -> None:
    of_parent = FileLock.open(f"{tmp_path}/parent", os.O_CREAT)

    def opens_its_own_and_ends_the_copy() -> None:
        number, own = of_parent.fd, [FileLock.open(f"{tmp_path}/0", os.O_CREAT)]
        while own[-1].fd != number:  # lower numbers may be free, too
            own.append(FileLock.open(f"{tmp_path}/{len(own)}", os.O_CREAT))
        of_parent.close()
        os.fstat(number)

    with child(opens_its_own_and_ends_the_copy):
        pass


def test_child_that_ends_its_copies_does_not_affect_its_parent(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "held", 60)
    lease, reservation = folder.lease("held"), folder.reserve(30)

    def end_all() -> None:
        lease.release()
        reservation.abandon()
        with pytest.raises(ValueError, match=rf"belongs to process {os.getppid()}: make another one in a forked child"):
            _ = reservation.fd
        folder.close()

    with child(end_all):
        assert (folder.statistics().num_leased, folder.statistics().num_writing) == (1, 1)
        with pytest.raises(CacheFull):
            BudgetedFolder(place, 100).reserve(11)
        reservation.publish("written")
    assert "released" not in repr(lease)


def test_leases_of_a_parent_end_with_it_while_its_child_lives(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "held", 60)
    tells, told = os.pipe()

    def parent() -> Lease:
        lease = folder.lease("held")
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.write(told, pid.to_bytes(4, "little"))
        return lease

    with child(parent) as pid:
        grandchild = int.from_bytes(os.read(tells, 4), "little")
        try:
            os.kill(pid, signal.SIGKILL)
            folder.reserve(100, timeout_s=DEADLINE_S).abandon()
        finally:
            os.kill(grandchild, signal.SIGKILL)
    os.close(tells)
    os.close(told)
    assert names(folder) == []


def test_forked_child_takes_its_own_leases(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 60)
    with child(lambda: folder.lease_many()):
        assert (folder.statistics().num_leased, len(users(place))) == (1, 2)
    assert (folder.statistics().num_leased, len(users(place))) == (0, 1)


def publish_one(folder: BudgetedFolder) -> None:
    put(folder, "theirs", 50)


@pytest.mark.slow(reason="a process starts by spawn, and imports all modules")
def test_spawned_process_uses_an_unpickled_folder(place: str) -> None:
    folder: Any = BudgetedFolder(place, 100)
    process = multiprocessing.get_context("spawn").Process(target=publish_one, args=(folder,))
    process.start()
    process.join()
    assert (names(folder), len(users(place))) == (["theirs"], 1)
