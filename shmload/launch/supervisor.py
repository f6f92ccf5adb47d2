"""The ranks of one machine from their start to their end, watched on pidfds by the thread that started them.

The first rank to fail ends all, as does a signal: SIGTERM, so long a grace, SIGKILL. A failure is an exit code, a signal, or an
exception that a rank's function has reported. What a rank has started itself is asked to end, too, by its process
group, once the rank has ended in such a run.

Signals to the launcher, kept until it looks: an exception out of a handler could come between a rank's start and its record.

What ranks print, brought out line by line with the rank's number before it.

One thread reads all pipes and writes whole lines, so lines of ranks do not mix, and the launcher goes on watching ranks while
whoever reads its output does not. A line ends at \n or \r (progress bars); one that is longer than a megabyte is cut there.

What is said when a rank has failed: which was the first and why, with its own words, then what became of the others.

`shmload.spawn`: a function in one process per GPU.

Processes are multiprocessing's: what it shares (queues, locks, tensors) can be given. One that is spawned begins as a rank
(boot.py) and its output is caught from its first line, which multiprocessing has no argument for: it only pickles the process here.
`forkserver` is refused: its processes are the server's children and not the launcher's, so neither their signals nor their lives
are tied to it.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import multiprocessing
import os
import re
import secrets
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import popen_fork, popen_spawn_posix, reduction, resource_tracker
from multiprocessing import spawn as spawning_tools
from multiprocessing.context import ForkProcess, SpawnProcess, set_spawning_popen
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any

from shmload.errors import RankFailed
from shmload.launch import boot, in_rank
from shmload.launch.in_rank import RankReport, read_report
from shmload.launch.ranks import LOOPBACK, Child, Ends, NodePlace, RankSpec, Start, booted, held_port, number_of_ranks, rank_specs
from shmload.shm.names import Host
from shmload.world import describe_exit

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal has ended the run, and all ranks have ended.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Signals:
    """Catches signals while it is entered. In other threads than the main one it catches nothing: they get none.

    One that is ignored stays so. One that the program has a handler for is the program's affair: its handler is called when the
    launcher looks, and what it raises ends the run.

    Args:
        wake: descriptor of an eventfd, which a signal makes readable.
    """

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self.caught: list[tuple[int, float]] = []  # that nobody has taken, and when they came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # the first: not installed by Python
                    self._before[number] = before
                    signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _catch(self, number: int, frame: Any) -> None:
        self.caught.append((number, monotonic()))
        os.eventfd_write(self._wake, 1)

    def interrupted_since(self, time_s: float) -> bool:
        """Whether there has been a ^C that nobody has taken, after a time of the monotonic clock."""
        return any(number == signal.SIGINT and caught_s > time_s for number, caught_s in self.caught)

    def take(self) -> int:
        """The number of a signal that is to end the run; 0: none is. Calls the program's own handlers."""
        while self.caught:
            number, _ = self.caught.pop(0)
            before = self._before[number]
            if before in (signal.SIG_DFL, signal.default_int_handler):
                return number
            before(number, None)
        return 0


_CHUNK = 1 << 16
_LONGEST = 1 << 20
TAIL = 200  # lines of a rank's stderr that are kept for an error's text


class Pipe:
    """One rank's stdout or stderr on its way out.

    Args:
        fd: the end to read; closed by `close`.
        prefix: before each line.
        stream: where lines go: a text file over bytes, or over nothing.
    """

    def __init__(self, fd: int, prefix: str, stream: IO[Any] | None) -> None:
        self.fd = fd
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self._prefix = prefix.encode()
        self._stream = stream
        self._rest = b""
        os.set_blocking(fd, False)

    def pump(self) -> bool:
        """Reads once and writes the lines that are whole. Returns whether there may be more now."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._emit(self._rest)
            self._rest = b""
            return False
        data = self._rest + data
        # a \r at the end may be half of \r\n
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if not end and len(data) > _LONGEST:
            end = len(data)
        self._emit(data[:end])
        self._rest = data[end:]
        return True

    def close(self) -> None:
        """Writes what has no line's end, and closes the pipe."""
        self._emit(self._rest)
        os.close(self.fd)

    def _emit(self, data: bytes) -> None:
        if not data:
            return
        if not data.endswith((b"\n", b"\r")):
            data += b"\n"
        lines = data.splitlines(keepends=True)
        self.tail.extend(lines[-TAIL:])
        if self._stream is not None:
            try:
                _write(self._stream, b"".join([self._prefix + line for line in lines]))
            except (OSError, ValueError):  # its reader has gone, or it is closed; ranks go on
                self._stream = None


