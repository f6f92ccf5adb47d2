"""The ranks of one machine from their start to their end, watched on pidfds by the thread that started them.

The first rank to fail ends all, as does a signal: SIGTERM, so long a grace, SIGKILL. A failure is an exit code, a signal, or an
exception that a rank's function has reported. What a rank has started itself is told to end, too, once the rank has ended in such a
run, by its process group.

Signals to the launcher, kept until it looks: an exception out of a handler could come between a rank's start and its record.

What ranks print, brought out line by line with the rank's number before it.

One thread reads all pipes and writes whole lines, so lines of ranks do not mix, and the launcher goes on watching ranks while
whoever reads its output does not. A line ends at \n or \r (progress bars); one that is longer than a megabyte is cut there.

What is said when a rank has failed: which was the first and why, with its own words, then what became of the others.

`shmload.spawn`: a function in one process per GPU.

A rank as a function: `shmload.spawn`. Processes are multiprocessing's: what it shares (queues, locks, tensors) can be given.

Its `spawn` is taken in one step to a process that begins as a rank (boot.py) and whose output is caught from its first line, which
multiprocessing has no argument for: `_Popen` is its own `_launch` with that other start. `fork` has no first line to catch.
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
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, util
from multiprocessing import spawn as spawning_tools
from multiprocessing.context import ForkProcess, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any, Literal, overload

from shmload.errors import RankFailed
from shmload.launch import boot, in_rank
from shmload.launch.in_rank import RankReport, read_report
from shmload.launch.ranks import LOOPBACK, Child, Ends, HeldPort, NodePlace, RankSpec, Spawner, booted, number_of_ranks, rank_specs
from shmload.shm.names import Host
from shmload.worker.failure import describe_exit

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
        self._caught: list[tuple[int, float]] = []
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
        self._caught.append((number, monotonic()))
        os.eventfd_write(self._wake, 1)

    @property
    def any_caught(self) -> bool:
        """Whether one waits to be taken."""
        return bool(self._caught)

    def interrupted_since(self, time_s: float) -> bool:
        """Whether there has been a ^C that nobody has taken, after a time of the monotonic clock."""
        return any(number == signal.SIGINT and caught_s > time_s for number, caught_s in self._caught)

    def take(self) -> int:
        """The number of a signal that is to end the run; 0: none is. Calls the program's own handlers."""
        while self._caught:
            number, _ = self._caught.pop(0)
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
    """The thread that brings out what all ranks print."""

    def __init__(self) -> None:
        self._pipes: dict[int, Pipe] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="shmload output", daemon=True)

    def add(self, fd: int, prefix: str, name: str) -> Pipe:
        """Takes over the reading end of a pipe; before `start`.

        Args:
            name: of the stream in `sys` that it goes to.
        """
        pipe = self._pipes[fd] = Pipe(fd, prefix, getattr(sys, name))
        return pipe

    def start(self) -> None:
        """Starts reading."""
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> None:
        """Brings out what is there and ends; all ranks have ended. What others hold the pipes for is not waited for.

        Args:
            timeout_s: how long to wait for whoever reads the output; None: as long as it takes.
        """
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
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


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        exitcode: negative: a signal's number; None: it has reported an exception and still lives.
        report: what its function has raised.
        told: it had been told to end.
        killed: it did not, and was killed.
    """

    rank: int
    pid: int
    exitcode: int | None
    report: RankReport | None = None
    told: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.told and (self.report is not None or self.exitcode not in (0, None))

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
    parts = [f"{first}, the first of {num_ranks} to fail.{_hint(first)}"]
    if first.report is not None:
        parts.append(first.report.traceback.rstrip())
    elif found := words_of(last):
        parts.append(f"It wrote last to stderr:\n{found}")
    told = [*(f"then {other}" for other in others if other.failed), *fates(others, grace_s)]
    if told:
        parts.append("\n".join(told))
    return "\n\n".join(parts)


def fates(endings: Sequence[Ending], grace_s: float) -> list[str]:
    """What became of ranks that were told to end, a line each; nothing of those that ended by themselves."""
    told = []
    if ended := [ending.rank for ending in endings if ending.told and not ending.killed]:
        told.append(f"{_ranks(ended)} ended when told to (SIGTERM)")
    if killed := [ending.rank for ending in endings if ending.told and ending.killed]:
        told.append(f"{_ranks(killed)} did not end within {grace_s:g} s of SIGTERM and had to be killed (SIGKILL)")
    return told


def words_of(last: str) -> str:
    """The last traceback in a text, with its causes and what follows it; else its last lines."""
    lines = _TORCHS_PREFIX.sub("", last.rstrip()).splitlines()
    begins = [
        number
        for number, line in enumerate(lines)
        if line.startswith(_BEGINS) and not lines[max(number - 2, 0)].startswith(_GOES_ON)
    ]
    return "\n".join(lines[begins[-1] if begins else -_LAST :])


def _hint(ending: Ending) -> str:
    if ending.exitcode == -signal.SIGKILL:
        return " If nobody killed it, the kernel did for want of memory: see dmesg, or memory.events of its cgroup."
    return ""


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


GRACE_S = 5.0  # from SIGTERM to SIGKILL
_DOUBLED_S = 0.5  # a ^C later than that after the first is impatience; `timeout` and terminals send some twice at once
_BLAME_S = 0.1  # a signal to a rank may be one to all, the launcher's still on its way
_DRAIN_S = 2.0  # how long whoever reads the output may take when a run has failed
_LAST_NBYTES = 16384  # of a log


@dataclass
class _Sitting:
    """One rank's process."""

    rank_spec: RankSpec
    child: Child
    pidfd: int
    report_fd: int
    stderr: Pipe | None
    reported: bytes = b""
    report: RankReport | None = None
    exitcode: int | None = None
    told: bool = False
    killed: bool = False

    def ending(self) -> Ending:
        """What is known of its end by now."""
        return Ending(
            rank=self.rank_spec.rank,
            pid=self.child.pid,
            exitcode=self.exitcode,
            report=self.report,
            told=self.told,
            killed=self.killed,
        )

    def last(self) -> str:
        """What it wrote last to stderr, or to its log; once nothing is written any more."""
        if self.stderr is not None:
            return b"".join(self.stderr.tail).decode(errors="replace")
        with open(self.rank_spec.log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_NBYTES, 0))
            return file.read().decode(errors="replace")


