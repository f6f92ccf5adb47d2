"""Name the files of a growing cache, and read the names.

    g<generation>-<records>-<bytes>.tfrecord[.gz|.zz]   published by a writer; damaged if its size differs from that in its name
    .growing/                                           files that processes write for each other; a listing does not need them
    .<anything>                                         ignored
    <anything else>                                     added by another program, and examined before it is read (intake.py)

Each published file has its own generation, greater than those of earlier files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from shmload.processes.file_lock import locked

CONTROL = ".growing"
ENDINGS = {None: "", "gzip": ".gz", "zlib": ".zz"}
_OWN = re.compile(r"g(\d{12})-(\d+)-(\d+)\.tfrecord(?:\.gz|\.zz)?")


class CacheFile(NamedTuple):
    """The description of a file of samples in a listing or a snapshot; `nbytes` and `mtime_ns` are its size and time on disk."""

    name: str
    num_records: int
    nbytes: int
    mtime_ns: int

    @property
    def generation(self) -> int:
        """Return the generation of a file that a writer published; -1 for a file that another program added."""
        return -1 if (found := _OWN.fullmatch(self.name)) is None else int(found[1])

    def is_replaced(self, status: os.stat_result) -> bool:
        """Return whether another file has its name now. This never happens to writers' files, because no name is used twice.

        Args:
            status: the status of the file that has the name now.
        """
        return self.generation < 0 and (self.nbytes, self.mtime_ns) != (status.st_size, status.st_mtime_ns)


def own_name(generation: int, num_records: int, nbytes: int, compression: str | None) -> str:
    """Return the name under which a writer publishes a file."""
    return f"g{generation:012d}-{num_records}-{nbytes}.tfrecord{ENDINGS[compression]}"


def read_own_name(name: str) -> tuple[int, int] | None:
    """Return the numbers of records and bytes in a writer's file name, or None if the name is not a writer's."""
    found = _OWN.fullmatch(name)
    return None if found is None else (int(found[2]), int(found[3]))


def next_generation(control: Path) -> int:
    """Return a number greater than any returned before, in any process.

    If a writer is killed in this function, its number is skipped, or used by the next call.
    """
    with locked(control / "generation") as fd:
        generation = int(os.pread(fd, 20, 0) or b"0") + 1
        os.pwrite(fd, b"%020d" % generation, 0)
        return generation


def newest_generation(control: Path) -> int:
    """Return the newest generation: the number of files published so far, and of generations that killed writers skipped."""
    try:
        return int((control / "generation").read_bytes() or b"0")
    except FileNotFoundError:
        return 0
