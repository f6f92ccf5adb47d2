"""Examine files that other programs add to the folder: whether each is a complete TFRecord file, and its number of records.

A file that is still being written waits for the next epoch. If a process has it open for writing, Linux refuses a read lease
(fcntl(2), F_SETLEASE). Without leases (on a network file system, or for another owner's file), the file must have been unchanged
for SETTLE_S instead. A torn or damaged file is ignored until it changes.

Every checksum is verified once here, so no damaged byte gets into an epoch. The result is saved for other processes and later runs,
by name, size and time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import RecordReader
from shmload.errors import ShardCorrupt
from shmload.formats.atomic_write import write_if_possible
from shmload.formats.tfrecord.record_errors import error_of
from shmload.formats.tfrecord.record_fields import fields_of
from shmload.formats.tfrecord.record_file import Offsets, RecordFile
from shmload.formats.tfrecord.tfrecord_dataset import FORMS, LEVELS

MAX_INFLATED_BYTES = 1 << 34
SETTLE_S = 5.0
_LONG = 16384  # size in bytes from which a survey does not compare a record's checksum
_AT_ONCE = 8192  # records surveyed together
_FIELDS = fields_of({"bytes": bytes}, {}, None)
# errors of the system that say nothing about a file
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
Found = int | str  # number of records in a file, or the reason why it cannot be used


class WalkedFile(RecordFile):
    """A RecordFile without an index file: each process finds the records by itself, which costs less in a cache."""

    _offsets: Offsets | None = None

    def offsets(self) -> Offsets:
        """Return the offsets of the records."""
        if self._offsets is None:
            self._offsets = self._walked()
        return self._offsets


class Intake:
    """The examination results of the files that no writer has published.

    Args:
        path: the file in which the results are saved.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int, Found]] = {}  # name -> size, time, result
        self._kept = b""

    def load(self) -> None:
        """Load the results of other processes and earlier runs."""
        with suppress(OSError, ValueError, TypeError, AttributeError):  # no file yet, or not a file of results
            kept = self._path.read_bytes()
            if kept != self._kept:
                self._known.update({name: (size, at, found) for name, (size, at, found) in json.loads(kept).items()})
                self._kept = kept

    def keep(self, names: set[str]) -> None:
        """Save the results for these files, and forget all other files."""
        self._known = {name: known for name, known in self._known.items() if name in names}
        kept = json.dumps(self._known, sort_keys=True).encode()
        if kept != self._kept and (self._known or self._kept):
            write_if_possible(self._path, kept)
            self._kept = kept

    @property
    def bad(self) -> dict[str, str]:
        """Return the files that cannot be used, and the reason for each."""
        return {name: found for name, (_, _, found) in self._known.items() if isinstance(found, str)}

    def known(self, name: str, status: os.stat_result) -> Found | None:
        """Return the result for a file, or None if it has changed since or was never examined."""
        size, at, found = self._known.get(name, (-1, -1, 0))
        return found if (size, at) == (status.st_size, status.st_mtime_ns) else None

    def look(self, path: Path, status: os.stat_result) -> Found | None:
        """Examine a file and remember the result. Return None if it is still being written, or cannot be opened now.

        Args:
            path: the file.
            status: its status.
        """
        if self.is_being_written(path, status):
            return None
        found: Found
        try:
            found = count_records(os.fspath(path))
        except (ShardCorrupt, OSError) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                return None
            found = str(error)
        if _identity(path) != (status.st_ino, status.st_size, status.st_mtime_ns):
            return None
        self._known[path.name] = (status.st_size, status.st_mtime_ns, found)
        return found

    def is_being_written(self, path: Path, status: os.stat_result) -> bool:
        """Return whether a file may still change: a process has it open for writing, or that cannot be determined."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return True
        try:
            # the signal to send if a program opens the file for writing while the lease is held; the usual one, SIGIO, would end
            # this process, and SIGURG is ignored
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
        except BlockingIOError:
            return True
        except OSError:  # the file system has no leases
            return time.time() - status.st_mtime < SETTLE_S
        finally:
            os.close(fd)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def count_records(path: str) -> int:
    """Return the number of records in a TFRecord file, after checking all checksums.

    Args:
        path: the file.

    Raises:
        ShardCorrupt: it is torn, damaged or empty, or not a TFRecord file.
    """
    file = WalkedFile(path, "auto", MAX_INFLATED_BYTES)
    offsets = file.offsets()
    num_records = len(offsets) - 1
    if not num_records:
        raise ShardCorrupt(f"{path}: holds no record")
    fields = [field.native() for field in _FIELDS]
    ends, starts = np.array([num_records], np.int64), np.ascontiguousarray(offsets[:-1])
    reader = RecordReader([file.data], [file.state], ends, starts, fields, FORMS.index("raw"), LEVELS.index("all"))
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
