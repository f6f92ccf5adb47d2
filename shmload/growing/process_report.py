"""Reports that processes write about themselves, and that `stats()` reads in other processes."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmload.formats.atomic_write import write_if_possible
from shmload.processes.file_lock import FileLock, is_locked


class WriterReport:
    """The report of one writer or supervisor, .growing/<kind>/<pid>-<word>.json, rewritten at each change.

    It is valid while its process holds a lock on .../<pid>-<word>.lock. The process id would not be enough, because it may belong
    to another process in another container, or later.
    """

    def __init__(self, control: Path, kind: str) -> None:
        self._pid = os.getpid()
        self.path = control / kind / f"{self._pid}-{secrets.token_hex(4)}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unlocked = self.path.with_name(f".{self.path.name}")  # under its final name, an unlocked file means a dead process
        self._lock = FileLock.open(unlocked, os.O_CREAT)
        self._lock.try_acquire()
        unlocked.rename(self.path.with_suffix(".lock"))

    def write(self, what: Any) -> None:
        """Replace the report. Do nothing in a forked child."""
        if self._pid == os.getpid():
            write_if_possible(self.path, json.dumps(what).encode())

    def close(self) -> None:
        """Remove the report. Idempotent."""
        if self._pid == os.getpid():
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.close()


def reports(control: Path, kind: str) -> Iterator[tuple[int, Any]]:
    """Yield (process id, report) of each living process that has a `WriterReport` of this kind. Remove the reports of dead ones."""
    for lock in sorted((control / kind).glob("[!.]*.lock")):
        path = lock.with_suffix(".json")
        if is_locked(lock):
            with suppress(FileNotFoundError):  # it has just ended, or has not reported yet
                yield int(path.name.split("-")[0]), json.loads(path.read_bytes())
        else:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
