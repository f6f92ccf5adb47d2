"""The ledger is a copy: if it is lost or damaged, the folder itself is the truth."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shmload import CacheFull, faults
from shmload.storage import ledger as ledger_module
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.ledger import HIDDEN
from tests.storage.cache.folder_kit import names, put


def listings(folder: BudgetedFolder) -> int:
    session = folder._opened
    assert session is not None
    return session.ledger.num_listings


def damage(path: str, at: int, data: bytes) -> None:
    with open(f"{path}/{HIDDEN}/ledger", "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    "harm",
    [
        lambda place: damage(place, 0, b"nonsense"),
        lambda place: damage(place, 8, b"another?"),
        lambda place: damage(place, 0, struct.pack("<Q", 1)),
        lambda place: os.truncate(f"{place}/{HIDDEN}/ledger", 20),
        lambda place: os.truncate(f"{place}/{HIDDEN}/ledger", 0),
        lambda place: Path(place, "foreign").touch(),
    ],
    ids=["nonsense", "token", "dirty", "cut", "empty", "the folder is younger"],
)
def test_invalid_ledger_is_rebuilt_from_the_folder(place: str, harm: Callable[[str], None]) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    for name in "abc":
        put(folder, name, 30)
    assert names(other) == ["a", "b", "c"]  # changes by other processes no longer cause a listing
    before = listings(other)
    harm(place)
    assert names(other) == ["a", "b", "c"]
    assert listings(other) == before + 1
    put(folder, "d", 30)
    assert names(other) == ["b", "c", "d"]
    assert listings(other) == before + 1


def test_changes_of_other_processes_are_followed_without_a_listing(place: str) -> None:
    folders = [BudgetedFolder(place, 100) for _ in range(3)]
    before = [listings(folder) for folder in folders]
    open_reservation = folders[2].reserve(10)
    for number in range(100):
        put(folders[number % 2], f"{number}-\u00e9", 20)  # each file after the fourth evicts another
    folders[0].discard("98-\u00e9")
    assert [names(folder) for folder in folders] == [[f"{number}-\u00e9" for number in (96, 97, 99)]] * 3
    assert {folder.statistics().nbytes for folder in folders} == {70}
    assert {folder.statistics().num_writing for folder in folders} == {1}
    assert [listings(folder) for folder in folders] == before
    open_reservation.abandon()


def test_process_that_misses_changes_lists_the_folder_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_JOURNAL_NBYTES", 1000)  # a few changes
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    before = listings(other)
    for number in range(30):
        put(folder, f"{number:02}", 30)
    assert ["27", "28", "29"] == names(folder) == names(other)
    assert listings(other) == before + 1
    put(folder, "30", 30)
    assert ["28", "29", "30"] == names(folder) == names(other)
    assert listings(other) == before + 1


def test_damaged_journal_is_not_followed(place: str) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    put(folder, "a", 30)
    damage(place, 80, b"{")
    assert ["a"] == names(other) == names(folder)
    put(other, "b", 30)
    assert ["a", "b"] == names(other) == names(folder)


def test_removed_file_is_no_longer_counted(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "a", 60)
    os.unlink(f"{place}/a")
    assert (folder.statistics().nbytes, names(folder)) == (0, [])


def test_unchanged_folder_is_not_listed(place: str) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    for number in range(50):
        put(folder if number % 2 else other, f"{number:02}", 20)
    assert ["45", "46", "47", "48", "49"] == names(folder) == names(other)
    before = listings(folder)
    for number in range(50, 100):
        put(folder, f"{number:02}", 20)
        folder.lease(f"{number:02}").release()
    assert (["95", "96", "97", "98", "99"], before) == (names(folder), listings(folder))
    assert names(other) == names(folder)


def test_error_before_a_change_costs_no_listing(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    before = listings(folder)
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            folder.lease("nothing")
    assert ([], before) == (names(folder), listings(folder))


def test_files_keep_their_order_when_the_clock_goes_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BudgetedFolder(place, 100)
    for name, now in (("a", 5 * 10**18), ("b", 10**18), ("c", 2 * 10**18)):
        monkeypatch.setattr(ledger_module.time, "time_ns", lambda now=now: now)
        put(folder, name, 30)
    assert names(folder) == ["a", "b", "c"]
    folder.refresh()
    assert names(folder) == ["a", "b", "c"]


def test_error_during_a_change_leaves_the_folder_consistent(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = BudgetedFolder(place, 100), BudgetedFolder(place, 100)
    for name in "abc":
        put(folder, name, 30)

    def harm(point: str) -> None:
        if point == "mid_evict":
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "hit", harm)
    with pytest.raises(KeyboardInterrupt):
        folder.reserve(60)
    monkeypatch.undo()
    assert ["b", "c"] == names(folder) == names(other)
    assert (folder.statistics().nbytes, folder.statistics().num_writing) == (60, 0)


def test_repeated_failing_requests_cost_one_listing(place: str) -> None:
    folder = BudgetedFolder(place, 100)
    put(folder, "a", 90)
    with folder.lease("a"):
        for ask, error in ((lambda: folder.reserve(50), CacheFull), (lambda: folder.lease("nothing"), FileNotFoundError)):
            damage(place, 0, struct.pack("<Q", 1))  # marked dirty, as a killed process leaves it
            before = listings(folder)
            for _ in range(3):
                with pytest.raises(error):
                    ask()
            assert listings(folder) == before + 1


def test_refresh_of_a_grown_file_is_visible_to_other_processes(place: str) -> None:
    folder, other = BudgetedFolder(place, 100, adopts=True), BudgetedFolder(place, 100, adopts=True)
    Path(place, "grows").write_bytes(bytes(10))
    assert ["grows"] == names(folder) == names(other)
    with open(f"{place}/grows", "ab") as file:
        file.write(bytes(20))
    folder.refresh()
    assert (folder.statistics().nbytes, other.statistics().nbytes) == (30, 30)
    before = listings(other)
    folder.refresh()
    assert (30, before) == (other.statistics().nbytes, listings(other))
