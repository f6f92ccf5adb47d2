"""Report files that an epoch found damaged.

.growing/bad/<checksum of the name>.json    the file and its damage. Later snapshots of all runs omit the file until it changes
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.formats.atomic_write import write_if_possible
from shmload.growing.cache_file import CONTROL

BAD = "bad"
log = logging.getLogger("shmload")


def report_bad(folder: Path, name: str, text: str, ctime_ns: int) -> None:
    """Report that a file is damaged. Until it changes, it is left out of later snapshots and listed in `stats()`.

    Args:
        folder: the cache.
        name: the file.
        text: description of the damage.
        ctime_ns: time of the file's last change. Its modification time is not used, because a copy of a good file may keep it.
    """
    path = folder / CONTROL / BAD / f"{crc32c(name.encode()):08x}.json"
    if name not in reported_bad(folder):
        log.warning("%s; it is left out of later epochs", text)
        write_if_possible(path, json.dumps({"name": name, "text": text, "ctime_ns": ctime_ns}).encode())


def reported_bad(folder: Path) -> dict[str, str]:
    """Return the files that were found damaged and have not changed since, and the damage of each."""
    found = {}
    for path in (folder / CONTROL / BAD).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # the file has changed or is gone, or it is not a report
            one = json.loads(path.read_bytes())
            if os.stat(folder / one["name"]).st_ctime_ns == one["ctime_ns"]:
                found[one["name"]] = one["text"]
    return found