def _write(stream: IO[Any], data: bytes) -> None:
    stream.flush()
    below = getattr(stream, "buffer", None)
    if below is not None:
        below.write(data)
        below.flush()
    else:  # a notebook's
        stream.write(data.decode(errors="replace"))
        stream.flush()


class Printer:
    """What brings out what all ranks print.

    Attributes:
        thread: started once all pipes have been added.
    """

    def __init__(self) -> None:
        self._pipes: dict[int, Pipe] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.thread = threading.Thread(target=self._run, name="shmload output", daemon=True)

    def add(self, fd: int, prefix: str, name: str) -> Pipe:
        """Takes over the reading end of a pipe, before the thread is started.

        Args:
            name: of the stream in `sys` that it goes to.
        """
        pipe = self._pipes[fd] = Pipe(fd, prefix, getattr(sys, name))
        return pipe

    def finish(self, timeout_s: float | None = None) -> None:
        """Brings out what is there and ends; all ranks have ended. What others hold the pipes for is not waited for.

        Args:
            timeout_s: how long to wait for whoever reads the output; None: as long as it takes.
        """
        os.eventfd_write(self._wake, 1)
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        if not self.thread.is_alive():
            for pipe in self._pipes.values():
                pipe.close()
            self._pipes.clear()
            os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._pipes:
            poll.register(fd, select.POLLIN)
        ends = False
        while not ends:
            for fd, events in poll.poll():
                if fd == self._wake:
                    ends = True
                elif not self._pipes[fd].pump() and events & select.POLLHUP:
                    poll.unregister(fd)
        for pipe in self._pipes.values():
            while pipe.pump():
                pass


_BEGINS = ("Traceback (most recent call last):", "Fatal Python error:")
_GOES_ON = ("The above exception was the direct cause", "During handling of the above exception")
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch.distributed's own, before tracebacks
_LAST = 20  # lines of stderr, where they hold no traceback


@dataclass
class Ending:
    """How a rank ended.

    Attributes:
        exitcode: negative: a signal's number; None: it lives.
        report: what its function has raised.
        asked: it had been asked to end.
        killed: it did not, and was killed.
    """

    rank: int
    pid: int
    exitcode: int | None = None
    report: RankReport | None = None
    asked: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.asked and (self.report is not None or self.exitcode not in (0, None))

    def __str__(self) -> str:
        what = f"raised {self.report.what}" if self.report is not None else describe_exit(self.exitcode)
        return f"rank {self.rank} (pid {self.pid}) {what}"


def first_to_fail(endings: Sequence[Ending]) -> Ending:
    """The cause among failures that were seen at one look.

    A signal comes before exceptions, which others raise because a rank has gone; exceptions go by when they were caught.
    """
    return min(
        endings, key=lambda e: (e.report is not None or e.exitcode is None or e.exitcode > 0, e.report.time_s if e.report else 0.0)
    )


def failure_text(first: Ending, last: str, others: Sequence[Ending], num_ranks: int, grace_s: float) -> str:
    """The text of the error.

    Args:
        first: the cause.
        last: what it wrote last to stderr.
    """
    hint = ""
    if first.exitcode == -signal.SIGKILL:
        hint = " If nobody killed it, the kernel did for want of memory: see dmesg, or memory.events of its cgroup."
    parts = [f"{first}, the first of {num_ranks} to fail.{hint}"]
    if first.report is not None:
        parts.append(first.report.traceback.rstrip())
    elif found := words_of(last):
        parts.append(f"It wrote last to stderr:\n{found}")
    if lines := [*(f"then {other}" for other in others if other.failed), *fates(others, grace_s)]:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def fates(endings: Sequence[Ending], grace_s: float) -> list[str]:
    """What became of ranks that were asked to end, a line each; nothing of those that ended by themselves."""
    found = []
    for killed, what in (
        (False, "ended when asked to (SIGTERM)"),
        (True, f"did not end within {grace_s:g} s of SIGTERM and had to be killed (SIGKILL)"),
    ):
        names = [str(ending.rank) for ending in endings if ending.asked and ending.killed is killed]
        if names:
            who = f"ranks {', '.join(names[:-1])} and {names[-1]}" if names[1:] else f"rank {names[0]}"
            found.append(f"{who} {what}")
    return found


def words_of(last: str) -> str:
    """The last traceback in a text, with its causes and what follows it; else its last lines."""
    lines = _TORCHS_PREFIX.sub("", last.rstrip()).splitlines()
    begins = [
        number
        for number, line in enumerate(lines)
        if line.startswith(_BEGINS) and not lines[max(number - 2, 0)].startswith(_GOES_ON)
    ]
    return "\n".join(lines[begins[-1] if begins else -_LAST :])


