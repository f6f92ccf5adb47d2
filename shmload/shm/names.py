"""Names of what a loader leaves in /dev/shm.

    shmload-<uid>-<process nonce>-<k>            the stem of one loader's group
    <stem>-control, <stem>-payload-0, ...        its segments
    <stem>-control.new, ...                      a segment that is being made: it gets its name when it is locked
    sem.<stem>-ready, ...                        its semaphores, as the C library files them

Nothing is found by a fixed name, so nothing of another user, process or container can be taken for ours. The nonce is drawn anew
in a forked child: what a child makes is its own. The one exception is where the processes of one run meet (meeting_stem): there the
nonce is a digest of what only they know, and the place holds no data.

Descriptors that say "the owner lives", and so must not live on in anything it forks.

A flock belongs to the open file and a pipe stays open while any copy of its end does. A forked child would keep both, and make a
dead trainer look alive. Every such descriptor is registered here and closed in each forked child; exec closes them too (CLOEXEC).

A process told from a later one that has its number: by when it began.

A *ticket* is both in one word of shared memory: number << 40 | start time, in the kernel's ticks since boot.

This host as /proc, /sys and the environment describe it, under any root, so that another host can be stood in its place.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shmload.world import start_of


class Limit(NamedTuple):
    """A resource limit; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Host:
    """Where checks look.

    Attributes:
        root: of the file system.
        environ: the environment variables a training would have.
        pid: this process's, in its own PID namespace.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pid: int = field(default_factory=os.getpid)

    def text(self, path: str) -> str | None:
        """A file's text without the white space around it; None if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def room(self, path: str) -> tuple[int, int] | None:
        """Bytes of the file system that a folder lies in: all, and free; None if there is none."""
        try:
            status = os.statvfs(self.root / path)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def limit(self, name: str) -> Limit | None:
        """One row of /proc/self/limits, by its words there; None if it is not there."""
        for line in (self.text("proc/self/limits") or "").splitlines():
            if line.startswith(name):
                soft, hard, *_ = line[len(name) :].split()
                return Limit(*(None if word == "unlimited" else int(word) for word in (soft, hard)))
        return None

    def status(self, name: str) -> str | None:
        """One row of /proc/self/status."""
        for line in (self.text("proc/self/status") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
        return None


def listed(ranges: str) -> set[int]:
    """The numbers of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


class _Kept(int):
    """A descriptor that remembers its file: a program that closes all, as daemons do, may have opened others by the same number."""

    file: tuple[int, int]


_descriptors: dict[int, _Kept] = {}


def keep(fd: int) -> int:
    """Registers a descriptor of the owner's. What it returns is the same number, and the right one to give to `close`."""
    kept = _Kept(fd)
    kept.file = _file_of(fd)
    _descriptors[fd] = kept
    return kept


def is_kept(fd: int) -> bool:
    """Return whether a descriptor is registered and still of the same file."""
    kept = _descriptors.get(fd)
    if kept is None or (isinstance(fd, _Kept) and fd is not kept):
        return False
    with suppress(OSError):
        return kept.file == _file_of(fd)
    return False


def close(fd: int) -> None:
    """Closes one that was registered, if it has not been (in a forked child it has)."""
    if is_kept(fd):
        del _descriptors[fd]
        os.close(fd)


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close_all() -> None:
    for fd in list(_descriptors.values()):
        close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_all)


_START_BITS = 40


def pidfd_of(pid: int, began: str) -> int:
    """A descriptor of the process that began then; -1: it has ended.

    Raises:
        OSError: there is no descriptor left.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if began and start_of(pid) == began:  # looked at with the process in hand: its number is not given away now
        return pidfd
    os.close(pidfd)
    return -1


def own_ticket() -> int:
    """This process's; never 0."""
    return os.getpid() << _START_BITS | int(start_of(os.getpid()) or 0) & (1 << _START_BITS) - 1


def of_ticket(ticket: int) -> tuple[int, str]:
    """The number and the start of a ticket's process."""
    return ticket >> _START_BITS, str(ticket & (1 << _START_BITS) - 1)


SHM_DIR = "/dev/shm"
NEW = ".new"
STEM_PATTERN = re.compile(r"(?:sem\.)?(shmload-(\d+)-([0-9a-f]{12})-\d+)-.+")

_process = ""
_counter = itertools.count()


def process_stem() -> str:
    """What all names of this process begin with."""
    global _process
    if not _process:
        _process = f"shmload-{os.getuid()}-{secrets.token_hex(6)}"
    return _process


def new_stem() -> str:
    """The stem of a new group."""
    return f"{process_stem()}-{next(_counter)}"


def meeting_stem(*key: str) -> str:
    """The stem of the place where all processes of this user meet that know the key."""
    nonce = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"shmload-{os.getuid()}-{nonce}-0"


def proc_self() -> str:
    """This process's folder under /proc. Its number there is not getpid() where /proc is an outer PID namespace's."""
    try:
        return f"/proc/{os.readlink('/proc/self')}"
    except OSError:  # no /proc is mounted: nobody will attach either
        return f"/proc/{os.getpid()}"


def _forget() -> None:
    global _process
    _process = ""


os.register_at_fork(after_in_child=_forget)
