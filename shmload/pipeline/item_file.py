"""The file of a Cache: an SQLite database of pickled items, which all processes and runs share.

A crash of the machine may lose or damage items, because writes are not synced. So each item has a checksum, and a damaged one
counts as missing. On a full disk, items are not kept.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.processes.file_lock import locked

log = logging.getLogger("shmload")

BUSY_S = 60.0  # seconds that a write waits for other writers


class ItemFile:
    """A file of pickled items, by the number of their cache in its pipeline and their position.

    Args:
        path: path of the file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # before workers open the file, because SQLite does not wait for a process that changes the mode
        with locked(path.with_suffix(".lock")), self._errors_named():
            file = _connected(path)
            file.execute("PRAGMA journal_mode=WAL")
            columns = "stream INTEGER, place INTEGER, item BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (stream, place)"
            file.execute(f"CREATE TABLE IF NOT EXISTS items ({columns})")
            file.close()
        self._inode = path.stat().st_ino  # distinguishes it from a later file of the same name

    def read(self, stream: int, place: int) -> bytes | None:
        """Return the pickle of an item; None if it is missing or damaged.

        Args:
            stream: number of its cache.
            place: its position.
        """
        with self._errors_named():
            file = _opened(self._path, os.getpid(), self._inode)
            found = file.execute("SELECT item, crc FROM items WHERE stream = ? AND place = ?", (stream, place)).fetchone()
            if found is None:
                return None
            item, crc = found
            if crc32c(item) == crc:
                return bytes(item)
            file.execute("DELETE FROM items WHERE stream = ? AND place = ? AND crc = ?", (stream, place, crc))
        log.warning("item %d in %s is damaged, and is made again", place, self._path)
        return None

    def write(self, stream: int, place: int, item: bytes) -> None:
        """Store the pickle of an item, unless another process has done so, or the disk is full.

        Args:
            stream, place: as in `read`.
            item: the pickle.
        """
        try:
            with self._errors_named():
                file = _opened(self._path, os.getpid(), self._inode)
                file.execute("INSERT OR IGNORE INTO items VALUES (?, ?, ?, ?)", (stream, place, item, crc32c(item)))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            _warn_of_full_disk(self._path)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raise an error that names the file if it is damaged."""
        try:
            yield
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise OSError(
                f"the file of a Cache, {self._path}, is damaged ({error}): delete it, and its items are made again"
            ) from error


@functools.cache  # once for each file
def _warn_of_full_disk(path: Path) -> None:
    log.warning("no space left for the items of a Cache in %s: items are made again in every epoch until there is room", path)


def _connected(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    file.execute("PRAGMA synchronous=OFF")  # items lost in a crash of the machine are made again
    return file


@functools.cache
def _opened(path: Path, pid: int, inode: int) -> sqlite3.Connection:
    """Return this process's own connection to a file, because SQLite forbids using or closing one after a fork."""
    return _connected(path)
