"""A budgeted folder: room is reserved before bytes are written, the oldest unleased files are evicted, and errors explain what is
missing.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import re
import shutil
import textwrap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmload import CacheFull, StoreError
from shmload.storage import folder_session as session_module
from shmload.storage import ledger as ledger_module
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.ledger import HIDDEN, NEW, PublishedFile
from tests.storage.cache.folder_kit import being_written, content, files_on_disk, names, put, simulate_kill, users

DEADLINE_S = 60


def test_oldest_unleased_files_are_evicted(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    for name in ("first", "second", "third"):
        put(folder, name, 30)
    with folder.lease("first"):
        put(folder, "fourth", 40)
        assert names(folder) == ["first", "third", "fourth"]
    put(folder, "fifth", 60)
    assert names(folder) == ["fourth", "fifth"]
    assert files_on_disk(place) == {"fourth": 40, "fifth": 60}
    found = folder.statistics()
    assert (found.nbytes, found.num_files, found.num_writing, found.num_leased, found.num_evicted, found.nbytes_evicted) == (
        100,
        2,
        0,
        0,
        3,
        90,
    )


def test_files_that_no_reader_has_seen_are_spared_while_any_file_is_leased(place: str) -> None:
    folder = BudgetedFolder(place, 100, spares_new=True)
    for name in ("old", "leased", "new", "newest"):
        put(folder, name, 25)
    with folder.lease("leased"):
        put(folder, "first", 25)
        assert names(folder) == ["leased", "new", "newest", "first"]
        with pytest.raises(CacheFull, match="25 of them are leased, 25 by this process, and 0 may be evicted"):
            put(folder, "second", 25)
        assert folder.free_disk(1)  # for the readers' own small files
        assert names(folder) == ["leased", "newest", "first"]
        with folder.reserve(25) as reservation, pytest.raises(CacheFull):
            reservation.grow(1)
    put(folder, "third", 50)
    assert names(folder) == ["newest", "first", "third"]


def test_request_that_cannot_be_met_evicts_nothing(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "free", 30)
    put(folder, "held", 50)
    lease = folder.lease("held")
    with folder.reserve(10), pytest.raises(CacheFull) as caught:
        folder.reserve(60)
    assert str(caught.value) == (
        f"{place} has no room for 60 more bytes: 90 of its budget of 100 bytes are in use (2 files, 1 being written), "
        "50 of them are leased, 50 by this process, and 30 may be evicted: make the budget larger, hold fewer files at once, or wait longer"
    )
    assert names(folder) == ["free", "held"]
    lease.release()


def test_file_larger_than_the_budget_is_refused_without_waiting(place: str) -> None:
    with pytest.raises(CacheFull, match=r"a file of 101 bytes can never fit in .*, whose budget is 100 bytes: make files smaller"):
        BudgetedFolder(place, 100).reserve(101, timeout_s=None)


def test_invalid_budget_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="at least 1 byte, got capacity_bytes=0"):
        BudgetedFolder(place, 0)


def test_reservation_counts_in_full_and_is_invisible(place: str) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    with folder.reserve(80) as reservation:
        os.pwrite(reservation.fd, b"begun", 0)
        for user in (folder, other):
            assert (user.statistics().nbytes, user.statistics().num_files, user.statistics().num_writing) == (80, 0, 1)
            with pytest.raises(CacheFull):
                user.reserve(21)
        kept = reservation.publish("done", nbytes=5)
    assert (kept.nbytes, kept.name) == (5, "done")
    assert other.statistics().nbytes == 5
    assert Path(place, "done").read_bytes() == b"begun"
    assert being_written(place) == {}


def test_reservation_grows_within_the_budget(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "old", 30)
    with folder.reserve(20) as reservation:
        reservation.grow(70)
        assert (names(folder), reservation.nbytes, folder.statistics().nbytes) == ([], 90, 90)
        with pytest.raises(CacheFull, match=r"no room for 1 more bytes|a file of 101 bytes can never"):
            reservation.grow(11)
    assert folder.statistics().nbytes == 0


def test_descriptor_of_a_lease_is_closed_with_it(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 10)
    with folder.lease("x") as lease:
        fd = lease.fd
        assert os.pread(fd, 2, 0) == content("x", 2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_reservation_that_cannot_grow_is_unchanged(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    folder = BudgetedFolder(place, 100)
    with folder.reserve(20) as reservation:
        with pytest.raises(ValueError, match="a reservation must grow by at least 0 bytes, got -1"):
            reservation.grow(-1)
        with monkeypatch.context() as patch, pytest.raises(CacheFull, match=r"the disk of .* has no room for 30 more bytes"):
            patch.setattr(os, "posix_fallocate", full)
            reservation.grow(30)
        assert (reservation.nbytes, folder.statistics().nbytes, os.fstat(reservation.fd).st_size) == (20, 20, 20)


def test_unpublished_file_is_removed_when_its_block_ends(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    with pytest.raises(KeyError), folder.reserve(50) as reservation:
        raise KeyError
    assert (being_written(place), folder.statistics().nbytes) == ({}, 0)
    reservation.abandon()
    for use in (lambda: reservation.fd, lambda: reservation.publish("x"), lambda: reservation.grow(1)):
        with pytest.raises(ValueError, match="has been published or abandoned"):
            use()


def test_file_larger_than_its_reservation_is_not_published(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    with folder.reserve(10) as reservation:
        os.pwrite(reservation.fd, bytes(11), 0)
        with pytest.raises(StoreError, match="11 bytes were written for x, but only 10 are reserved: reserve enough, or grow"):
            reservation.publish("x")
    with folder.reserve(10) as reservation, pytest.raises(StoreError, match="12 bytes were written"):
        reservation.publish("x", nbytes=12)


def test_file_that_replaced_a_reservation_is_not_published(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    with folder.reserve(10) as reservation:
        Path(f"{reservation.path}.other").write_bytes(bytes(99))
        os.replace(f"{reservation.path}.other", reservation.path)
        with pytest.raises(StoreError, match="was replaced by another file: write into the reserved file instead of replacing it"):
            reservation.publish("x")
    assert names(folder) == []


def test_name_is_published_once(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 10)
    with folder.reserve(10) as reservation:
        with pytest.raises(FileExistsError, match="already has a file x: publish under another name, or discard that file first"):
            reservation.publish("x")
        assert folder.discard("x")
        reservation.publish("x")
    assert not folder.discard("y")
    with folder.lease("x"):
        assert not folder.discard("x")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\0b", "x" * 256])
def test_invalid_names_are_refused(place: str, name: str) -> None:
    with BudgetedFolder(place, 10).reserve(1) as reservation, pytest.raises(ValueError, match="must have 1 to 255 bytes, no '/'"):
        reservation.publish(name)


def test_reservation_is_written_by_file_or_descriptor(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    with folder.reserve(10) as reservation:
        os.pwrite(reservation.fd, b"first", 0)
        with open(reservation.path, "r+b") as file:
            file.seek(5)
            file.write(b"third")
        reservation.publish("both")
    assert Path(place, "both").read_bytes() == b"firstthird"


def test_foreign_files_are_neither_counted_nor_removed(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    Path(place, "foreign").write_bytes(bytes(90))
    Path(place, "sub").mkdir()
    for number in range(5):
        put(folder, f"ours-{number}", 40)
    folder.refresh()
    assert names(folder) == ["ours-3", "ours-4"]
    assert Path(place, "foreign").stat().st_size == 90
    with pytest.raises(FileNotFoundError, match="has no file foreign: it was evicted or never published"):
        folder.lease("foreign")


def test_adopting_folder_counts_and_evicts_foreign_files(place: str) -> None:
    folder = BudgetedFolder(place, 100, adopts=True)
    put(folder, "ours", 20)
    Path(place, "theirs").write_bytes(bytes(50))
    Path(place, ".hidden").write_bytes(bytes(500))
    os.utime(f"{place}/theirs", ns=(1, 1))
    folder.refresh()
    assert (names(folder), folder.statistics().nbytes) == (["theirs", "ours"], 70)
    put(folder, "next", 60)
    assert names(folder) == ["ours", "next"]
    Path(place, "more").write_bytes(bytes(70))
    folder.refresh()
    assert names(folder) == ["more"]


def test_user_with_another_budget_is_refused_while_one_is_open(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "a", 60)
    put(folder, "b", 30)
    with pytest.raises(ValueError, match=re.escape(
        f"process {os.getpid()} uses {place} with a budget of 100 bytes, but this one was given 70 bytes: "
        "give all users of a folder the same"
    )):  # fmt: skip
        BudgetedFolder(place, 70)
    assert len(users(place)) == 1
    folder.close()
    smaller = BudgetedFolder(place, 70)
    assert names(smaller) == ["b"]


def test_dead_users_and_their_reservations_are_removed_by_the_next_user(place: str) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    put(folder, "held", 60)
    lease = folder.lease("held")
    reservation = folder.reserve(40)
    with pytest.raises(CacheFull):
        other.reserve(1)
    simulate_kill(folder)
    assert len(users(place)) == 2
    put(other, "new", 100)
    assert (names(other), being_written(place), len(users(place))) == (["new"], {}, 1)
    lease.release()  # a lease of a closed session: nothing happens
    reservation.abandon()


def test_lease_outlives_the_folder_object(place: str) -> None:
    lease = BudgetedFolder(place, 100).reserve(60).publish_leased("x")
    with pytest.raises(CacheFull, match="60 of them are leased"):
        BudgetedFolder(place, 100).reserve(60)
    lease.release()
    put(BudgetedFolder(place, 100), "y", 60)


def test_files_may_be_leased_repeatedly_and_together(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    for name in "abc":
        put(folder, name, 30)
    twice, once = folder.lease("a"), folder.lease("a")
    with folder.lease_many() as everything, folder.lease_many(["c", "gone", "a", "c"]) as some:
        assert (everything.names, everything.nbytes, some.names) == (["a", "b", "c"], 90, ["c", "a"])
        assert [f"{place}/{name}" for name in "abc"] == everything.paths
        assert folder.statistics().num_leased == 3
        with pytest.raises(CacheFull):
            folder.reserve(11)
    assert folder.statistics().num_leased == 1
    twice.release()
    twice.release()
    assert ("released" in repr(once), "released" in repr(twice)) == (False, True)
    assert folder.statistics().num_leased == 1
    assert os.pread(once.fd, 3, 0) == b"aaa"
    assert "<Lease of 1 files, 30 bytes in" in repr(once)
    del once
    assert folder.statistics().num_leased == 0


def test_many_leases_need_no_descriptors(place: str) -> None:
    folder, other = BudgetedFolder(place, 300), BudgetedFolder(place, 300)
    for number in range(300):
        put(folder, f"{number:03}", 1)
    before = len(os.listdir("/proc/self/fd"))
    leases = [folder.lease(f"{number:03}") for number in range(0, 300, 2)]
    assert before == len(os.listdir("/proc/self/fd"))
    for lease in leases[::3]:
        lease.release()
    del leases[::3]
    leases += [folder.lease(f"{number:03}") for number in range(1, 60, 2)]
    assert len(leases) == other.statistics().num_leased
    put(other, "x", 300 - len(leases))
    assert {lease.name for lease in leases} | {"x"} == set(files_on_disk(place))


def test_release_by_the_garbage_collector_inside_the_lock_is_deferred(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 10)
    lease = folder.lease("x")
    with folder._session().locked():
        del lease  # as a garbage collection would, at any allocation there
    assert folder.statistics().num_leased == 0


def test_unpickled_folder_is_the_same_folder(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 10)
    again = pickle.loads(pickle.dumps(folder))
    assert (names(again), len(users(place))) == (["x"], 2)
    assert repr(folder) == f"<BudgetedFolder {place} of 100 bytes>"


def test_waiter_gets_room_when_a_lease_ends(place: str) -> None:
    waits = threading.Event()

    def order(files: Iterator[PublishedFile]) -> list[PublishedFile]:  # when it is called first, the lease still exists
        found = list(files)
        waits.set()
        return found

    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100, order=order)
    put(folder, "x", 80)
    lease, got = folder.lease("x"), []

    def wait() -> None:
        with other.reserve(60, timeout_s=10) as reservation:
            got.append(reservation.publish("y").name)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    lease.release()
    thread.join()
    assert (got, files_on_disk(place)) == (["y"], {"y": 60})


def test_wait_ends_at_its_deadline(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "x", 80)
    with folder.lease("x"), pytest.raises(CacheFull, match="or wait longer"):
        folder.reserve(60, timeout_s=0.01)


def test_one_process_writes_a_file_and_the_others_wait_for_it(place: str) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    reservation = folder.obtain("x", 10)
    with pytest.raises(TimeoutError, match=r"another process was still writing x into .* after 0 s: increase timeout_s"):
        other.obtain("x", 10, timeout_s=0)
    assert not isinstance(reservation, Path)
    simulate_kill(folder)
    second = other.obtain("x", 10, timeout_s=0)
    os.pwrite(second.fd, content("x", 10), 0)  # what the dead process wrote is lost
    second.publish("x")  # type: ignore[union-attr]  # there was room
    with other.obtain("x", 10) as lease:
        assert lease.name == "x"


def test_removed_hidden_folder_is_an_error(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    os.rename(f"{place}/{HIDDEN}", f"{place}/elsewhere")
    os.unlink(f"{place}/elsewhere/ledger")
    with pytest.raises(StoreError, match=r"\.shmload was removed while this process used the folder: open it again"):
        folder.files()
    folder.close()
    assert names(folder) == []
    assert os.path.isdir(f"{place}/{NEW}")


def test_reservation_keeps_its_descriptor_when_another_thread_closes_the_folder(place: str, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    folder = BudgetedFolder(place, 100)
    reservation = folder.reserve(40)
    fd = reservation.fd
    folder.close()
    with open(tmp_path / "another", "wb", buffering=0) as another:
        assert another.fileno() != fd
        os.pwrite(fd, b"x" * 40, 0)
    assert (tmp_path / "another").read_bytes() == b""
    assert being_written(place) == {}
    with pytest.raises(ValueError, match="has been published or abandoned, or its folder was closed"):
        reservation.publish("late")
    reservation.abandon()
    del reservation
    assert os.listdir("/proc/self/fd") == before


def test_close_waits_until_the_lock_is_free(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "held", 60)
    lease, another = folder.lease("held"), folder.lease("held")
    session = folder._opened
    assert session is not None
    with session.locked() as ledger:
        lease.release()
        folder.close()
        another.release()
        ledger.list_again()
        assert [*ledger.files] == ["held"]
        assert len(users(place)) == 1
    assert users(place) == []


def test_folder_is_closed_while_a_thread_ends_its_file(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BudgetedFolder(place, 100)
    written = [folder.reserve(30), folder.reserve(30)]
    session, remove = folder._opened, ledger_module.unlink
    assert session is not None

    def remove_while_the_writer_ends(path: str) -> None:
        session.end_writing(written[0].name)  # as the end of `publish` and `abandon` does, without the lock
        remove(path)

    monkeypatch.setattr(session_module, "unlink", remove_while_the_writer_ends)
    folder.close()
    assert users(place) == []
    assert os.listdir(f"{place}/{NEW}") == []


def test_removed_folder_is_not_created_again(tmp_path: Path) -> None:
    place = tmp_path / "parent" / "folder"
    folder = BudgetedFolder(place, 100, recreates=False)
    put(folder, "first", 30)
    lease = folder.lease("first")
    folder.close()
    shutil.rmtree(place.parent)
    for use in (folder.files, lambda: folder.reserve(30), lambda: pickle.loads(pickle.dumps(folder)).files()):
        with pytest.raises(FileNotFoundError, match=str(place)):
            use()
    lease.release()
    assert not place.parent.exists()


def test_thread_waiting_for_room_fails_when_the_folder_is_closed(place: str) -> None:
    waits = threading.Event()

    def nothing(files: Iterator[PublishedFile]) -> list[PublishedFile]:
        waits.set()
        return []

    folder = BudgetedFolder(place, 100, order=nothing)
    put(folder, "held", 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(folder.reserve, 60, timeout_s=None)
        assert waits.wait(DEADLINE_S)
        folder.close()
        with pytest.raises(
            ValueError, match="was closed by one thread while another used it: close it after all threads have finished"
        ):
            waiting.result(DEADLINE_S)


def test_caller_may_define_the_order_of_eviction(place: str) -> None:
    folder = BudgetedFolder(place, 100, order=lambda files: [kept for kept in reversed(list(files)) if kept.name != "b"])
    for name in "abc":
        put(folder, name, 30)
    put(folder, "d", 30)
    assert names(folder) == ["a", "b", "d"]
    with pytest.raises(CacheFull, match="0 of them are leased, 0 by this process, and 60 may be evicted"):
        folder.reserve(71)


def test_durable_file_is_synced_before_it_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(list(files_on_disk(place))))
    put(BudgetedFolder(place, 100, durable=True), "x", 1)
    put(BudgetedFolder(place, 100), "careless", 1)
    assert synced == [[]]


def test_lost_ledger_loses_no_file(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "kept", 1)
    folder.close()
    shutil.rmtree(f"{place}/{HIDDEN}")
    assert names(BudgetedFolder(place, 100)) == ["kept"]


def test_file_system_without_locks_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(fd: int) -> bool:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(session_module, "try_lock", unknown)
    with pytest.raises(
        StoreError, match=r"is on a file system without file locks \(\w+: Operation not supported\), which a shared cache needs"
    ):
        BudgetedFolder(place, 100)
    monkeypatch.setattr(session_module, "try_lock", lambda fd: True)
    with pytest.raises(
        StoreError, match=r"without file locks \(\w+: locks do not exclude other processes\), .*: choose a folder on a local disk"
    ):
        BudgetedFolder(place, 100)


def test_file_system_type_is_the_kernels_name() -> None:
    assert (session_module.file_system_type("/proc/self"), session_module.file_system_type("/dev/shm")) == ("proc", "tmpfs")


class _Caller:
    """An object whose frame is in an error's traceback."""

    def ask(self, folder: BudgetedFolder) -> None:
        with pytest.raises(CacheFull, match="no room for 90 more bytes"):
            folder.reserve(90)