class Ranks:
    """All ranks of this machine.

    Args:
        way: how their processes are started.
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, way: Spawner, rank_specs: Sequence[RankSpec], grace_s: float = GRACE_S) -> None:
        self._way = way
        self._rank_specs = rank_specs
        self._grace_s = grace_s
        self._sittings: list[_Sitting] = []
        self._living: dict[int, _Sitting] = {}  # by pidfd
        self._reporting: dict[int, _Sitting] = {}  # by report_fd
        self._printer = Printer()
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._waking = threading.Lock()  # no other thread writes to what is being closed
        self._asked = False
        self.started = threading.Event()

    @property
    def pids(self) -> list[int]:
        """Of the processes by local rank, as far as they have been started."""
        return [sitting.child.pid for sitting in self._sittings]

    def ask_to_stop(self) -> None:
        """Lets `run`, in another thread, end all ranks and return."""
        self._asked = True
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Starts all ranks and returns when all have ended.

        Raises:
            RankFailed: one has failed.
            Stopped: a signal has come for which the program has no handler of its own.
        """
        failed: list[_Sitting] = []
        number = 0
        ended = False
        try:
            with Signals(self._wake) as signals:
                try:
                    self._start(signals)
                    failed, number = self._watch(signals)
                    ended = not self._living
                finally:
                    self._end(signals)
        finally:
            self.started.set()
            self._printer.finish(None if ended and not failed else _DRAIN_S)
            self._close()
        if number:
            told = fates([sitting.ending() for sitting in self._sittings], self._grace_s)
            raise Stopped(number, "; ".join([f"stopped by {signal.Signals(number).name}", *told]))
        if failed:
            raise RankFailed(self._told_of(failed))

    def _told_of(self, failed: Sequence[_Sitting]) -> str:
        cause = first_to_fail([sitting.ending() for sitting in failed]).rank
        first = next(sitting for sitting in failed if sitting.rank_spec.rank == cause)
        others = [sitting.ending() for sitting in self._sittings if sitting is not first]
        return failure_text(first.ending(), first.last(), others, len(self._rank_specs), self._grace_s)

    def _start(self, signals: Signals) -> None:
        for rank_spec in self._rank_specs:
            if not signals.any_caught and not self._asked:
                self._sit(rank_spec)
        self._printer.start()
        self.started.set()

    def _sit(self, rank_spec: RankSpec) -> None:
        ours: list[int] = []
        theirs: list[int] = []

        def pipe() -> int:
            """A pipe's end for the rank; ours is the last of `ours`."""
            own, given = os.pipe()
            ours.append(own)
            theirs.append(given)
            return given

        try:
            if rank_spec.log:
                log = os.open(rank_spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                theirs.append(log)
                ends = Ends(log, log, pipe())
            else:
                ends = Ends(pipe(), pipe(), pipe())
            child = self._way.start(rank_spec, ends)
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
        sitting = _Sitting(rank_spec, child, os.pidfd_open(child.pid), ours[-1], stderr)
        os.set_blocking(sitting.report_fd, False)
        self._sittings.append(sitting)
        self._living[sitting.pidfd] = self._reporting[sitting.report_fd] = sitting
        for fd in (sitting.pidfd, sitting.report_fd):
            self._poll.register(fd, select.POLLIN)

    def _watch(self, signals: Signals) -> tuple[list[_Sitting], int]:
        """Waits for the end: (who failed at the same look, the signal that ended the run)."""
        failed: list[_Sitting] = []
        while self._living and not self._asked:
            if number := signals.take():
                return [], number
            if failed:
                break
            failed = self._look(None)
            if any(-(sitting.exitcode or 0) in SIGNALS for sitting in failed):
                until = monotonic() + _BLAME_S
                while not signals.any_caught and (left := until - monotonic()) > 0:
                    self._look(left)
        return failed, signals.take()

    def _look(self, timeout_s: float | None) -> list[_Sitting]:
        """Waits for something to happen and takes note of it. Returns the ranks that have failed since the last look."""
        happened = {fd for fd, _ in self._poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1000)}
        if self._wake in happened:
            os.eventfd_read(self._wake)
        failed = []
        for fd in happened & self._reporting.keys():
            sitting = self._reporting[fd]
            self._read_report(sitting)
            if sitting.report is not None and not sitting.told:
                failed.append(sitting)
        for fd in happened & self._living.keys():
            sitting = self._living[fd]
            knew = sitting.report is not None
            self._reap(sitting)
            if not knew and sitting.ending().failed:
                failed.append(sitting)
        return failed

    def _read_report(self, sitting: _Sitting) -> None:
        """Takes in what there is of a report; once it is whole, or its writer has gone, the pipe is done with."""
        try:
            while data := os.read(sitting.report_fd, 65536):
                sitting.reported += data
        except BlockingIOError:
            pass
        else:
            self._forget_report(sitting)
        sitting.report = read_report(sitting.reported)

    def _forget_report(self, sitting: _Sitting) -> None:
        if self._reporting.pop(sitting.report_fd, None) is not None:
            self._poll.unregister(sitting.report_fd)
            os.close(sitting.report_fd)

    def _reap(self, sitting: _Sitting) -> None:
        """Takes note of an end. Before the process is waited for, nobody else can have its number, or its group's."""
        if sitting.report_fd in self._reporting:
            self._read_report(sitting)
            self._forget_report(sitting)
        try:
            found = os.waitid(os.P_PIDFD, sitting.pidfd, os.WEXITED | os.WNOWAIT)
            if sitting.told or (found and found.si_status):
                os.killpg(sitting.child.pid, signal.SIGTERM)  # what it has started and left behind
        except OSError:  # it has left its group, or the program has waited for it: then its number is no longer its own
            pass
        sitting.exitcode = sitting.child.reap()
        del self._living[sitting.pidfd]
        self._poll.unregister(sitting.pidfd)
        os.close(sitting.pidfd)

    def _end(self, signals: Signals) -> None:
        """Ends all that live, in order."""
        self._look(0)
        begin = monotonic()
        for sitting in self._living.values():
            if sitting.report is None:  # one that has reported is on its way out
                sitting.told = True
                signal.pidfd_send_signal(sitting.pidfd, signal.SIGTERM)
                signal.pidfd_send_signal(sitting.pidfd, signal.SIGCONT)  # it may have been stopped
        while self._living and (left := begin + self._grace_s - monotonic()) > 0:
            self._look(left)
            if signals.interrupted_since(begin + _DOUBLED_S):
                break
        for sitting in self._living.values():
            sitting.killed = True
            signal.pidfd_send_signal(sitting.pidfd, signal.SIGKILL)
        while self._living:
            self._look(None)

    def _close(self) -> None:
        with self._waking:
            os.close(self._wake)
            self._wake = -1


