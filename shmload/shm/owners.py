"""What a forked child of the trainer sees of the batches that the trainer holds: the bytes of the moment of the fork.

A slot is shared memory. Without this a child would go on seeing it after the parent has dropped its batch, that is, the next
batch's bytes. So each fork with live leases takes one more reference on every one of them and makes a pipe; the child puts private
copies in the place of those slots and closes its end; the parent waits for that, and with it lets the references go. A child that
has no memory for copies keeps its end open instead: then the slots stay the parent's until it ends or execs. Where the child takes
longer than GRACE_S the parent goes on, and looks again at its next fork and in `settle`.

Memory: a child costs the bytes of the slots leased at its fork, whether it looks at them or not; usually that is one batch.
The worker pool's own workers never look at a batch, and pay nothing (`ours`).

What removes our names when the trainer is killed and can do nothing any more.

A tiny shell in a session of its own (a kill of the trainer's process group does not reach it) waits on a pipe whose other end only
the trainer holds. When that end closes, the shell removes every file with the process's stem from /dev/shm and ends. It is started
with a process's first group and, where the last group has been closed, asked to leave.

Workers end by themselves when the trainer does, once their interpreters are up; those that are still importing the user's program
then are the shell's to kill. It is given each with its start time, so that a number taken by another process since is let be.

A meeting (meeting.py) may outlive the process: the shell, which is given each, waits until the others have left it, too,
and removes it then, under the lock that says so. Without util-linux's or busybox's `flock` its files, a few hundred bytes,
stay for the janitor.

Removing what dead owners have left in /dev/shm, and nothing else.

A group is dead if nobody holds the flock on its control segment. A flock, unlike a pid, is right across PID namespaces that share
/dev/shm. The janitor takes that lock itself and keeps it until the names are gone, the control segment's last: nobody comes to
life under its hands, and of two janitors one goes by. Owners make their control segments under another name and rename them when
they are locked (segment.py), so one that can be locked is dead at once: a container that is restarted finds its old ring.

A group without a control segment has none to ask. It is left alone until its files are older than a guard.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import struct
import subprocess
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from shmload._core.trainer import Lease, live_leases, stop_poisoning
from shmload.processes import private_fds
from shmload.processes.file_lock import FileLock
from shmload.processes.identity import start_of
from shmload.shm.names import NEW, SHM_DIR, STEM_PATTERN, process_stem

GRACE_S = 1.0


class _Fork(NamedTuple):
    """One fork under way: the leases it keeps, and the pipe whose other end its child holds until it has copied them."""

    leases: list[Lease]
    reader: int
    writer: int


_thread = threading.local()  # `.fork`, between this thread's handlers; `.is_ours`
_unsettled: list[_Fork] = []


@contextmanager
def ours() -> Iterator[None]:
    """Forks in this block are not looked at: their children use no batch."""
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = False


def settle() -> int:
    """Lets the references of forks go whose children have copied or ended. Returns how many have not."""
    for fork in _unsettled:
        _settle(fork, 0)
    return len(_unsettled)


def _settle(fork: _Fork, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(fork.reader, select.POLLIN)
    if poll.poll(timeout_s * 1000):  # nothing is ever written: this is the end of the file
        _unsettled.remove(fork)
        private_fds.close(fork.reader)


def _private(lease: Lease) -> bool:
    return bool(lease.make_private())


def _before() -> None:
    _thread.fork = None
    if getattr(_thread, "is_ours", False):
        return
    settle()
    leases = live_leases()
    if leases:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        _thread.fork = _Fork(leases, private_fds.keep(reader), writer)


def _in_parent() -> None:
    fork, _thread.fork = _thread.fork, None
    if fork is not None:
        _unsettled.append(fork)
        os.close(fork.writer)
        _settle(fork, GRACE_S)


def _in_child() -> None:
    fork, _thread.fork = _thread.fork, None
    stop_poisoning()
    _unsettled.clear()  # private_fds.py has closed the readers
    if fork is not None and all(_private(lease) for lease in fork.leases):  # after the first refusal all slots stay kept
        os.close(fork.writer)


os.register_at_fork(before=_before, after_in_child=_in_child, after_in_parent=_in_parent)


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
_watched: dict[int, str] = {}  # worker's pid -> pid and start time, as the shell gets it


def enter() -> None:
    """Says that a group begins to exist."""
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
        _await(_shell)  # it is removing what there was, by names that those of the new groups begin like
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
        log.warning("no reaper (%s): if this process is killed, its memory in %s stays until shmload starts again", error, SHM_DIR)
    finally:
        os.close(end)
    for board in _boards:
        _write(f"board {board}")
    for worker in _watched.values():
        _write(f"watched {worker}")


def watch(pid: int) -> None:
    """Says that a worker has been started: if this process is killed, so is the worker. Once said is enough."""
    started = start_of(pid)
    if not started:  # it has ended already, or there is no /proc
        return
    with _lock:
        if _watched.get(pid) != f"{pid}:{started}":
            _watched[pid] = f"{pid}:{started}"
            _write(f"watched {_watched[pid]}")


def forget(pid: int) -> None:
    """Says that a worker has ended."""
    with _lock:
        worker = _watched.pop(pid, None)
        if worker is not None:
            _write(f"gone {worker}")


def attend(board: str) -> None:
    """Says that the process attends a meeting from now on; once said is enough."""
    with _lock:
        if board not in _boards:
            _boards.add(board)
            _write(f"board {board}")


def _write(line: str) -> None:
    if private_fds.is_kept(_pipe):
        with suppress(OSError):  # somebody has killed it; the next one gets all of it
            os.write(_pipe, f"{line}\n".encode())


def stay_for(whom: object) -> weakref.finalize[..., Any]:
    """Keeps the reaper for as long as an object lives, though no group be there: the next one need not start it.

    Returns:
        what lets it go at once when it is called.
    """
    enter()
    return weakref.finalize(whom, _leave_in, os.getpid())


def _leave_in(pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy ends nothing
        leave()


def leave() -> None:
    """Says that a group is gone; with the last one the reaper ends, and is waited for."""
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


GUARD_S = 5.0
_HEADER = struct.Struct("<8s88xq")  # magic and owner_pid of shml_header in src/layout.h
_MAGIC = b"SHMLOLD1"

_State = Literal["living", "dead", "no control"]
_WHY = {
    "dead": "nobody holds its lock: its owner is dead",
    "no control": "it has no control segment: its owner died at its start or its end",
}


class Leftover(NamedTuple):
    """What a dead loader has left.

    Attributes:
        age_s: how long ago the youngest of its files changed.
        pid: its owner's, in the PID namespace that it lived in; 0: not known.
        why: why it is taken for dead.
        error: why it could not be removed; empty if it was, or if it was only looked for.
    """

    stem: str
    paths: tuple[str, ...]
    nbytes: int
    age_s: float
    uid: int
    pid: int
    why: str
    error: str = ""


def find_leftovers(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """The groups of this user whose owners are dead."""
    return list(_go_over(folder, guard_s, removes=False))


def sweep(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """Removes them, and says of each that it has, or why it could not."""
    return list(_go_over(folder, guard_s, removes=True))


def _go_over(folder: str, guard_s: float, *, removes: bool) -> Iterator[Leftover]:
    groups: dict[str, list[str]] = defaultdict(list)
    try:
        names = os.listdir(folder)
    except OSError:
        return
    uid = os.getuid()
    for name in names:
        match = STEM_PATTERN.fullmatch(name)
        if match and int(match[2]) == uid:
            groups[match[1]].append(f"{folder}/{name}")
    for stem, paths in sorted(groups.items()):
        control = f"{folder}/{stem}-control"
        with _held(control, uid) as (state, pid):
            found = None if state == "living" else _described(stem, sorted(paths), uid, pid, _WHY[state])
            if found is not None and (state == "dead" or found.age_s >= guard_s):
                yield _removed(found, control) if removes else found


@contextmanager
def _held(control: str, uid: int) -> Iterator[tuple[_State, int]]:
    """Whether the owner of a control segment lives, and its pid; if it does not, its lock is held in the block."""
    for path in (control, control + NEW):
        try:
            lock = FileLock.open(path)
        except FileNotFoundError:
            continue
        except OSError:  # no descriptor is left, say: what cannot be asked counts as living
            yield "living", 0
            return
        try:
            yield _state_of(lock, path, uid) if path == control else ("living" if _is_locked(lock) else "no control", 0)
        finally:
            lock.close()
        return
    yield "no control", 0


def _state_of(lock: FileLock, path: str, uid: int) -> tuple[_State, int]:
    status = os.fstat(lock.fd)
    if status.st_uid != uid or not stat.S_ISREG(status.st_mode) or _is_locked(lock):
        return "living", 0
    if not lock.is_at(path):
        return "living", 0  # its owner has removed it meanwhile, and another may have begun
    head = os.pread(lock.fd, _HEADER.size, 0)
    magic, pid = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0)
    return "dead", pid if magic == _MAGIC else 0


def _is_locked(lock: FileLock) -> bool:
    """Return whether another process holds a lock. If not, this process holds it from now on."""
    try:
        return not lock.try_acquire()
    except OSError:  # on a file system without locks, nobody is declared dead
        return True


def _described(stem: str, paths: list[str], uid: int, pid: int, why: str) -> Leftover | None:
    """The leftover, or None if it is another user's after all or has just gone."""
    nbytes, youngest = 0, 0.0
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if status.st_uid != uid:
            return None
        nbytes += status.st_blocks * 512
        youngest = max(youngest, status.st_mtime, status.st_ctime)
    return Leftover(stem, tuple(paths), nbytes, time.time() - youngest, uid, pid, why)


def _removed(leftover: Leftover, control: str) -> Leftover:
    for path in sorted(leftover.paths, key=lambda path: path == control):  # as long as it is there, its lock guards the others
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return leftover._replace(error=f"{path}: {os.strerror(error.errno or errno.EPERM)}")
    return leftover
