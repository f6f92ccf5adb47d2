"""Files that libraries hold open for datasets. Those that were used least recently are closed."""

from __future__ import annotations

import os
import resource
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from shmload.formats.file_versions import FileVersions
from shmload.processes.fork_lock import ForkLock


def max_open() -> int:
    """Return how many files may stay open: a quarter of the process's limit, which is 1,024 on most systems, but at most 512."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if limit == resource.RLIM_INFINITY else min(max(limit // 4, 1), 512)


class OpenFiles(ABC):
    """Files of one dataset, which are opened when they are needed.

    At most `max_open()` files of all datasets of the process stay open, those that were used last. One that another thread is
    reading is closed after that. A file that was changed since it was first opened is refused, because what is known of it is not
    read again.

    Args:
        paths: paths of the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._versions = FileVersions()
        self.are_open: dict[int, Any] = {}

    @abstractmethod
    def _opened(self, number: int) -> Any: ...  # opens the file paths[number]

    def __getitem__(self, number: int) -> Any:
        """Return a file, as its library opens it. The file is closed when nothing refers to what is returned, or later.

        Raises:
            OSError: the file cannot be opened.
            ShardCorrupt: it is damaged, or was changed.
        """
        file = self.are_open.get(number)
        if file is None:
            file = self._opened(number)
            self._versions.check(self._paths[number])
            self.are_open[number] = file
        _recent.use(self, number)
        return file


class _RecentFiles:
    """The files that are open in this process, in the order of their last use."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._pid = 0
        self._used: dict[tuple[weakref.ref[OpenFiles], int], None] = {}

    def use(self, files: OpenFiles, number: int) -> None:
        """Make a file the last one. If too many are open, let go of the first ones."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not close its parent's files
                self._pid, self._used = os.getpid(), {}
            self._used.pop((weakref.ref(files), number), None)
            self._used[weakref.ref(files), number] = None
            while len(self._used) > max_open():
                first = next(iter(self._used))
                del self._used[first]
                if (owner := first[0]()) is not None:
                    owner.are_open.pop(first[1], None)


_recent = _RecentFiles()
