"""Spool: the temporary files in which shards are written before they are sent.

The files are unnamed, so they disappear with the process even if it is killed. They are in memory if it has room. Files are reused,
because writing to existing pages costs one copy, and new pages of a disk's file system cost several times that.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, suppress
from typing import IO

from shmload.shm.free_memory import available_bytes

_SHARE = 8  # of available memory, 1 / _SHARE may be used for shards


class Spool:
    """A pool of temporary files that are reused.

    Args:
        nbytes: estimated size of all files together.
        folder: where to create the files. If None, in memory, or in the system's temporary folder if memory is short.
    """

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._folder = folder
        self.is_memory = folder is None and nbytes <= available_bytes() // _SHARE
        self._free: list[IO[bytes]] = []
        self._made = ExitStack()

    def take(self) -> IO[bytes]:
        """Return a file that is not in use, at position 0. It may still have its previous contents."""
        with suppress(IndexError):  # the pool is empty; a check before would race with other threads
            file = self._free.pop()
            file.seek(0)
            return file
        if self.is_memory:
            return self._made.enter_context(open(os.memfd_create("shmload-pack"), "r+b", buffering=0))
        return self._made.enter_context(tempfile.TemporaryFile(prefix="shmload-pack-", dir=self._folder, buffering=0))

    def give(self, file: IO[bytes]) -> None:
        """Return a file to the pool."""
        self._free.append(file)

    def close(self) -> None:
        """Close all files and free their space."""
        self._made.close()
