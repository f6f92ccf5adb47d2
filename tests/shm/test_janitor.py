"""The janitor's rules in a folder of their own: what it takes for dead, and that it holds the lock while it removes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload.processes.file_lock import FileLock
from shmload.shm import janitor
from shmload.shm import segment as segment_module
from shmload.shm.janitor import find_leftovers, sweep
from shmload.shm.names import SHM_DIR, process_stem
from shmload.shm.segment import open_segment
from shmload.shm.segment_group import SegmentGroup

STEM = f"shmload-{os.getuid()}-0123456789ab-0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("control", "payload-0"):
        (tmp_path / f"{STEM}-{part}").write_bytes(b"x" * 100)
    (tmp_path / f"sem.{STEM}-ready").write_bytes(b"x")
    return tmp_path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("sem.").removeprefix(f"{STEM}-") for path in folder.iterdir()}


def test_dead_group_is_removed_at_any_age(folder: Path) -> None:
    (found,) = sweep(str(folder), guard_s=1e9)
    assert (found.stem, found.error, len(found.paths)) == (STEM, "", 3)
    assert names(folder) == set()


def test_locked_group_is_not_removed(folder: Path) -> None:
    with locked(folder / f"{STEM}-control"):
        assert sweep(str(folder), guard_s=-1) == []
    assert names(folder) == {"control", "payload-0", "ready"}


def test_lock_is_held_while_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, order = folder / f"{STEM}-control", []
    unlink = os.unlink

    def watched(path: str) -> None:
        with open(control, "r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        order.append(os.path.basename(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", watched)
    sweep(str(folder))
    assert order[-1] == control.name
    assert len(order) == 3


def test_group_recreated_during_a_sweep_is_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = folder / f"{STEM}-control"
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        control.unlink()
        control.write_bytes(b"the next one's")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert sweep(str(folder)) == []
    assert control.read_bytes() == b"the next one's"


def test_lock_that_cannot_be_queried_counts_as_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert sweep(str(folder), guard_s=-1) == []
    assert names(folder) == {"control", "payload-0", "ready"}


def test_group_without_a_control_segment_is_kept_until_it_is_old(folder: Path) -> None:
    (folder / f"{STEM}-control").unlink()
    assert sweep(str(folder), guard_s=60) == []
    (found,) = sweep(str(folder), guard_s=-1)
    assert found.why == "it has no control segment: its owner died at its start or its end"
    assert names(folder) == set()


def test_control_segment_under_construction_is_not_removed(folder: Path) -> None:
    (folder / f"{STEM}-control").rename(folder / f"{STEM}-control.new")
    with locked(folder / f"{STEM}-control.new"):
        assert sweep(str(folder), guard_s=-1) == []
    assert sweep(str(folder), guard_s=60) == []  # not locked yet
    assert len(sweep(str(folder), guard_s=-1)) == 1
    assert names(folder) == set()


def test_control_segment_is_locked_before_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rename, seen = os.rename, []

    def looked_at(old: str, new: str) -> None:
        assert not os.path.exists(new)
        rename(old, new)
        with open(new, "r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(new)

    monkeypatch.setattr(os, "rename", looked_at)
    group = SegmentGroup()
    control = group.segment("control", 4096)
    group.segment("payload-0", 4096)
    assert seen == [control.path, f"{SHM_DIR}/{group.stem}-payload-0"]
    group.close()


def test_segment_that_a_janitor_locks_during_its_creation_is_not_used_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    make, held = segment_module._make_file, []

    def made_and_looked_at(name: str, nbytes: int) -> None:
        make(name, nbytes)
        held.append(FileLock.open(f"{SHM_DIR}/{name}"))
        assert held[-1].try_acquire()

    monkeypatch.setattr(segment_module, "_make_file", made_and_looked_at)
    group = SegmentGroup()
    assert group.segment("payload-0", 4096).kind == "memfd"
    assert len(held) == 1
    held[0].close()
    group.close()


@pytest.mark.slow(reason="thirty groups come and go while two janitors sweep all the time")
def test_concurrent_janitors_do_not_remove_live_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = process_stem().replace(str(os.getuid()), r"(\d+)", 1)
    # Excludes groups of tests in other processes.
    monkeypatch.setattr(janitor, "STEM_PATTERN", re.compile(rf"(?:sem\.)?({ours}-\d+)-.+"))
    stop = threading.Event()

    def sweeps() -> None:
        while not stop.is_set():
            sweep(guard_s=60)

    janitors = [threading.Thread(target=sweeps) for _ in range(2)]
    for thread in janitors:
        thread.start()
    try:
        for _ in range(30):
            group = SegmentGroup()
            control, bell = group.segment("control", 4096), group.doorbell("ready")
            payload = group.segment("payload-0", 4096)
            for path in (control.path, payload.path):
                os.close(open_segment(path))
            assert os.path.exists(f"{SHM_DIR}/sem.{bell.name[1:]}")
            group.close()
    finally:
        stop.set()
        for thread in janitors:
            thread.join()


def test_owner_of_a_real_loader_is_identified_by_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShmLoader(list(range(8)), batch_size=2, seed=1, num_workers=1) as loader:
        next(iter(loader))
        monkeypatch.setattr(janitor, "_is_locked", lambda lock: False)
        assert [os.getpid()] == [found.pid for found in find_leftovers() if process_stem() in found.stem]


def test_missing_folders_are_empty(tmp_path: Path) -> None:
    assert sweep(str(tmp_path / "none")) == []


@pytest.mark.slow(reason="hypothesis makes and sweeps many folders")
@settings(deadline=None, max_examples=60)
@given(
    parts=st.sets(st.sampled_from(["control", "control.new", "payload-0", "orders-1"]), min_size=1),
    is_locked=st.booleans(),
    guard_s=st.sampled_from([-1.0, 60.0]),
)
def test_locked_groups_are_kept_and_groups_with_an_unlocked_control_segment_removed(
    parts: set[str], is_locked: bool, guard_s: float, tmp_path_factory: Any
) -> None:
    folder: Path = tmp_path_factory.mktemp("shm")
    for part in parts:
        (folder / f"{STEM}-{part}").write_bytes(b"")
    lock = next((part for part in ("control", "control.new") if part in parts), None)
    with locked(folder / f"{STEM}-{lock}") if is_locked and lock else nullcontext():
        sweep(str(folder), guard_s=guard_s)
    stays = (is_locked and lock is not None) or ("control" not in parts and guard_s > 0)
    assert names(folder) == (parts if stays else set())
