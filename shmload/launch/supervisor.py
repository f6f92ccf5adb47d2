"""The ranks of one machine from their start to their end, watched on pidfds by the thread that started them.

The first rank to fail ends all, as does a signal: SIGTERM, so long a grace, SIGKILL. A failure is an exit code, a signal, or an
exception that a rank's function has reported. What a rank has started itself is told to end, too, once the rank has ended in such a
run, by its process group.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from shmload.errors import RankFailed
from shmload.launch.failure import Ending, failure_text, fates, first_to_fail
from shmload.launch.in_rank import Report, read_report
from shmload.launch.output import Pipe, Printer
from shmload.launch.seat import Child, Ends, Seat, Way
from shmload.launch.signals import SIGNALS, Signals, Stopped

GRACE_S = 5.0  # from SIGTERM to SIGKILL
_DOUBLED_S = 0.5  # a ^C later than that after the first is impatience; `timeout` and terminals send some twice at once
_BLAME_S = 0.1  # a signal to a rank may be one to all, the launcher's still on its way
_DRAIN_S = 2.0  # how long whoever reads the output may take when a run has failed
_LAST_NBYTES = 16384  # of a log


@dataclass
class _Sitting:
    """One rank's process."""

    seat: Seat
    child: Child
    pidfd: int
    report_fd: int
    stderr: Pipe | None
    reported: bytes = b""
    report: Report | None = None
    exitcode: int | None = None
    told: bool = False
    killed: bool = False

    def ending(self) -> Ending:
        """What is known of its end by now."""
        return Ending(
            rank=self.seat.rank,
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
        with open(self.seat.log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_NBYTES, 0))
            return file.read().decode(errors="replace")


class Ranks:
    """All ranks of this machine.

    Args:
        way: how their processes are started.
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, way: Way, seats: Sequence[Seat], grace_s: float = GRACE_S) -> None:
        self._way = way
        self._seats = seats
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
        first = next(sitting for sitting in failed if sitting.seat.rank == cause)
        others = [sitting.ending() for sitting in self._sittings if sitting is not first]
        return failure_text(first.ending(), first.last(), others, len(self._seats), self._grace_s)

    def _start(self, signals: Signals) -> None:
        for seat in self._seats:
            if not signals.any_caught and not self._asked:
                self._sit(seat)
        self._printer.start()
        self.started.set()

    def _sit(self, seat: Seat) -> None:
        ours: list[int] = []
        theirs: list[int] = []

        def pipe() -> int:
            """A pipe's end for the rank; ours is the last of `ours`."""
            own, given = os.pipe()
            ours.append(own)
            theirs.append(given)
            return given

        try:
            if seat.log:
                log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                theirs.append(log)
                ends = Ends(log, log, pipe())
            else:
                ends = Ends(pipe(), pipe(), pipe())
            child = self._way.start(seat, ends)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        stderr = None
        if not seat.log:
            prefix = f"[rank {seat.rank}] "
            self._printer.add(ours[0], prefix, "stdout")
            stderr = self._printer.add(ours[1], prefix, "stderr")
        sitting = _Sitting(seat, child, os.pidfd_open(child.pid), ours[-1], stderr)
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
            self._bury(sitting)
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

    def _bury(self, sitting: _Sitting) -> None:
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
        sitting.exitcode = sitting.child.bury()
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
