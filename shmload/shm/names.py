"""Make the names of the files that a loader creates in /dev/shm.

    shmload-<uid>-<process nonce>-<k>            the stem of one loader's group
    <stem>-control, <stem>-payload-0, ...        its segments
    <stem>-control.new, ...                      a segment under construction, renamed once it is locked
    sem.<stem>-ready, ...                        its semaphores, as the C library names them

Every process draws a random nonce, and a forked child draws a new one, so no two processes or containers use the same names. The
one exception is the place where the processes of one run meet (`meeting_stem`): its nonce is a digest of values that all of them
know. Others may guess these values, so meeting.py checks whose files it finds there.
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
    """Return the prefix of all names of this process."""
    global _process
    if not _process:
        _process = f"shmload-{os.getuid()}-{secrets.token_hex(6)}"
    return _process


def new_stem() -> str:
    """Return the stem of a new group."""
    return f"{process_stem()}-{next(_counter)}"


def meeting_stem(*key: str) -> str:
    """Return the stem of the place where all processes of this user that know the key meet."""
    nonce = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"shmload-{os.getuid()}-{nonce}-0"


def proc_self() -> str:
    """Return this process's folder under /proc, which is not /proc/getpid() if /proc belongs to an outer PID namespace."""
    try:
        return f"/proc/{os.readlink('/proc/self')}"
    except OSError:  # no /proc is mounted, so no process can attach either
        return f"/proc/{os.getpid()}"


def _forget() -> None:
    global _process
    _process = ""


os.register_at_fork(after_in_child=_forget)
