"""Files that somebody dropped into the folder: are they whole, are they TFRecords, how many records are in them.

A file that is still being written is left for the next epoch. Linux says whether anyone has it open for writing: a read lease
(fcntl(2), F_SETLEASE) is refused then. Where leases are not known (a network's file system, another owner's file) it must have been
left alone for `settle_s` instead. A file that then turns out to be torn or damaged is left out for good, unless it changes.

Every byte is summed here once, so that a bad one never comes into an epoch. What was found is kept, for other processes and later
runs, by name, size and time.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import RecordReader
from shmload.errors import ShardCorrupt
from shmload.formats.tfrecord.fields import error_of, fields_of
from shmload.formats.tfrecord.files import Offsets, RecordFile
from shmload.growing.names import write_whole

MAX_INFLATED_BYTES = 1 << 34
_LONG = 16384  # bytes from which a survey leaves the sum of a record to whoever copies it
_AT_ONCE = 8192  # records surveyed together
_FIELDS = fields_of({"bytes": bytes}, {}, None)

Found = int | str  # how many records a file holds, or why it cannot be used


class WalkedFile(RecordFile):
    """A file whose records are looked for once in each process: that costs less than an index beside each file of a budget."""

    _offsets: Offsets | None = None

    def offsets(self) -> Offsets:
        """Where records begin."""
        if self._offsets is None:
            self._offsets = self._walked()
        return self._offsets


class Intake:
    """What is known of the files that no writer of ours has published.

    Args:
        path: of the file that keeps it.
        settle_s: how long a file must have been left alone, where the system cannot say whether anyone writes to it.
    """

    def __init__(self, path: Path, settle_s: float) -> None:
        self._path, self._settle_s = path, settle_s
        self._known: dict[str, tuple[int, int, Found]] = {}  # name -> size, time, what was found
        self._kept = b""

    def load(self) -> None:
        """Takes over what another process, or an earlier run, has found."""
        try:
            kept = self._path.read_bytes()
            if kept != self._kept:
                self._known.update({name: (size, at, found) for name, (size, at, found) in json.loads(kept).items()})
                self._kept = kept
        except (OSError, ValueError, TypeError):  # nothing is kept yet, or not by us: it is found again
            pass

    def keep(self, names: set[str]) -> None:
        """Tells others what is known of these files, and forgets all others."""
        self._known = {name: known for name, known in self._known.items() if name in names}
        kept = json.dumps(self._known, sort_keys=True).encode()
        if kept != self._kept and (self._known or self._kept):
            write_whole(self._path, kept)
            self._kept = kept

    @property
    def bad(self) -> dict[str, str]:
        """Files that cannot be used, and why."""
        return {name: found for name, (_, _, found) in self._known.items() if isinstance(found, str)}

    def known(self, name: str, status: os.stat_result) -> Found | None:
        """What was found in a file, if it is as it was then."""
        size, at, found = self._known.get(name, (-1, -1, 0))
        return found if (size, at) == (status.st_size, status.st_mtime_ns) else None

    def look(self, path: Path, status: os.stat_result) -> Found | None:
        """Looks into a file; None if it is still being written."""
        if self.is_being_written(path, status):
            return None
        found: Found
        try:
            found = count_records(os.fspath(path))
        except (ShardCorrupt, OSError) as error:
            found = str(error)
        if _identity(path) != (status.st_ino, status.st_size, status.st_mtime_ns):
            return None
        self._known[path.name] = (status.st_size, status.st_mtime_ns, found)
        return found

    def is_being_written(self, path: Path, status: os.stat_result) -> bool:
        """Whether a file may still change."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return True
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
        except BlockingIOError:
            return True
        except OSError:  # no leases here
            return time.time() - status.st_mtime < self._settle_s
        finally:
            os.close(fd)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def count_records(path: str) -> int:
    """How many records a TFRecord file holds, all of whose sums are right.

    Raises:
        ShardCorrupt: it is torn or damaged, or no such file, or holds nothing; says where.
    """
    file = WalkedFile(path, "auto", MAX_INFLATED_BYTES)
    offsets = file.offsets()
    num_records = len(offsets) - 1
    if not num_records:
        raise ShardCorrupt(f"{path}: holds no record")
    fields = [field.native() for field in _FIELDS]
    reader = RecordReader(
        [file.data], [file.state], np.array([num_records], np.int64), np.ascontiguousarray(offsets[:-1]), fields, 0, 2
    )
    for first in range(0, num_records, _AT_ONCE):
        survey = reader.survey(np.arange(first, min(first + _AT_ONCE, num_records), dtype=np.int64))
        if survey.problem is not None:
            raise error_of(survey.problem, _FIELDS, [path], [file.nbytes], num_records)
    for record in np.flatnonzero(np.diff(offsets) >= _LONG).tolist():
        start, end = int(offsets[record]), int(offsets[record + 1])
        stored = int.from_bytes(file.data[end - 4 : end], "little")
        if masked(crc32c(file.data[start + 12 : end - 4])) != stored:
            raise ShardCorrupt(
                f"{path}: record {record}, which starts at byte {start}: corrupted: the checksum of its data differs"
            )
    return num_records
