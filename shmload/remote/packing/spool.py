"""Where shards lie until they are sent: a few files without names, which go with the process, also when it is killed.

They lie in memory if it has room for them, and are written over by the next shards: pages that are there cost one copy, and new
ones of a disk's file system several times that.
"""

from __future__ import annotations

import os
import tempfile
from io import FileIO

from shmload.shm.preflight import available_bytes

_SHARE = 8  # of the memory there is, one part is for shards


class Spool:
    """Files that are used again.

    Args:
        nbytes: of all of them together, as far as can be told.
        folder: where they lie; None: in memory, or if that is short where temporary files do.
    """

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._folder = folder
        self.is_memory = folder is None and nbytes <= available_bytes() // _SHARE
        self._free: list[FileIO] = []
        self._made: list[FileIO] = []

    def take(self) -> FileIO:
        """A file that nobody has; what was in it is still there."""
        if self._free:
            file = self._free.pop()
            file.seek(0)
            return file
        if self.is_memory:
            file = FileIO(os.memfd_create("shmload-pack"), "r+")
        else:
            with tempfile.TemporaryFile(prefix="shmload-pack-", dir=self._folder, buffering=0) as made:
                file = FileIO(os.dup(made.fileno()), "r+")
        self._made.append(file)
        return file

    def give(self, file: FileIO) -> None:
        """Takes a file back."""
        self._free.append(file)

    def close(self) -> None:
        """Gives the room of all files back."""
        for file in self._made:
            file.close()
