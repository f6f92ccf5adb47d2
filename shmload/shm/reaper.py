"""Run a shell that removes this process's names from /dev/shm when the process is killed.

A small shell waits on a pipe whose other end only the trainer holds. It has its own session, so a kill of the trainer's process
group does not reach it. When the other end closes, the shell removes every file with the process's stem from /dev/shm and ends.
It is started with a process's first segment group, and ends after the last group has been closed.

Workers end by themselves when the trainer does, once their interpreters have started. The shell then kills those that still import
the user's program. It knows the start time of each, so it never kills a later process with the same id.

A meeting (meeting.py) may outlive the process. The shell knows the meetings, waits until the other processes have left them too,
and then removes them under their locks. Without a `flock` command (util-linux, busybox) their files, a few hundred bytes, stay for
the janitor (janitor.py).
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import weakref
from contextlib import suppress
from typing import Any

from shmload.processes import private_fds
from shmload.processes.identity import start_of
from shmload.shm.names import SHM_DIR, process_stem

log = logging.getLogger("shmload")

# $0 is the process's stem. Each line names a board or a worker, or is "bye": everything was removed, and names that appear from
# then on belong to the process's next shell. Signals of a terminal or of an orderly shutdown must not end the shell before its work
# is done. A worker's start time is the 20th word after its name, which is in brackets and may contain spaces.
# -ef: by the time the lock is granted, a board that was opened may belong to an earlier meeting.
_SCRIPT = f"""trap '' INT TERM HUP QUIT
boards= workers=' '
while read -r kind word; do
  case $kind in
    bye) exit ;;
    board) boards="$boards $word" ;;
    watched) workers="$workers$word " ;;
    gone) case $workers in *" $word "*) workers="${{workers%%" $word "*}} ${{workers#*" $word "}}" ;; esac ;;
  esac
done
for worker in $workers; do
  read -r stat <"/proc/${{worker%:*}}/stat" && set -- ${{stat##*) }} && [ "${{20}}" = "${{worker#*:}}" ] && kill -9 "${{worker%:*}}"
done
rm -f -- {SHM_DIR}/"$0"-* {SHM_DIR}/sem."$0"-*
for board in $boards; do
  (exec 9<"$board" && flock 9 && [ /proc/self/fd/9 -ef "$board" ] && rm -f -- "${{board%control}}gate" "$board") &
done"""

_LEAVE_S = 2.0  # seconds that the shell may take to end before it is killed; it has no work left
# loaders are made and closed in several threads, and by the garbage collector, which may run while this thread holds the lock
_lock = threading.RLock()
_groups = 0
_shell: subprocess.Popen[bytes] | None = None
_pipe = -1
_boards: set[str] = set()  # of the meetings that this process attends or has attended
_watched: dict[int, str] = {}  # a worker's pid -> its pid and start time, as sent to the shell


def enter() -> None:
    """Count a new segment group. Start the shell if none is running."""
    global _groups
    with _lock:
        _groups += 1
        if _shell is None or _shell.poll() is not None or not private_fds.is_kept(_pipe):  # killed, or its pipe closed
            _start()


def _start() -> None:
    global _shell, _pipe
    if _pipe >= 0:
        private_fds.close(_pipe)
    if _shell is not None:
        _await(_shell)  # it removes all names of this process, and would also remove those of the new group
    end, own = os.pipe2(os.O_CLOEXEC)
    _pipe = private_fds.keep(own)
    try:
        _shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, process_stem()],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            start_new_session=True,
        )
    except OSError as error:
        log.warning(
            "cannot start the reaper (%s): if this process is killed, its memory in %s remains until shmload starts again",
            error,
            SHM_DIR,
        )
    finally:
        os.close(end)
    for board in _boards:
        _write(f"board {board}")
    for worker in _watched.values():
        _write(f"watched {worker}")


def watch(pid: int) -> None:
    """Let the shell kill a started worker if this process is killed. Idempotent.

    Args:
        pid: the worker's process.
    """
    started = start_of(pid)
    if not started:  # the worker has ended already, or /proc is not mounted
        return
    with _lock:
        if _watched.get(pid) != f"{pid}:{started}":
            _watched[pid] = f"{pid}:{started}"
            _write(f"watched {_watched[pid]}")


def forget(pid: int) -> None:
    """Stop watching a worker that has ended. Idempotent.

    Args:
        pid: the worker's process.
    """
    with _lock:
        worker = _watched.pop(pid, None)
        if worker is not None:
            _write(f"gone {worker}")


def watch_meeting(board: str) -> None:
    """Let the shell remove a meeting's files after this process is killed. Idempotent.

    Args:
        board: path of the meeting's board.
    """
    with _lock:
        if board not in _boards:
            _boards.add(board)
            _write(f"board {board}")


def _write(line: str) -> None:
    if private_fds.is_kept(_pipe):
        with suppress(OSError):  # the shell was killed; the next one gets all lines
            os.write(_pipe, f"{line}\n".encode())


def keep_for(owner: object) -> weakref.finalize[..., Any]:
    """Keep the shell running while an object lives, even without a segment group, so that the next group need not start it.

    Args:
        owner: the object.
    Returns:
        a function that stops keeping it; called by itself when the object dies.
    """
    enter()
    return weakref.finalize(owner, _leave_in, os.getpid())


def _leave_in(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        leave()


def leave() -> None:
    """Count a closed segment group. After the last one, end the shell and wait for it."""
    global _groups, _shell, _pipe
    with _lock:
        _groups -= 1
        if _groups > 0:
            return
        _write("bye")
        _boards.clear()
        _watched.clear()
        shell, _shell = _shell, None
        pipe, _pipe = _pipe, -1
        if pipe >= 0:
            private_fds.close(pipe)
    if shell is not None:
        _await(shell)


def _await(shell: subprocess.Popen[bytes]) -> None:
    try:
        shell.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:  # for example, it is stopped
        shell.kill()
        shell.wait()


def _forget() -> None:
    global _groups, _shell, _pipe, _lock
    _lock = threading.RLock()
    if _shell is not None:
        _shell.returncode = 0  # not a child of this process, so there is nothing to wait for or to warn of
    _groups, _shell, _pipe = 0, None, -1
    _boards.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forget)
