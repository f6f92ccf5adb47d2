"""What removes our names when the trainer is killed and can do nothing any more.

A tiny shell in a session of its own (a kill of the trainer's process group does not reach it) waits on a pipe whose other end only
the trainer holds. When that end closes, the shell removes every file with the process's stem from /dev/shm and ends. It is started
with a process's first group and, where the last group has been closed, told to leave.

Workers end by themselves when the trainer does, once their interpreters are up; those that are still importing the user's program
then are the shell's to kill. It is told of each with its start time, so that a number taken by another process since is let be.

A meeting (meeting.py) may outlive the process: the shell, told of each that the process attends, waits until the others have left
it too, and removes it then, under the lock that says so. Without util-linux's or busybox's `flock` its files, a few hundred bytes,
stay for the janitor.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading

from shmload.shm import names
from shmload.shm.names import SHM_DIR, process_stem

log = logging.getLogger("shmload")

# The process's stem is $0; lines name the boards of meetings, and workers. Signals of a terminal or an orderly shutdown must not
# end it before its work is done. A worker's start time is the 20th word behind its name, which is in brackets and may hold some.
# A board that was opened may be an earlier meeting's by the time its lock is had: -ef.
_SCRIPT = f"""trap '' INT TERM HUP QUIT
boards= workers=' '
while read -r kind word; do
  case $kind in
    bye) boards= workers=' ' ;;
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

_LEAVE_S = 2.0  # how long the shell may take to end; then it is killed: nothing is left for it to do
# loaders are made and closed in several threads, and in the garbage collector, which may run while this thread holds it
_lock = threading.RLock()
_groups = 0
_shell: subprocess.Popen[bytes] | None = None
_pipe = -1
_boards: set[str] = set()  # of the meetings that the process attends or has attended
_watched: dict[int, str] = {}  # worker's pid -> pid and start time, as the shell is told


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
        names.close(_pipe)
    end, _pipe = os.pipe2(os.O_CLOEXEC)
    names.keep(_pipe)
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
            "no reaper (%s): if this process is killed, its memory in %s stays until shmload starts again",
            error,
            SHM_DIR,
        )
    finally:
        os.close(end)
    for board in _boards:
        _tell(f"board {board}")
    for worker in _watched.values():
        _tell(f"watched {worker}")


def watch(pid: int) -> None:
    """Says that a worker has been started: if this process is killed, so is the worker."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except OSError:  # it has ended already, or there is no /proc
        return
    with _lock:
        _watched[pid] = f"{pid}:{started}"
        _tell(f"watched {_watched[pid]}")


def forget(pid: int) -> None:
    """Says that a worker has ended."""
    with _lock:
        worker = _watched.pop(pid, None)
        if worker is not None:
            _tell(f"gone {worker}")


def attend(board: str) -> None:
    """Says that the process attends a meeting from now on; once said is enough."""
    with _lock:
        if board not in _boards:
            _boards.add(board)
            _tell(f"board {board}")


def _tell(line: str) -> None:
    if _pipe >= 0:
        try:
            os.write(_pipe, f"{line}\n".encode())
        except OSError:  # somebody has killed it; the next one is told all
            pass


def leave() -> None:
    """Says that a group is gone; with the last one the reaper ends, and is waited for."""
    global _groups, _shell, _pipe
    with _lock:
        _groups -= 1
        if _groups > 0:
            return
        _tell("bye")
        _boards.clear()
        _watched.clear()
        shell, _shell = _shell, None
        pipe, _pipe = _pipe, -1
        if pipe >= 0:
            names.close(pipe)
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
    _boards.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forget)
