"""Watch the ranks of one machine, in the thread that started them, and end them in order.

When one rank fails, or the launcher gets a signal, all ranks are ended: by SIGTERM, and after the grace period by SIGKILL. A rank
fails by an exit code, a signal, or an exception that its function has reported. When a rank fails or is ended, the processes that
it has started are also sent SIGTERM, by its process group.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from shmload.launch.in_rank import read_report
from shmload.launch.output import Pipe, Printer
from shmload.launch.rank_failure import Ending, failure_text, fates, first_to_fail
from shmload.launch.rank_specs import RankSpec
from shmload.launch.signals import SIGNALS, Signals
from shmload.processes.child import Child, Children

_BLAME_S = 0.1  # after a rank was killed by a signal, time in which the launcher may get the same signal, if it was sent to all
_DOUBLED_S = 0.5  # a second ^C counts only after this time, because `timeout` and terminals send some ^C twice at once
DRAIN_S = 2.0  # longest time to wait for the reader of the output after a failure
_LAST_NBYTES = 16384  # bytes at the end of a log that are searched for a traceback


@dataclass
class RunningRank:
    """A rank that was started.

    Attributes:
        rank_spec: the settings with which it was started.
        child: the process.
        report_fd: the pipe for its report; -1 once the report is complete or cannot come any more.
        stderr: the pipe from its stderr, or None if it writes to a log.
        ending: how it ended, kept up to date.
        log_begin: size of its log when it was started, in bytes, because earlier runs have written to it.
        reported: the part of its report read so far.
    """

    rank_spec: RankSpec
    child: Child
    report_fd: int
    stderr: Pipe | None
    ending: Ending
    log_begin: int = 0
    reported: bytes = b""

    def last(self) -> str:
        """Return the end of its stderr or of its log. Call this after it has ended."""
        if self.stderr is not None:
            return b"".join(self.stderr.tail).decode(errors="replace")
        with open(self.rank_spec.log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_NBYTES, self.log_begin))
            return file.read().decode(errors="replace")


class RankWatch:
    """The started ranks of this machine, and the means to watch and end them. Use it in the thread that starts them.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.

    Attributes:
        ranks: the ranks started so far.
        printer: the thread that prints their output; the caller starts it after the last `add`.
    """

    def __init__(self, grace_s: float) -> None:
        self.ranks: list[RunningRank] = []
        self.printer = Printer()
        self._grace_s = grace_s
        self._children: Children[Child] = Children()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._children.watch(self._wake)
        self._waking = threading.RLock()  # no write to a closed descriptor; a signal handler may interrupt its own thread

    def wake(self) -> None:
        """Make a running `look` return. May be called from a signal handler or another thread."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float | None) -> None:
        """Print the rest of the output, and release the descriptors. Call this when all ranks have ended. Idempotent.

        Args:
            timeout_s: seconds to wait for the reader of the output, or None to wait without limit.
        """
        self.printer.finish(timeout_s)
        with self._waking:
            if self._wake >= 0:
                self._children.unwatch(self._wake)
                os.close(self._wake)
                self._wake = -1

    def add(self, rank_spec: RankSpec, child: Child, stderr: Pipe | None, report_fd: int = -1, *, log_begin: int = 0) -> None:
        """Watch a started rank.

        Args:
            rank_spec: the settings with which it was started.
            child: its process.
            stderr: the pipe from its stderr, or None if it writes to a log.
            report_fd: the reading end of the pipe for its report, or -1.
            log_begin: size of its log when it was started, in bytes.
        """
        self.ranks.append(RunningRank(rank_spec, child, report_fd, stderr, Ending(rank_spec.rank, child.pid), log_begin))
        self._children.add(child)
        if report_fd >= 0:
            self._children.watch(report_fd)

    @property
    def living(self) -> list[RunningRank]:
        """Return the ranks that have not been found to have ended."""
        return [one for one in self.ranks if one.child.exit_code is None]

    @property
    def fates(self) -> list[str]:
        """Return lines that describe how the ranks that were asked to end have ended."""
        return fates([one.ending for one in self.ranks], self._grace_s)

    def failure(self, failed: Sequence[RunningRank]) -> str:
        """Return the text of the error, once all ranks have ended and their output is printed.

        Args:
            failed: the result of the first `look` or `first_failed` that was not empty.
        """
        endings = [one.ending for one in self.ranks]
        cause = first_to_fail([one.ending for one in failed])
        last = next(one for one in failed if one.ending is cause).last()
        return failure_text(cause, last, [ending for ending in endings if ending is not cause], len(endings), self._grace_s)

    def first_failed(self, signals: Signals, timeout_s: float | None) -> list[RunningRank]:
        """Call `look` once, and return the ranks that have failed. If one was killed by a signal, wait briefly for the launcher's.

        Args:
            signals: signals to the launcher.
            timeout_s: seconds to wait for something to happen, or None to wait without limit.
        """
        failed = self.look(timeout_s)
        until = monotonic() + _BLAME_S * any(-(one.ending.exitcode or 0) in SIGNALS for one in failed)
        while not signals.caught and (left := until - monotonic()) > 0:
            self.look(left)
        return failed

    def look(self, timeout_s: float | None) -> list[RunningRank]:
        """Wait for an event and record it. Return the ranks that have failed since the last call.

        Args:
            timeout_s: seconds to wait, or None to wait without limit.
        """
        ended, happened = self._children.wait(timeout_s)
        if self._wake in happened:
            os.eventfd_read(self._wake)
        failed = []
        for one in self.living:
            knew = one.ending.failed
            if one.report_fd in happened:
                self._read_report(one)
            if one.child in ended:
                self._reap(one)
            if one.ending.failed and not knew:
                failed.append(one)
        return failed

    def _read_report(self, one: RunningRank) -> None:
        """Read the available part of a report, and close the pipe if its writer has closed it."""
        try:
            while data := os.read(one.report_fd, 65536):
                one.reported += data
        except BlockingIOError:
            pass
        else:
            self._close_report(one)
        one.ending.report = read_report(one.reported)

    def _close_report(self, one: RunningRank) -> None:
        self._children.unwatch(one.report_fd)
        os.close(one.report_fd)
        one.report_fd = -1

    def _reap(self, one: RunningRank) -> None:
        """Record how a rank ended, and end the processes that it has started if it failed or was asked to end.

        The process group is signaled before the exit code is collected, because the id of the group may be reused afterward.
        """
        if one.report_fd >= 0:
            self._read_report(one)
        if one.report_fd >= 0:  # a process that the rank has started holds the other end
            self._close_report(one)
        try:
            found = os.waitid(os.P_PIDFD, one.child.pidfd, os.WEXITED | os.WNOWAIT)
            if one.ending.asked or (found and found.si_status):
                os.killpg(one.child.pid, signal.SIGTERM)
        except OSError:  # it left its group, or the program has collected its exit code, and its id may be reused
            pass
        one.ending.exitcode = self._children.reap(one.child)

    def end(self, signals: Signals) -> None:
        """End all ranks that still run: SIGTERM, the grace period, SIGKILL.

        Args:
            signals: signals to the launcher; a second ^C ends the grace period.
        """
        self.look(0)
        begin = monotonic()
        for one in self.living:
            if one.ending.report is None:  # a rank that has reported is about to end
                one.ending.asked = True
                one.child.ask_to_end()
        killed = self._children.end(self._grace_s, self.look, is_enough=lambda: signals.interrupted_since(begin + _DOUBLED_S))
        for one in self.ranks:
            one.ending.killed = one.ending.killed or one.child in killed
