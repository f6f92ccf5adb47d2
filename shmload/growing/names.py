"""What lies in a cache's folder, and what the names there say.

    g<generation>-<records>-<bytes>.tfrecord[.gz|.zz]   published by a writer; whole, or the size differs from what the name says
    .growing/                                           what processes tell each other; nothing that a listing needs
    .<anything>                                         nobody's samples
    <anything else>                                     dropped in by somebody: looked at before it is believed (intake.py)

A generation is a number of its own for every file published, greater for a later one.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import NamedTuple

CONTROL = ".growing"
ENDINGS = {None: "", "gzip": ".gz", "zlib": ".zz"}
_OWN = re.compile(r"g(\d{12})-(\d+)-(\d+)\.tfrecord(?:\.gz|\.zz)?")


class CacheFile(NamedTuple):
    """A file of samples, as a listing or a snapshot knows it."""

    name: str
    num_records: int
    nbytes: int
    mtime_ns: int

    @property
    def generation(self) -> int:
        """Of a file that a writer published; -1 of one that somebody dropped in."""
        return -1 if (found := _OWN.fullmatch(self.name)) is None else int(found[1])


def own_name(generation: int, num_records: int, nbytes: int, compression: str | None) -> str:
    """The name that a writer publishes a file under."""
    return f"g{generation:012d}-{num_records}-{nbytes}.tfrecord{ENDINGS[compression]}"


def read_own_name(name: str) -> tuple[int, int] | None:
    """(records, bytes) that a writer's file has; None: a writer gives no such names."""
    found = _OWN.fullmatch(name)
    return None if found is None else (int(found[2]), int(found[3]))


def next_generation(control: Path) -> int:
    """A number that no other call gives, and that is greater than any given before.

    A writer that is killed here leaves a gap, or the number it was about to take.
    """
    fd = os.open(control / "generation", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        generation = int(os.pread(fd, 20, 0) or b"0") + 1
        os.pwrite(fd, b"%020d" % generation, 0)
        return generation
    finally:
        os.close(fd)


def newest_generation(control: Path) -> int:
    """How many files have been published since the cache was made."""
    try:
        return int((control / "generation").read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def write_whole(path: Path, data: bytes, *, is_new: bool = False) -> bool:
    """Writes a small file whole or not at all. With `is_new`, False if there is one already."""
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    partial.write_bytes(data)
    if not is_new:
        partial.replace(path)
        return True
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    return True
