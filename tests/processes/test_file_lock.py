"""File locks: which process holds a lock, and until when."""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmload.processes.file_lock import FileLock, is_locked, locked
from shmload.remote.private_folder import PrivateFolder, remove_abandoned


def test_lock_is_seen_until_it_is_closed(tmp_path: Path) -> None:
    lock = FileLock.open(tmp_path / "file", os.O_CREAT)
    assert not is_locked(tmp_path / "file")
    lock.acquire()
    assert is_locked(tmp_path / "file")
    other = FileLock.open(tmp_path / "file")
    assert not other.try_acquire()
    lock.close()
    lock.close()
    assert other.try_acquire()
    assert lock.fd == -1


def test_closed_lock_is_free_although_its_file_is_mapped(tmp_path: Path) -> None:
    lock = FileLock.open(tmp_path / "file", os.O_CREAT)
    os.truncate(tmp_path / "file", 8)
    lock.acquire()
    with mmap.mmap(lock.fd, 8):
        lock.close()
        assert not is_locked(tmp_path / "file")


def test_file_that_is_missing_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")


@contextmanager
def orphan(make: Callable[[], object]) -> Iterator[None]:
    """Runs a process that lives on after the end of its parent, which called `make` before the fork."""
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        made = make()
        if os.fork():
            os._exit(0)
        os.close(go)
        os.read(wait, 1)
        os._exit(made is None)
    os.close(wait)
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        os.close(go)


def test_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    def owner() -> FileLock:
        lock = FileLock.open(tmp_path / "file", os.O_CREAT)
        lock.acquire()
        return lock

    with orphan(owner):
        assert (tmp_path / "file").exists()
        assert not is_locked(tmp_path / "file")


def test_private_folder_is_removed_although_a_child_of_its_dead_owner_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    with orphan(PrivateFolder):
        assert len(remove_abandoned(tmp_path)) == 1


def test_program_that_is_run_keeps_no_lock(tmp_path: Path) -> None:
    lock = FileLock.open(tmp_path / "file", os.O_CREAT)
    lock.acquire()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        assert not is_locked(tmp_path / "file")


def test_file_that_was_replaced_is_not_the_locked_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    lock = FileLock.open(path, os.O_CREAT)
    assert lock.is_at(path)
    path.unlink()
    assert not lock.is_at(path)
    path.touch()
    assert not lock.is_at(path)


def test_locked_block_excludes_others(tmp_path: Path) -> None:
    with locked(tmp_path / "gate") as fd:
        assert os.fstat(fd).st_size == 0
        assert is_locked(tmp_path / "gate")
    assert not is_locked(tmp_path / "gate")


def test_symbolic_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock.open(tmp_path / "link", os.O_CREAT)