def test_error_about_missing_room_does_not_keep_the_caller_alive(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "kept", 50)
    caller = _Caller()
    caller_ref = weakref.ref(caller)
    gc.disable()  # so that only reference counts free objects
    try:
        with folder.lease("kept"):
            caller.ask(folder)
        del caller
        assert caller_ref() is None
    finally:
        gc.enable()


def test_lease_released_at_interpreter_exit_prints_nothing(output_of: Callable[[str], str]) -> None:
    code = """
    from shmload.storage.file_lease import Leases

    def release(inodes):
        raise TypeError("what it needs is gone")

    kept = Leases("folder", (), release)  # it dies with the module, when what it needs may be gone
    """
    assert output_of(textwrap.dedent(code)) == ""


def test_network_file_system_is_logged(place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    BudgetedFolder(place, 100)
    assert caplog.text == ""
    monkeypatch.setattr(session_module, "file_system_type", lambda folder: "nfs4")
    BudgetedFolder(place, 100)
    assert f"{place} is on a network file system (nfs4): processes of other machines may only add files there" in caplog.text


class CountedFiles(OrderedDict[str, PublishedFile]):
    """The files of a ledger, which counts how many are visited."""

    num_visited = 0

    def values(self) -> Any:
        return self

    def __iter__(self) -> Any:
        for name in super().__iter__():
            self.num_visited += 1
            yield self[name]

    def __reversed__(self) -> Any:
        return (self[name] for name in super().__reversed__())


def test_eviction_of_the_oldest_file_does_not_visit_the_others(place: str) -> None:
    folder = BudgetedFolder(place, 1000)
    for number in range(100):
        put(folder, f"{number:03}", 10)
    assert folder._opened is not None
    files = folder._opened.ledger.files = CountedFiles(folder._opened.ledger.files.items())
    put(folder, "100", 10)
    assert files.num_visited <= 2
    assert (len(files), "000" in files) == (100, False)
