"""Refuse files that were changed since a dataset first opened them, because samples of two versions must not be mixed."""

from __future__ import annotations

import os
from typing import Any

from shmload.errors import ShardCorrupt


class FileVersions:
    """Size and time of modification of each file when it was first checked. A copy that is unpickled has not checked any."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}

    def check(self, path: str) -> None:
        """Remember the version of a file, or compare it with the one that is known.

        Raises:
            OSError: the file cannot be examined.
            ShardCorrupt: it was changed.
        """
        status = os.stat(path)
        version = status.st_size, status.st_mtime_ns
        if (known := self._known.setdefault(path, version)) != version:
            raise ShardCorrupt(f"{path}: was changed since it was opened, with {known[0]} bytes: create the dataset again")

    def __reduce__(self) -> tuple[Any, ...]:
        return FileVersions, ()  # on another machine the same file may have another time
