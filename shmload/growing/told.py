"""What writers and samplers' keepers tell of themselves, for `stats()` in other processes.

A writer has one small file, .growing/writers/<pid>-<word>: numbers, and its role; locked as long as it lives. A keeper has
one for all samplers of its trainer, .growing/samplers/<pid>-<word>.json.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shmload.storage.descriptors import close_kept, is_locked, open_kept, try_lock

_NUMBERS = struct.Struct("<QQQddd")  # files, records, bytes, began, seconds waited, waiting since (0: is not)


@dataclass(frozen=True)
class WriterStatistics:
    """One living writer.

    Attributes:
        began: when it was made, in seconds since the epoch of time.time.
        waited_s: for room, in all.
        is_waiting: for room, now.
    """

    pid: int
    role: str
    num_files: int
    num_records: int
    nbytes: int
    began: float
    waited_s: float
    is_waiting: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class WriterTold:
    """This writer's file."""

    def __init__(self, control: Path, role: str) -> None:
        folder = control / "writers"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = folder / f".{self._path.name}"  # under its own name it would be taken for a dead one's
        self._fd = open_kept(os.fspath(unlocked), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try_lock(self._fd)
        unlocked.rename(self._path)
        self._pid = os.getpid()
        self._files = self._records = self._nbytes = 0
        self._began, self._waited_s, self._since = time.time(), 0.0, 0.0
        os.pwrite(self._fd, self._numbers() + role.encode(), 0)

    def _numbers(self) -> bytes:
        return _NUMBERS.pack(self._files, self._records, self._nbytes, self._began, self._waited_s, self._since)

    def _tell(self) -> None:
        if self._pid == os.getpid() and self._fd >= 0:
            os.pwrite(self._fd, self._numbers(), 0)

    def published(self, num_records: int, nbytes: int) -> None:
        """Says that a file was published."""
        self._files, self._records, self._nbytes = self._files + 1, self._records + num_records, self._nbytes + nbytes
        self._tell()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Says that the writer waits for room."""
        self._since = time.time()
        self._tell()
        try:
            yield
        finally:
            self._waited_s += time.time() - self._since
            self._since = 0.0
            self._tell()

    def close(self) -> None:
        """Says nothing any more."""
        if self._pid == os.getpid() and self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._path.unlink(missing_ok=True)
            close_kept(fd)


def told_by_writers(control: Path) -> list[WriterStatistics]:
    """What the living writers say. Removes what dead ones have left."""
    found = []
    for path in sorted((control / "writers").glob("[!.]*")):
        if not is_locked(os.fspath(path)):
            path.unlink(missing_ok=True)
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        if len(data) < _NUMBERS.size:
            continue
        files, records, nbytes, began, waited_s, since = _NUMBERS.unpack_from(data)
        waited_s += time.time() - since if since else 0.0
        role = data[_NUMBERS.size :].decode(errors="replace")
        found.append(
            WriterStatistics(int(path.name.split("-")[0]), role, files, records, nbytes, began, waited_s, since > 0)
        )
    return found


def told_by_samplers(control: Path) -> list[dict[str, Any]]:
    """What keepers say of their samplers, with the pid of the trainer."""
    found = []
    for path in sorted((control / "samplers").glob("[!.]*.json")):
        trainer = int(path.name.split("-")[0])
        if not os.path.exists(f"/proc/{trainer}"):
            path.unlink(missing_ok=True)  # nobody was left to do it
            continue
        try:
            found += [{"trainer": trainer, **one} for one in json.loads(path.read_bytes())]
        except FileNotFoundError:  # they have just ended
            continue
    return found
