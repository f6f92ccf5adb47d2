"""Which control blocks are found, which processes own them, and which are leftovers of dead processes."""

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
    """Yields a replacement for /dev/shm: this process owns group 0, the owner of group 1 is dead, and the ring of 2 is in a
    memfd.
    """
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


def test_locked_block_is_alive_and_its_holder_is_named(folder: Path) -> None:
    (block,) = [block for block in RingReader.find(str(folder)).blocks if block.kind == "shm"]
    assert block == (f"{STEM}0", str(folder / f"{STEM}0-control"), UID, os.getpid(), "shm")


def test_unlocked_block_is_a_leftover(folder: Path) -> None:
    found = RingReader.find(str(folder))
    assert [leftover.stem for leftover in found.leftovers] == [f"{STEM}1"]
    assert (folder / f"{STEM}1-control").exists()


def test_live_block_of_an_invisible_holder_has_no_pid(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    proc = tmp_path_factory.mktemp("proc")
    assert [block.pid for block in RingReader.find(str(folder), str(proc)).blocks] == [None]
    (proc / "locks").write_text("1: -> FLOCK  ADVISORY  WRITE 7 00:1b:9 0 EOF\n2: POSIX  ADVISORY  READ 7 <none>:0 0 EOF\n")
    assert [block.pid for block in RingReader.find(str(folder), str(proc)).blocks] == [None]


def test_control_block_in_a_memfd_is_found_through_its_trainer(tmp_path: Path) -> None:
    control, payload = (os.memfd_create(f"{STEM}3-{part}") for part in ("control", "payload-0"))
    try:
        found = [block for block in RingReader.find(str(tmp_path)).blocks if block.stem == f"{STEM}3"]
        assert found == [(f"{STEM}3", f"/proc/{os.getpid()}/fd/{control}", UID, os.getpid(), "memfd")]
    finally:
        os.close(control)
        os.close(payload)


def test_missing_folder_has_no_blocks(tmp_path: Path) -> None:
    found = RingReader.find(str(tmp_path / "nothing"), str(tmp_path))
    assert (found.blocks, found.leftovers) == ([], [])
