"""The hold of a process on files of a budgeted folder: while one lives, nobody evicts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from shmload.storage.ledger import Kept

__all__ = ["Lease", "Leases"]

Release = Callable[[tuple[int, ...]], None]


class Leases:
    """Several files, leased together. A context manager; ends with `release`, its last reference, or its process.

    It is this process's: in a forked child it holds nothing, and its end there ends nothing. A child takes leases of its own.

    Attributes:
        folder: where they lie.
        files: what is leased, oldest first.
    """

    def __init__(self, folder: str, files: tuple[Kept, ...], release: Release) -> None:
        self.folder = folder
        self.files = files
        self._release: Release | None = release

    @property
    def names(self) -> list[str]:
        """Names within the folder, oldest first."""
        return [kept.name for kept in self.files]

    @property
    def paths(self) -> list[str]:
        """Paths of the files, oldest first."""
        return [f"{self.folder}/{kept.name}" for kept in self.files]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(kept.nbytes for kept in self.files)

    @property
    def is_held(self) -> bool:
        """Whether `release` is still to come."""
        return self._release is not None

    def release(self) -> None:
        """Lets them go. Twice is no error."""
        release, self._release = self._release, None
        if release is not None:
            release(tuple(kept.ino for kept in self.files))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # the module's names go before the last objects do
            self.release()

    def __repr__(self) -> str:
        state = "" if self.is_held else ", released"
        return f"<{type(self).__name__} of {len(self.files)} files, {self.nbytes} bytes in {self.folder}{state}>"


class Lease(Leases):
    """One file that nobody evicts meanwhile. A context manager; ends with `release`, its last reference, or its process.

    Attributes:
        folder: where it lies.
        files: the one file.
    """

    _fd = -1

    @property
    def name(self) -> str:
        """Its name within the folder."""
        return self.files[0].name

    @property
    def path(self) -> str:
        """Where it lies."""
        return f"{self.folder}/{self.name}"

    @property
    def fd(self) -> int:
        """A descriptor for reading, opened at the first use and closed with the lease."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def release(self) -> None:
        """Lets it go, and closes `fd`. Twice is no error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().release()
