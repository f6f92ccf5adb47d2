"""Which control blocks there are, whose, and which of them are dead ones'."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmload.engine.ring_reader import RingReader

UID = os.getuid()
STEM = f"shmload-{UID}-f1d000000000-"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in the place of /dev/shm: group 0's owner lives in this process, 1's is dead, 2's ring is in a memfd."""
    contents = {f"{STEM}0-control": 4096, f"{STEM}0-payload-0": 8192, f"{STEM}1-control": 4096, f"{STEM}2-control": 0}
    for name, nbytes in contents.items():
        (tmp_path / name).write_bytes(bytes(nbytes))
    fds = [os.open(tmp_path / f"{STEM}{k}-control", os.O_RDWR) for k in (0, 2)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX)
    for other in ("shmload-index-control", "sem.shmload", "pym-1234"):
        (tmp_path / other).write_bytes(b"x")
    yield tmp_path
    for fd in fds:
        os.close(fd)


def test_a_block_whose_lock_is_held_lives_and_its_holder_is_named(folder: Path) -> None:
    (block,) = [block for block in RingReader.find(str(folder)).blocks if block.kind == "shm"]
    assert block == (f"{STEM}0", str(folder / f"{STEM}0-control"), UID, os.getpid(), "shm")


def test_a_block_whose_lock_nobody_holds_is_a_leftover(folder: Path) -> None:
    found = RingReader.find(str(folder))
    assert [leftover.stem for leftover in found.leftovers] == [f"{STEM}1"]
    assert (folder / f"{STEM}1-control").exists()


def test_a_living_block_whose_holder_is_not_in_sight_has_no_pid(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    proc = tmp_path_factory.mktemp("proc")
    assert [block.pid for block in RingReader.find(str(folder), str(proc)).blocks] == [None]
    (proc / "locks").write_text("1: -> FLOCK  ADVISORY  WRITE 7 00:1b:9 0 EOF\n2: POSIX  ADVISORY  READ 7 <none>:0 0 EOF\n")
    assert [block.pid for block in RingReader.find(str(folder), str(proc)).blocks] == [None]


def test_a_control_block_in_a_memfd_is_found_at_its_trainer(tmp_path: Path) -> None:
    control, payload = (os.memfd_create(f"{STEM}3-{part}") for part in ("control", "payload-0"))
    try:
        found = [block for block in RingReader.find(str(tmp_path)).blocks if block.stem == f"{STEM}3"]
        assert found == [(f"{STEM}3", f"/proc/{os.getpid()}/fd/{control}", UID, os.getpid(), "memfd")]
    finally:
        os.close(control)
        os.close(payload)


def test_without_a_folder_there_is_nothing_named(tmp_path: Path) -> None:
    found = RingReader.find(str(tmp_path / "nothing"), str(tmp_path))
    assert (found.blocks, found.leftovers) == ([], [])
