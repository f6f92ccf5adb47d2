"""`PrivateFolder`: a temporary folder that is removed with its owner, an object of this process.

The owner holds a lock on a file in it, of which forked workers close their copies. When the owner has exited or crashed, the lock
is free, and the next owner that creates a private folder removes all unlocked ones.

The folder is renamed before its files are removed. From then on, nothing can be created in it, because other threads and workers
open its files by their old paths. They must not create the folder again (`recreates=False` of `Cache`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Any

from shmload.processes.file_lock import FileLock

__all__ = ["PrivateFolder", "remove_abandoned"]

_PREFIX = "shmload-shards-"
_LOCK = ".owner"
_GONE = ".gone"


class PrivateFolder:
    """A temporary folder that is removed with its owner.

    Attributes:
        path: path of the folder.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        remove_abandoned(place)
        self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=place)
        # locked under another name first, because a folder whose lock is free looks like that of a dead owner
        lock = FileLock.open(f"{self.path}/{_LOCK}.new", os.O_CREAT, 0o600)
        lock.acquire()
        os.rename(f"{self.path}/{_LOCK}.new", f"{self.path}/{_LOCK}")
        self.owner: PrivateFolder | None = None  # of an unpickled object in the owner's process: keeps the owner alive
        self._finish: Any = weakref.finalize(self, _end, self.path, lock, os.getpid())

    @property
    def is_gone(self) -> bool:
        """Return whether the owner has removed it."""
        return not os.path.isdir(self.path)

    def close(self) -> None:
        """Remove the folder if this object created it."""
        if self._finish is not None:
            self._finish()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._finish = self.owner = None
        self.path = state["path"]  # the folder belongs to another process, which removes it


def remove_abandoned(place: Path) -> list[str]:
    """Remove this user's private folders in `place` whose owners are dead, or have begun to remove them. Return their paths."""
    removed = []
    for folder in place.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it is being created, or its owner is alive
            if (status := os.lstat(folder)).st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue  # anyone can create such a name there
            if folder.name.endswith(_GONE) or _is_unlocked(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(str(folder))
    return removed


def _is_unlocked(path: Path) -> bool:
    with contextlib.closing(FileLock.open(path)) as lock:
        return lock.try_acquire()


def _end(path: str, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy does nothing
        with contextlib.suppress(OSError):
            os.rename(path, path + _GONE)
        shutil.rmtree(path + _GONE, ignore_errors=True)
        lock.close()
