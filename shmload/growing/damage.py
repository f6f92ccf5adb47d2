"""Files that turned out to be damaged while an epoch read them.

.growing/bad/<sum of the name>.json   which, and how: every later snapshot of any run leaves it out
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.growing.names import CONTROL, write_whole

BAD = "bad"
log = logging.getLogger("shmload")


def tell_bad(folder: Path, name: str, text: str) -> None:
    """Says that a file is damaged: it stays out of every later snapshot, and is listed in `stats()`."""
    path = folder / CONTROL / BAD / f"{crc32c(name.encode()):08x}.json"
    if not path.exists():
        log.warning("%s; it is left out of later epochs", text)
        write_whole(path, json.dumps({"name": name, "text": text}).encode())


def told_bad(folder: Path) -> dict[str, str]:
    """Files that were found damaged while they were read, and how."""
    found = {}
    for path in (folder / CONTROL / BAD).glob("*.json"):
        try:
            said = json.loads(path.read_bytes())
            found[said["name"]] = said["text"]
        except (OSError, ValueError, KeyError):
            continue
    return found
