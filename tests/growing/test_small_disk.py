"""A growing cache on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shmload.errors import CacheFull
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.process_leases import ProcessLeases
from tests.shm.mount_kit import in_mount_namespace, needs_unshare


@pytest.mark.slow(reason="a trainer in a mount namespace of its own, which imports torch")
@needs_unshare
def test_training_continues_when_another_program_fills_the_disk(tmp_path: Path) -> None:
    done = in_mount_namespace(f"mount -t tmpfs -o size=6m tmp {tmp_path}", "-m", "tests.growing.small_disk", str(tmp_path))
    assert done.stdout == "right\n", done.stderr[-2000:]


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def folder_of(path: Path, *names: str) -> BudgetedFolder:
    folder = BudgetedFolder(path, 1_000_000)
    for name in names:
        with folder.reserve(5_000) as reservation:
            reservation.publish(name)
    return folder


def test_control_file_evicts_oldest_until_the_disk_has_room(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", "b", "c")

    def write() -> str:
        if len(folder.files()) > 1:
            no_space()
        return "written"

    assert folder.evicting(write) == "written"
    assert [kept.name for kept in folder.files()] == ["c"]
    folder.close()


def test_full_disk_with_nothing_to_evict_names_the_remedy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a")
    with folder.lease("a"), pytest.raises(CacheFull, match=r"the disk of .* has no room .*: free some"):
        folder.evicting(no_space)
    folder.close()


def test_failed_lease_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "a", "b", "c")
    hold, calls = ProcessLeases.hold, []

    def failing(self: ProcessLeases, inos: list[int]) -> None:
        calls.append(list(inos))
        if len(calls) == 1:
            monkeypatch.setattr("shmload.storage.process_leases._write_all", lambda *_: no_space())
        try:
            hold(self, inos)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(ProcessLeases, "hold", failing)

    monkeypatch.setattr(ProcessLeases, "hold", failing)
    with folder.lease_many() as leases:
        assert list(leases.names) == ["b", "c"]
        assert folder.statistics().num_leased == 2
    assert folder.statistics().num_leased == 0
    folder.close()