GRACE_S = 5.0  # from SIGTERM to SIGKILL
_BLAME_S = 0.1  # a signal to a rank may be one to all, the launcher's still on its way
_DOUBLED_S = 0.5  # a ^C later than that after the first is impatience; `timeout` and terminals send some twice at once
_DRAIN_S = 2.0  # how long whoever reads the output may take when a run has failed
_LAST_NBYTES = 16384  # of a log


@dataclass
class _Running:
    """One rank's process."""

    rank_spec: RankSpec
    child: Child
    pidfd: int  # -1: it has ended
    report_fd: int  # -1: nothing more comes
    stderr: Pipe | None
    ending: Ending
    reported: bytes = b""

    def last(self) -> str:
        """What it wrote last to stderr, or to its log; once nothing is written any more."""
        if self.stderr is not None:
            return b"".join(self.stderr.tail).decode(errors="replace")
        with open(self.rank_spec.log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_NBYTES, 0))
            return file.read().decode(errors="replace")


class SpawnedRanks:
    """All ranks of this machine, as `spawn` returns them. With `join=False` they run while the program goes on.

    A thread of the program watches them then. They end with the program: in order if it ends by itself, at once if it is killed.

    Args:
        start: starts the process of one.
        grace_s: seconds from SIGTERM to SIGKILL.
        port: that they meet at, closed when all have ended; None: it is not this machine's.
    """

    def __init__(self, start: Start, rank_specs: Sequence[RankSpec], grace_s: float, port: socket.socket | None) -> None:
        self._start_one = start
        self._rank_specs = rank_specs
        self._grace_s = grace_s
        self._port = port
        self._ranks: list[_Running] = []
        self._printer = Printer()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.Lock()  # no other thread writes to what is being closed
        self._asked = False
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def pids(self) -> list[int]:
        """The processes' ids by local rank, as far as they have been started."""
        return [one.child.pid for one in self._ranks]

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for all ranks to end. Returns whether they have.

        Args:
            timeout_s: how long to wait; None: as long as it takes.

        Raises:
            RankFailed: one has failed, and the others have been ended.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Ends all ranks in order: SIGTERM, the grace, SIGKILL. `join` raises what they had failed of before."""
        self._asked = True
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()

    def start(self) -> None:
        """Runs them in a thread of their own; returns when all have been started."""
        atexit.register(self.stop)
        self._thread = threading.Thread(target=self._run_apart, name="shmload launcher", daemon=True)
        self._thread.start()
        self._started.wait()
        if len(self._ranks) < len(self._rank_specs):  # one could not be started
            self.join()

    def _run_apart(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self.stop)

    @property
    def _living(self) -> list[_Running]:
        return [one for one in self._ranks if one.pidfd >= 0]

    def run(self) -> None:
        """Starts all ranks and returns when all have ended.

        Raises:
            RankFailed: one has failed.
            Stopped: a signal has come for which the program has no handler of its own.
        """
        failed: list[_Running] = []
        number = 0
        ended = False
        try:
            with Signals(self._wake) as signals:
                try:
                    for rank_spec in self._rank_specs:
                        if not signals.caught and not self._asked:
                            self._begin(rank_spec)
                    self._printer.thread.start()
                    self._started.set()
                    while self._living and not failed and not number and not self._asked:
                        failed = self._look(None)
                        until = monotonic() + _BLAME_S * any(-(one.ending.exitcode or 0) in SIGNALS for one in failed)
                        while not signals.caught and (left := until - monotonic()) > 0:
                            self._look(left)
                        number = signals.take()
                    ended = not self._living
                    number = number or signals.take()  # one that came before the first rank
                finally:
                    self._end(signals)
        finally:
            self._started.set()
            self._printer.finish(None if ended and not failed else _DRAIN_S)
            with self._waking:
                os.close(self._wake)
                self._wake = -1
            if self._port is not None:
                self._port.close()
        endings = [one.ending for one in self._ranks]
        if number:
            raise Stopped(number, "; ".join([f"stopped by {signal.Signals(number).name}", *fates(endings, self._grace_s)]))
        if failed:
            cause = first_to_fail([one.ending for one in failed])
            last = next(one for one in failed if one.ending is cause).last()
            others = [ending for ending in endings if ending is not cause]
            raise RankFailed(failure_text(cause, last, others, len(self._rank_specs), self._grace_s))

    def _begin(self, rank_spec: RankSpec) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if rank_spec.log:
                theirs.append(os.open(rank_spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))
            for _ in range(1 if rank_spec.log else 3):  # of the report; stdout's and stderr's before it
                own, given = os.pipe()
                ours.append(own)
                theirs.append(given)
            child = self._start_one(rank_spec, Ends(theirs[0], theirs[-2], theirs[-1]))
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        stderr = None
        if not rank_spec.log:
            prefix = f"[rank {rank_spec.rank}] "
            self._printer.add(ours[0], prefix, "stdout")
            stderr = self._printer.add(ours[1], prefix, "stderr")
        os.set_blocking(ours[-1], False)
        ending = Ending(rank_spec.rank, child.pid)
        self._ranks.append(_Running(rank_spec, child, os.pidfd_open(child.pid), ours[-1], stderr, ending))

    def _look(self, timeout_s: float | None) -> list[_Running]:
        """Waits for something to happen and takes note of it. Returns the ranks that have failed since the last look."""
        poll = select.poll()
        living = self._living
        for fd in [self._wake, *(one.pidfd for one in living), *(one.report_fd for one in living if one.report_fd >= 0)]:
            poll.register(fd, select.POLLIN)
        happened = {fd for fd, _ in poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1000)}
        if self._wake in happened:
            os.eventfd_read(self._wake)
        failed = []
        for one in living:
            knew = one.ending.failed
            if one.report_fd in happened:
                self._read_report(one)
            if one.pidfd in happened:
                self._reap(one)
            if one.ending.failed and not knew:
                failed.append(one)
        return failed

    def _read_report(self, one: _Running) -> None:
        """Takes in what there is of a report; once its writer has gone, the pipe is done with."""
        try:
            while data := os.read(one.report_fd, 65536):
                one.reported += data
        except BlockingIOError:
            pass
        else:
            os.close(one.report_fd)
            one.report_fd = -1
        one.ending.report = read_report(one.reported)

    def _reap(self, one: _Running) -> None:
        """Takes note of an end. Before the process is waited for, nobody else can have its number, or its group's."""
        if one.report_fd >= 0:
            self._read_report(one)
        if one.report_fd >= 0:  # what the rank has started holds the other end
            os.close(one.report_fd)
            one.report_fd = -1
        try:
            found = os.waitid(os.P_PIDFD, one.pidfd, os.WEXITED | os.WNOWAIT)
            if one.ending.asked or (found and found.si_status):
                os.killpg(one.child.pid, signal.SIGTERM)  # what it has started and left behind
        except OSError:  # it has left its group, or the program has waited for it: then its number is no longer its own
            pass
        one.ending.exitcode = one.child.reap()
        os.close(one.pidfd)
        one.pidfd = -1

    def _end(self, signals: Signals) -> None:
        """Ends all that live, in order."""
        self._look(0)
        begin = monotonic()
        for one in self._living:
            if one.ending.report is None:  # one that has reported is on its way out
                one.ending.asked = True
                signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
                signal.pidfd_send_signal(one.pidfd, signal.SIGCONT)  # it may have been stopped
        while self._living and (left := begin + self._grace_s - monotonic()) > 0:
            self._look(left)
            if signals.interrupted_since(begin + _DOUBLED_S):
                break
        for one in self._living:
            one.ending.killed = True
            signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        while self._living:
            self._look(None)


