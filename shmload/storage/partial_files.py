"""Name the files that are being written, and remove those that killed writers have left."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["PARTIAL_PREFIX", "is_partial", "remove_abandoned"]

PARTIAL_PREFIX = ".half-"  # prefix of the names of files that are being written
_ABANDONED_S = 86_400  # age in seconds after which a partial file counts as abandoned


def is_partial(key: str) -> bool:
    """Return whether a part of a key is the name of a file that is being written. Listings omit it, and objects cannot have it."""
    return any(part.startswith(PARTIAL_PREFIX) for part in key.split("/"))


def remove_abandoned(folder: Path) -> None:
    """Remove partial files that have not been written to for a day, because their writers were killed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it has been renamed since, or belongs to another user
                if entry.name.startswith(PARTIAL_PREFIX) and entry.stat().st_mtime < time.time() - _ABANDONED_S:
                    os.unlink(entry.path)
