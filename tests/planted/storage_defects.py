"""The defects of the local cache; see defect_list.py."""

from __future__ import annotations

from tests.planted.planting import Defect

CACHE, DISK, FOLDER, LEDGER, PROCESSES = (
    f"tests/storage/cache/test_{name}.py::" for name in ("cache", "disk_full", "folder", "ledger", "processes")
)

STORAGE_DEFECTS = [
    Defect(
        "S4",
        "what is being written counts only when it is published",
        "shmload/storage/ledger.py",
        "        self.nbytes += nbytes - self.writing.get(name, 0)\n        self.writing[name] = nbytes\n",
        "        self.writing[name] = 0\n",
        (f"{FOLDER}test_a_reservation_counts_in_full_and_is_seen_by_nobody",),
    ),
    Defect(
        "S4",
        "leases of other processes are not looked at",
        "shmload/storage/ledger.py",
        "            found |= inos\n",
        "",
        (f"{PROCESSES}test_a_killed_process_holds_nothing_and_whoever_waits_goes_on_at_once",),
    ),
    Defect(
        "S4",
        "a request that cannot be met evicts what there is",
        "shmload/storage/folder.py",
        "            victims.append(kept)\n            freed += kept.nbytes\n",
        "            victims.append(kept)\n            freed += kept.nbytes\n            self._remove(ledger, kept)\n",
        (f"{FOLDER}test_a_request_that_cannot_be_met_removes_nothing",),
    ),
    Defect(
        "S4",
        "a reservation does not take its blocks of the disk",
        "shmload/storage/folder.py",
        "                    os.posix_fallocate(fd, start, nbytes)\n",
        "                    os.ftruncate(fd, start + nbytes)\n",
        (f"{DISK}test_a_disk_full_of_leased_files_is_told_with_figures_and_waited_for",),
    ),
    Defect(
        "S4",
        "a forked child keeps its dead parent's leases",
        "shmload/storage/ledger.py",
        "os.register_at_fork(after_in_child=_close_all)\n",
        "",
        (f"{PROCESSES}test_a_parents_leases_end_with_it_although_its_child_lives",),
    ),
    Defect(
        "S4",
        "a child that ends its copies ends its parent's",
        "shmload/storage/ledger.py",
        "        if self.pid == os.getpid():\n            self._dropped.append(inos)\n",
        "        if True:\n            self._dropped.append(inos)\n",
        (f"{PROCESSES}test_a_child_that_ends_its_copies_ends_nothing_of_its_parents",),
    ),
    Defect(
        "S5",
        "a file has its name before its bytes are on the disk",
        "shmload/storage/folder.py",
        "            os.fdatasync(fd)\n",
        "            pass\n",
        (f"{FOLDER}test_bytes_are_on_the_disk_before_a_durable_file_has_its_name",),
    ),
    Defect(
        "S5",
        "the ledger of a writer that was killed in the middle is believed",
        "shmload/storage/ledger.py",
        "if not dirty and changed_ns",
        "if changed_ns",
        (f"{LEDGER}test_a_ledger_that_is_not_to_be_believed_is_written_anew_from_the_folder[dirty]",),
    ),
    Defect(
        "S5",
        "what others put there is not noticed",
        "shmload/storage/ledger.py",
        "not dirty and changed_ns == os.stat(self.folder).st_mtime_ns:",
        "not dirty:",
        (f"{LEDGER}test_a_file_that_somebody_has_removed_is_gone",),
    ),
    Defect(
        "A15",
        "the file that is needed next goes first",
        "shmload/storage/cache.py",
        "sorted(expected, reverse=True) if",
        "sorted(expected) if",
        (f"{CACHE}test_the_use_that_lies_farthest_ahead_goes_first",),
    ),
    Defect(
        "A15",
        "what is needed sooner goes for what is needed later",
        "shmload/storage/cache.py",
        " if number > needed.get(digest, -1))",
        ")",
        (f"{CACHE}test_what_is_needed_sooner_is_not_evicted_for_what_is_needed_later",),
    ),
    Defect(
        "A15",
        "others do not see a lease taken back",
        "shmload/storage/ledger.py",
        "            self._free += freed\n        self._changed()\n",
        "            self._free += freed\n",
        (f"{FOLDER}test_a_waiter_gets_room_when_a_lease_ends",),
    ),
    Defect(
        "A17",
        "a changed object is taken for the one that is there",
        "shmload/storage/cache.py",
        r'f"{key}\0{etag}"',
        'f"{key}"',
        (f"{CACHE}test_a_changed_object_is_another_file_and_the_old_one_goes_when_nobody_reads_it",),
    ),
    Defect(
        "A6",
        "an upload that the server does not know is taken for done, whatever was tried",
        "shmload/storage/s3.py",
        "but = (404,) if next(num_tries) else ()",
        "but = (404,)",
        ("tests/storage/test_faults.py::test_an_upload_that_the_server_no_longer_knows_is_not_taken_for_the_object_of_before",),
    ),
]
