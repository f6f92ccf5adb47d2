"""`Lease` and `Leases` of files in a budgeted folder. A leased file is not evicted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from shmload.storage.ledger import PublishedFile

__all__ = ["Lease", "Leases"]

Release = Callable[[tuple[int, ...]], None]
"""Ends the leases of files with these inodes."""


class Leases:
    """Leases of several files, taken together. They end with `release`, with the last reference, or with the process.

    Leases belong to one process: a forked child holds none of them, and releasing them there has no effect. Use it as a context
    manager.

    Attributes:
        folder: path of the folder.
        files: the leased files, oldest first.
    """

    def __init__(self, folder: str, files: tuple[PublishedFile, ...], release: Release) -> None:
        self.folder = folder
        self.files = files
        self._release: Release | None = release

    @property
    def names(self) -> list[str]:
        """Return the names of the files within the folder, oldest first."""
        return [kept.name for kept in self.files]

    @property
    def paths(self) -> list[str]:
        """Return the paths of the files, oldest first."""
        return [f"{self.folder}/{kept.name}" for kept in self.files]

    @property
    def nbytes(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(kept.nbytes for kept in self.files)

    def release(self) -> None:
        """End the leases. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release(tuple(kept.ino for kept in self.files))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # module globals are cleared before the last objects
            self.release()

    def __repr__(self) -> str:
        state = ", released" if self._release is None else ""
        return f"<{type(self).__name__} of {len(self.files)} files, {self.nbytes} bytes in {self.folder}{state}>"


class Lease(Leases):
    """A lease of one file. It ends with `release`, with the last reference, or with the process.

    Attributes:
        folder: path of the folder.
        files: a tuple of the one leased file.
    """

    _fd = -1

    @property
    def name(self) -> str:
        """Return the file's name within the folder."""
        return self.files[0].name

    @property
    def path(self) -> str:
        """Return the file's path."""
        return f"{self.folder}/{self.name}"

    @property
    def fd(self) -> int:
        """Return a descriptor for reading, which is opened at first use and closed with the lease."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def release(self) -> None:
        """End the lease and close `fd`. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().release()