WAYS = ("spawn", "fork")


class Function:
    """Calls `fn(local_rank, *args)` in each rank."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], start_method: str) -> None:
        if start_method not in WAYS:
            raise ValueError(f"start_method is 'spawn' or 'fork'; got {start_method!r}")
        self._fn = fn
        self._args = args
        self._forks = start_method == "fork"

    def start(self, rank_spec: RankSpec, ends: Ends) -> Child:
        """Starts the process of a rank.

        Raises:
            TypeError: pickle does not take `fn` or `args`.
        """
        name = f"shmload rank {rank_spec.rank}"
        process: BaseProcess
        if self._forks:
            process = ForkProcess(
                target=_forked, args=(rank_spec, ends, os.getpid(), self._fn, self._args), name=name, daemon=False
            )
        else:
            process = _Process(
                target=in_rank.main, args=(self._fn, self._args, rank_spec.local_rank, ends.report), name=name, daemon=False
            )
            process.place = (rank_spec, ends)
        process.start()
        # else whoever starts another process, in any thread, might reap this one, and at exit all would be waited for
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private
        return Child(process.pid or 0, lambda: _reaped(process))


def _reaped(process: BaseProcess) -> int:
    process.join()
    code = process.exitcode
    process.close()
    return code if code is not None else 0


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


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


class _Process(SpawnProcess):
    place: tuple[RankSpec, Ends]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "place"}


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a process that `booted` starts."""

    _fds: list[int]  # what pickled arguments take along

    def _launch(self, process_obj: Any) -> None:
        rank_spec, ends = process_obj.place
        tracker_fd = resource_tracker.getfd()
        told = self._pickled(process_obj)
        job_end, own_end = os.pipe()
        keep = [*self._fds, tracker_fd, job_end, ends.report]
        command = spawning_tools.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
        try:
            self._process = booted(command, rank_spec, ends, keep)
        except BaseException:
            os.close(own_end)
            raise
        finally:
            os.close(job_end)
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        # the child takes the launcher for dead once this pipe has closed
        self.finalizer = util.Finalize(self, _close, (own_end, self.sentinel))
        try:
            with open(own_end, "wb", closefd=False) as file:
                file.write(told)
        except BrokenPipeError:  # it has died already, which is noticed elsewhere
            pass

    def _pickled(self, process_obj: Any) -> memoryview:
        told = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawning_tools.get_preparation_data(process_obj.name), told)
            reduction.dump(process_obj, told)
        except RuntimeError:  # a program that starts ranks while it is imported
            raise
        except Exception as error:
            raise TypeError(
                f"ranks started by spawn need a function and arguments that pickle takes: {type(error).__name__}: {error}. "
                "Define the function at module level, make in it what cannot travel, or use start_method='fork'"
            ) from error
        finally:
            set_spawning_popen(None)
        return told.getbuffer()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; negative: a signal's number; None: it lives."""
        return self._process.poll() if flag == os.WNOHANG else self._process.wait()


