"""Helpers for the tests of the cache: files with known content, the actual content of a folder, and the death of a process."""

from __future__ import annotations

import os
import stat

from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.ledger import NEW, OURS, PublishedFile
from shmload.storage.process_leases import USERS


def content(name: str, nbytes: int) -> bytes:
    return (name.encode() * (nbytes // len(name) + 1))[:nbytes]


def put(folder: BudgetedFolder, name: str, nbytes: int) -> PublishedFile:
    """Publishes a file."""
    with folder.reserve(nbytes) as reservation:
        os.pwrite(reservation.fd, content(name, nbytes), 0)
        return reservation.publish(name)


def names(folder: BudgetedFolder) -> list[str]:
    return [kept.name for kept in folder.files()]


def files_on_disk(path: str) -> dict[str, int]:
    """Returns the lengths of the published files, read from the folder itself."""
    found = {}
    for entry in os.scandir(path):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_mode & OURS:
            found[entry.name] = status.st_size
    return found


def being_written(path: str) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in os.scandir(f"{path}/{NEW}")}


def users(path: str) -> list[str]:
    return sorted(os.listdir(f"{path}/{USERS}"))


def simulate_kill(folder: BudgetedFolder) -> None:
    """Simulates SIGKILL for the process that used the folder: its descriptors are closed, and nothing else happens."""
    session = folder._opened
    assert session is not None
    for file in (*session.writing.values(), session.process_leases._file, session.ledger._file):
        file.close()
    session.is_closed, session._is_open = True, False
    folder._begin()
