"""Runs one case of test_disk_full.py on a small disk: `python disk_program.py PLACE CASE`; prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from time import monotonic, sleep
from typing import Any

from shmload import CacheFull
from shmload._core.mapped_file import MappedFile
from shmload.storage.budgeted_folder import BudgetedFolder
from tests.storage.cache.folder_kit import being_written, files_on_disk, names, put

KIB = 1 << 10


def evicts(folder: BudgetedFolder) -> dict[str, Any]:
    """Publishes more than the disk holds, although not more than the budget."""
    for number in range(30):
        put(folder, f"{number:02}", 400 * KIB)
    return {"names": names(folder), "whole": set(files_on_disk(folder.path).values()) == {400 * KIB}}


def is_full_of_leases(folder: BudgetedFolder) -> dict[str, Any]:
    """Leases everything on the disk, and ends one lease while another thread waits."""
    leases = []
    for number in range(5):
        put(folder, f"{number:02}", 400 * KIB)
        leases.append(folder.lease(f"{number:02}"))
    told = []
    for ask in (lambda: folder.reserve(3000 * KIB), lambda: grown(folder)):
        try:
            ask()
        except CacheFull as error:
            told.append(str(error))
    before = being_written(folder.path), folder.statistics().nbytes
    releasing = threading.Timer(0.05, leases[0].release)
    releasing.start()
    with folder.reserve(2300 * KIB, timeout_s=60) as reservation:
        reservation.publish("waited")
    releasing.join()
    return {"told": told, "before": before, "names": names(folder)}


def grown(folder: BudgetedFolder) -> None:
    with folder.reserve(100 * KIB) as reservation:
        reservation.grow(3000 * KIB)


def leaves_no_room_for_a_ledger(folder: BudgetedFolder) -> dict[str, Any]:
    """Checks that the folder's figures are correct although the disk has no room for its ledger."""
    other = BudgetedFolder(folder.path, folder.capacity_bytes)
    seen = []
    for number in range(8):
        put(folder, f"{number}", 100 * KIB)
        seen.append(names(other) == names(folder))
    return {"names": names(other), "seen": seen, "bytes": other.statistics().nbytes}


def is_mapped(folder: BudgetedFolder) -> dict[str, Any]:
    """Maps some of the files on the disk in this process and in another, then all of them."""
    maps = []
    for number in range(5):
        put(folder, f"{number}", 400 * KIB)
    child = subprocess.Popen([sys.executable, "-c", READER, f"{folder.path}/0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    maps.append(MappedFile(os.fsencode(f"{folder.path}/1")))
    for number in (5, 6, 7):
        put(folder, f"{number}", 400 * KIB)
    some = names(folder)
    maps += [MappedFile(os.fsencode(f"{folder.path}/{name}")) for name in some if name != "0"]
    told = ""
    try:
        put(folder, "8", 3000 * KIB)
    except CacheFull as error:
        told = str(error)
    every = names(folder)
    maps.clear()
    child.communicate()
    put(folder, "9", 400 * KIB)
    put(folder, "a", 2400 * KIB)
    return {"some": some, "told": told, "every": every, "then": names(folder)}


def is_waited_for(folder: BudgetedFolder) -> dict[str, Any]:
    """Lets a thread wait for room on the disk for a file, and asks for the same file without waiting."""
    leases = []
    for number in range(5):
        put(folder, f"{number}", 400 * KIB)
        leases.append(folder.lease(f"{number}"))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(folder.obtain("wanted", 3000 * KIB, timeout_s=60)))
    waiting.start()
    told, deadline = "", monotonic() + 30
    while monotonic() < deadline:  # the thread has the file for a moment in each of its tries
        try:
            folder.obtain("wanted", 3000 * KIB, timeout_s=0)
        except CacheFull:
            told = "no room"
            if waiting.is_alive() and being_written(folder.path) == {}:
                break
        except TimeoutError:
            told = "another writes it"
        sleep(0.001)  # without the GIL, tries without a pause slow the thread's own try down to seconds
    for lease in leases:
        lease.release()
    waiting.join(60)
    found[0].abandon()
    return {"told": told, "names": names(folder)}


READER = (
    "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); f.close(); print(flush=True); input()"
)


if __name__ == "__main__":
    place, case = sys.argv[1:]
    found = globals()[case](BudgetedFolder(place, 100 << 20))
    print(json.dumps({**found, "threads": threading.active_count(), "disk": os.statvfs(place).f_blocks}))
