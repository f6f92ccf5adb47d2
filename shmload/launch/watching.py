"""The ranks of one machine once they have been started, watched on pidfds by the thread that started them.

The first rank to fail ends all, as does a signal: SIGTERM, so long a grace, SIGKILL. A failure is an exit code, a signal, or an
exception that a rank's function has reported. What a rank has started itself is asked to end, too, by its process
group, once the rank has ended in such a run.

Signals to the launcher, kept until it looks: an exception out of a handler could come between a rank's start and its record.

What ranks print, brought out line by line with the rank's number before it.

One thread reads all pipes and writes whole lines, so lines of ranks do not mix, and the launcher goes on watching ranks while
whoever reads its output does not. A line ends at \n or \r (progress bars); one that is longer than a megabyte is cut there.

What is said when a rank has failed: which was the first and why, with its own words, then what became of the others.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import IO, Any

from shmload.launch.in_rank import RankReport, read_report
from shmload.launch.rank_specs import Child, RankSpec
from shmload.processes.exit_codes import describe_exit

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
        wake: called at each.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.caught: list[tuple[int, float]] = []  # that nobody has taken, and when they came
        self._before: dict[int, Any] = {}
        self._ignored_children = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # the first: not installed by Python
                    self._before[number] = before
            self.install()
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # with which the kernel keeps no exit codes
                self._ignored_children = True
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def install(self) -> None:
        """Takes the handlers' places, once more where somebody else has taken them since."""
        for number in self._before:
            signal.signal(number, self._catch)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._ignored_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _catch(self, number: int, frame: Any) -> None:
        self.caught.append((number, monotonic()))
        self._wake()

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

    Attributes:
        lost: why lines could not be written; None: they could, or their reader has gone.
    """

    def __init__(self, fd: int, prefix: str, stream: IO[Any] | None) -> None:
        self.fd = fd
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self._prefix = prefix.encode()
        self._stream = stream
        self._rest = b""
        self.lost: OSError | None = None
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
            except (BrokenPipeError, ValueError):  # its reader has gone, or it is closed; ranks go on
                self._stream = None
            except OSError as error:  # a full disk, which may have room for later lines
                self.lost = error


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
        lost: as of Pipe, of any that is closed.
    """

    def __init__(self) -> None:
        self.lost: OSError | None = None
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
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        if not self.thread.is_alive():
            for pipe in self._pipes.values():
                pipe.close()
                self.lost = self.lost or pipe.lost
            self._pipes.clear()
            os.close(self._wake)
            self._wake = -1

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


_BLAME_S = 0.1  # a signal to a rank may be one to all, the launcher's still on its way
_DOUBLED_S = 0.5  # a ^C later than that after the first is impatience; `timeout` and terminals send some twice at once
DRAIN_S = 2.0  # how long whoever reads the output may take when a run has failed
_LAST_NBYTES = 16384  # of a log


@dataclass
class RunningRank:
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


class RankWatch:
    """Ranks that have been started: takes note of their ends, and ends them in order.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.

    Attributes:
        ranks: as far as they have been started.
        printer: of what they print.
    """

    def __init__(self, grace_s: float) -> None:
        self.ranks: list[RunningRank] = []
        self.printer = Printer()
        self._grace_s = grace_s
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.RLock()  # nobody writes to what is being closed; a handler may come upon its own thread

    def wake(self) -> None:
        """Ends a look, from a handler of a signal or another thread."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float | None) -> None:
        """Brings out what is left of the output; all ranks have ended.

        Args:
            timeout_s: how long whoever reads the output may take; None: as long as it takes.
        """
        self.printer.finish(timeout_s)
        with self._waking:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def add(self, rank_spec: RankSpec, child: Child, stderr: Pipe | None, report_fd: int = -1) -> None:
        """Takes a rank in that has been started."""
        self.ranks.append(
            RunningRank(rank_spec, child, os.pidfd_open(child.pid), report_fd, stderr, Ending(rank_spec.rank, child.pid))
        )

    @property
    def living(self) -> list[RunningRank]:
        """Those that have not ended."""
        return [one for one in self.ranks if one.pidfd >= 0]

    @property
    def fates(self) -> list[str]:
        """What became of those that were asked to end."""
        return fates([one.ending for one in self.ranks], self._grace_s)

    def failure(self, failed: Sequence[RunningRank]) -> str:
        """The text of the error, once all have ended and their output is out.

        Args:
            failed: those that had failed at the first look that saw any.
        """
        endings = [one.ending for one in self.ranks]
        cause = first_to_fail([one.ending for one in failed])
        last = next(one for one in failed if one.ending is cause).last()
        return failure_text(cause, last, [ending for ending in endings if ending is not cause], len(endings), self._grace_s)

    def first_failed(self, signals: Signals, timeout_s: float | None) -> list[RunningRank]:
        """Looks once; those that have failed, unless it was of a signal that goes to the launcher, too."""
        failed = self.look(timeout_s)
        until = monotonic() + _BLAME_S * any(-(one.ending.exitcode or 0) in SIGNALS for one in failed)
        while not signals.caught and (left := until - monotonic()) > 0:
            self.look(left)
        return failed

    def look(self, timeout_s: float | None) -> list[RunningRank]:
        """Waits for something to happen and takes note of it. Returns the ranks that have failed since the last look."""
        poll = select.poll()
        living = self.living
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

    def _read_report(self, one: RunningRank) -> None:
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

    def _reap(self, one: RunningRank) -> None:
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

    def end(self, signals: Signals) -> None:
        """Ends all that live, in order."""
        self.look(0)
        begin = monotonic()
        for one in self.living:
            if one.ending.report is None:  # one that has reported is on its way out
                one.ending.asked = True
                signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
                signal.pidfd_send_signal(one.pidfd, signal.SIGCONT)  # it may have been stopped
        while self.living and (left := begin + self._grace_s - monotonic()) > 0:
            self.look(left)
            if signals.interrupted_since(begin + _DOUBLED_S):
                break
        for one in self.living:
            one.ending.killed = True
            signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        while self.living:
            self.look(None)