def start_forked(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Starts a rank that calls `fn(local_rank, *args)`, by a fork."""
    target = (rank_spec, ends, os.getpid(), fn, args)
    # the handle alone: what multiprocessing knows it would reap and wait for, whoever starts another process
    process = popen_fork.Popen(ForkProcess(target=_forked, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))

    def reap() -> int:
        code = process.wait()
        process.close()
        return code or 0

    return Child(process.pid, reap)


def _forked(rank_spec: RankSpec, ends: Ends, launcher_pid: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """What boot.py and exec do for others."""
    os.setpgid(0, 0)
    boot.bind(launcher_pid, rank_spec.cpus)
    for caught in SIGNALS:
        if callable(signal.getsignal(caught)):  # the launcher's
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # the launcher's may be something else by now
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # for the process's life
    faulthandler.disable()  # what the program has put in place of its handlers would stay, else
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(rank_spec.environ)
    threads = rank_spec.environ.get("OMP_NUM_THREADS", str(len(rank_spec.cpus)))
    if "torch" in sys.modules and threads.isdecimal() and int(threads):  # it has counted the launcher's processors
        sys.modules["torch"].set_num_threads(int(threads))
    in_rank.main(fn, args, rank_spec.local_rank, ends.report)


class _Pickled(popen_spawn_posix.Popen):
    """A process as multiprocessing pickles it for a start by spawn; `start_spawned` starts it."""

    _fds: list[int]  # what pickled arguments take along

    def _launch(self, process_obj: Any) -> None:
        self.job = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawning_tools.get_preparation_data(process_obj.name), self.job)
            reduction.dump(process_obj, self.job)
        except RuntimeError:  # a program that starts ranks while it is imported
            raise
        except Exception as error:
            raise TypeError(
                f"ranks started by spawn need a function and arguments that pickle takes: {type(error).__name__}: {error}. "
                "Define the function at module level, make in it what cannot travel, or use start_method='fork'"
            ) from error
        finally:
            set_spawning_popen(None)


def start_spawned(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Starts a rank that calls `fn(local_rank, *args)`, in an interpreter of its own.

    Raises:
        TypeError: pickle does not take `fn` or `args`.
    """
    target = (fn, args, rank_spec.local_rank, ends.report)
    pickled = _Pickled(SpawnProcess(target=in_rank.main, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))
    tracker_fd: Any = resource_tracker.getfd()
    job_end, own_end = os.pipe()
    command = spawning_tools.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
    try:
        process = booted(command, rank_spec, ends, [*pickled._fds, tracker_fd, job_end, ends.report])
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(job_end)
    try:
        with open(own_end, "wb", closefd=False) as file:
            file.write(pickled.job.getbuffer())
    except BrokenPipeError:  # it has died already, which is noticed elsewhere
        pass

    def reap() -> int:
        code = process.wait()
        os.close(own_end)  # by which multiprocessing knows in the rank that its parent lives
        return code

    return Child(process.pid, reap)


STARTS = {"spawn": start_spawned, "fork": start_forked}


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    *,
    start_method: str = "spawn",
    grace_s: float = GRACE_S,
    pin: bool = True,
    logs: str | Path | None = None,
) -> SpawnedRanks:
    """Runs `fn(local_rank, *args)` in one process per GPU, with torch.distributed's environment set in each.

    `torch.distributed.init_process_group()` needs no further word there, and a ShmLoader takes rank and world size by itself. Each
    rank has processors of its own, near its GPU; its loader's workers keep to them. What a rank prints comes out here with its rank
    before each line. The first rank to fail ends all. No rank outlives this process, however that ends. `shmload launch` does the
    same for scripts. See docs/launch.md.

    Args:
        fn: a function at the top of a module, unless processes are forked.
        args: what it is called with after the rank; pickled, unless processes are forked.
        nprocs: how many processes; None: one for each CUDA device that is visible, and one where there is none.
        join: wait for the end of all. Else they run on while the program does.
        start_method: "spawn", or "fork", which needs a process that has not used CUDA.
        grace_s: seconds that ranks have between SIGTERM and SIGKILL when the run is ended.
        pin: whether ranks get processors of their own: whole cores, all that this process may run on, by NUMA node. With fewer
            cores than ranks they share all.
        logs: a folder for one file a rank, `rank_0.log` and on, which its output is appended to instead.
    Returns:
        the ranks, with `pids()`, `join()` and `stop()`.
    Raises:
        RankFailed: a rank raised, exited with another code than 0 or was killed; the text has its traceback. The others have been
            ended.
        KeyboardInterrupt: ^C; the ranks have been ended in order. A SIGTERM or SIGHUP that this program has no handler for ends
            them likewise, and then this program.
        TypeError: pickle does not take `fn` or `args`; the text says what it refuses.
        RuntimeError: this is a daemonic process, which may have no children.
        ValueError: `nprocs` is less than 1, or there is no such start method.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn needs a process that may have children; this one is daemonic, as workers of pools and of data loaders are"
        )
    if start_method not in STARTS:
        raise ValueError(f"start_method is 'spawn' or 'fork'; got {start_method!r}")
    host = Host()
    num_ranks = number_of_ranks(nprocs, host)
    port = held_port()
    try:
        place = NodePlace(LOOPBACK, port.getsockname()[1], run_id=secrets.token_hex(8))
        start = partial(STARTS[start_method], fn, args)
        ranks = SpawnedRanks(start, rank_specs(place, num_ranks, host, pin=pin, logs=logs), grace_s, port)
    except BaseException:
        port.close()
        raise
    if not join:
        ranks.start()
        return ranks
    try:
        ranks.run()
    except Stopped as stopped:
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        os.kill(os.getpid(), stopped.number)
    return ranks
