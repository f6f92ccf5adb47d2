"""Names of what a loader leaves in /dev/shm.

    shmload-<uid>-<process nonce>-<k>            the stem of one loader's group
    <stem>-control, <stem>-payload-0, ...        its segments
    <stem>-control.new, ...                      a segment that is being made: it gets its name when it is locked
    sem.<stem>-ready, ...                        its semaphores, as the C library files them

Nothing is found by a fixed name, so nothing of another user, process or container can be taken for ours. The nonce is drawn anew
in a forked child: what a child makes is its own. The one exception is where the processes of one run meet (meeting_stem): there the
nonce is a digest of what only they know, and the place holds no data.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets

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
