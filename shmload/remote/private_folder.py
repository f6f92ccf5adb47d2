"""A folder for shards that no one has named: made for one dataset and its workers, gone when they are.

Its owner holds a lock on a file in it, which forked workers hold with it. When the last of them is dead, however it died, the lock
is free: the next owner that makes such a folder removes what it finds unlocked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Any

__all__ = ["PrivateFolder"]

_PREFIX = "shmload-shards-"
_LOCK = ".owner"


class PrivateFolder:
    """A folder that ends with its owner.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        remove_abandoned(place)
        self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=place)
        # locked under another name first: one that is found without a lock is a dead owner's
        fd = os.open(f"{self.path}/{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(f"{self.path}/{_LOCK}.new", f"{self.path}/{_LOCK}")
        self._owner = os.getpid()
        self._finish: Any = weakref.finalize(self, _end, self.path, fd, os.getpid())

    @property
    def is_over(self) -> bool:
        """Whether it was closed, by this process, which has made it."""
        return self._finish is not None and not self._finish.alive and self._owner == os.getpid()

    @property
    def is_gone(self) -> bool:
        """Whether its owner, in whatever process, has ended it."""
        return not os.path.isdir(self.path)

    def close(self) -> None:
        """Removes it now; and again, if someone who was at it meanwhile has made it anew."""
        if self.is_over:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self._finish is not None:
            self._finish()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._finish = None
        self.path = state["path"]  # another process's: its end is not this one's affair

    def __repr__(self) -> str:
        return f"<PrivateFolder {self.path}>"


def remove_abandoned(place: Path) -> list[str]:
    """Removes this user's folders whose owners are dead; says which."""
    removed = []
    for folder in place.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            if (status := os.lstat(folder)).st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue  # anyone may make such a name there
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is being made
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
        finally:
            os.close(fd)
    return removed


def _end(path: str, fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy ends nothing
        with contextlib.suppress(OSError):
            os.rename(path, f"{path}.gone")  # a worker that is about to end finds no folder to put more into
        shutil.rmtree(f"{path}.gone", ignore_errors=True)
        os.close(fd)