class SpawnedRanks:
    """Ranks that run while the program goes on: what `spawn(..., join=False)` gives.

    A thread of the program watches them. They end with the program: in order if it ends by itself, at once if it is killed.
    """

    def __init__(self, ranks: Ranks, port: HeldPort) -> None:
        self._ranks = ranks
        self._port = port
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shmload launcher", daemon=True)
        self._thread.start()
        self._ranks.started.wait()
        _running.add(self)

    def _run(self) -> None:
        try:
            self._ranks.run()
        except BaseException as error:
            self._error = error
        finally:
            self._port.close()

    def pids(self) -> list[int]:
        """The processes' ids by local rank."""
        return self._ranks.pids

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for all ranks to end. Returns whether they have.

        Args:
            timeout_s: how long to wait; None: as long as it takes.

        Raises:
            RankFailed: one has failed, and the others have been ended.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Ends all ranks in order: SIGTERM, the grace, SIGKILL. What they had failed of before is for `join` to tell."""
        self._ranks.ask_to_stop()
        self._thread.join()


_running: weakref.WeakSet[SpawnedRanks] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """multiprocessing would wait for them."""
    for ranks in list(_running):
        ranks.stop()


def _forget() -> None:
    _running.clear()


os.register_at_fork(after_in_child=_forget)


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = ...,
    nprocs: int | None = ...,
    join: Literal[True] = ...,
    *,
    start_method: str = ...,
    grace_s: float = ...,
    pin: bool = ...,
    logs: str | Path | None = ...,
) -> None: ...
@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = ...,
    nprocs: int | None = ...,
    *,
    join: Literal[False],
    start_method: str = ...,
    grace_s: float = ...,
    pin: bool = ...,
    logs: str | Path | None = ...,
) -> SpawnedRanks: ...
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
) -> SpawnedRanks | None:
    """Runs `fn(local_rank, *args)` in one process per GPU, with torch.distributed's environment set in each.

    `torch.distributed.init_process_group()` needs no further word there, and a ShmLoader takes rank and world size by itself. Each
    rank has processors of its own, near its GPU; its loader's workers keep to them. What a rank prints comes out here with its rank
    before each line. The first rank to fail ends all. No rank outlives this process, however that ends. `shmload launch` does the
    same for scripts. See docs/launch.md.

    Args:
        fn: a function at the top of a module, unless processes are forked.
        args: what it is called with after the rank; pickled, unless processes are forked.
        nprocs: how many processes; None: one for each CUDA device that is visible, and one where there is none.
        join: wait for the end of all. Else `SpawnedRanks` is returned, with `pids()`, `join()` and `stop()`.
        start_method: "spawn", or "fork", which needs a process that has not used CUDA.
        grace_s: seconds that ranks have between SIGTERM and SIGKILL when the run is ended.
        pin: whether ranks get processors of their own: whole cores, all that this process may run on, by NUMA node. With fewer
            cores than ranks they share all.
        logs: a folder for one file a rank, `rank_0.log` and on, which its output is appended to instead.
    Returns:
        nothing, or with `join=False` what to wait for.
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
    way = Function(fn, args, start_method)
    host = Host()
    num_ranks = number_of_ranks(nprocs, host)
    port = HeldPort()
    try:
        place = NodePlace(LOOPBACK, port.number, run_id=secrets.token_hex(8))
        ranks = Ranks(way, rank_specs(place, num_ranks, host, pin=pin, logs=logs), grace_s)
    except BaseException:
        port.close()
        raise
    if not join:
        spawned = SpawnedRanks(ranks, port)
        if len(spawned.pids()) < num_ranks:  # one could not be started
            spawned.join()
        return spawned
    try:
        ranks.run()
    except Stopped as stopped:
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        os.kill(os.getpid(), stopped.number)
    finally:
        port.close()
    return None
