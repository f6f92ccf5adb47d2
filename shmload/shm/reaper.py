"""What removes our names when the trainer is killed and can do nothing any more.

A tiny shell in a session of its own (a kill of the trainer's process group does not reach it) waits on a pipe whose other end only
the trainer holds. When that end closes, the shell removes every file with the process's stem from /dev/shm and ends. It is started
with a process's first group and, where the last group has been closed, told to leave.

Meetings (meeting.py) are no single process's: those of this user that nobody attends any more are removed, under the lock that
says so. Without util-linux's or busybox's `flock` they stay for the janitor; they hold a few hundred bytes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading

from shmload.shm import owner
from shmload.shm.names import SHM_DIR, process_stem

log = logging.getLogger("shmload")

# The process's stem is $0, the user $1. Signals of a terminal or an orderly shutdown must not end it before its work is done.
_SCRIPT = f"""trap '' INT TERM HUP QUIT
read -r _
rm -f -- {SHM_DIR}/"$0"-* {SHM_DIR}/sem."$0"-*
for gate in {SHM_DIR}/shmload-"$1"-*-gate; do
  control=${{gate%gate}}control
  [ -e "$control" ] && flock -n "$control" rm -f -- "$control" "$gate"
done"""

_LEAVE_S = 2.0  # how long the shell may take to end; then it is killed: nothing is left for it to do
# loaders are made and closed in several threads, and in the garbage collector, which may run while this thread holds it
_lock = threading.RLock()
_groups = 0
_shell: subprocess.Popen[bytes] | None = None
_pipe = -1


def enter() -> None:
    """Says that a group begins to exist."""
    global _groups
    with _lock:
        _groups += 1
        if _shell is None or _shell.poll() is not None:  # the second: somebody has killed it
            _start()


def _start() -> None:
    global _shell, _pipe
    if _pipe >= 0:
        owner.close(_pipe)
    end, _pipe = os.pipe2(os.O_CLOEXEC)
    owner.keep(_pipe)
    try:
        _shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, process_stem(), str(os.getuid())],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            start_new_session=True,
        )
    except OSError as error:
        log.warning(
            "no reaper (%s): if this process is killed, its memory in %s stays until shmload starts again",
            error,
            SHM_DIR,
        )
    finally:
        os.close(end)


def leave() -> None:
    """Says that a group is gone; with the last one the reaper ends, and is waited for."""
    global _groups, _shell, _pipe
    with _lock:
        _groups -= 1
        if _groups > 0:
            return
        shell, _shell = _shell, None
        pipe, _pipe = _pipe, -1
        if pipe >= 0:
            owner.close(pipe)
    if shell is None:
        return
    try:
        shell.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:  # it is stopped, say
        shell.kill()
        shell.wait()


def _forget() -> None:
    global _groups, _shell, _pipe, _lock
    _lock = threading.RLock()
    if _shell is not None:
        _shell.returncode = 0  # not this process's child: nothing to wait for, nothing to warn of
    _groups, _shell, _pipe = 0, None, -1


os.register_at_fork(after_in_child=_forget)
