"""The ranks of this machine: start them, watch them, and end them together."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Sequence

from shmload.errors import RankFailed
from shmload.launch.rank_specs import Ends, RankSpec, Start
from shmload.launch.signals import Signals, Stopped
from shmload.launch.watching import DRAIN_S, RankWatch, RunningRank

GRACE_S = 5.0  # time between SIGTERM and SIGKILL


class SpawnedRanks:
    """The ranks of this machine, as `spawn(..., join=False)` returns them.

    A thread of the program watches them while the program continues. They end with the program: in order if it exits, at once if it
    is killed.

    Args:
        start: function that starts the process of one rank.
        rank_specs: the ranks to start.
        grace_s: seconds between SIGTERM and SIGKILL.
        port: the socket that reserves the meeting port, closed when all ranks have ended; None if another machine reserves it.
    """

    def __init__(self, start: Start, rank_specs: Sequence[RankSpec], grace_s: float, port: socket.socket | None) -> None:
        self._watch = RankWatch(grace_s)
        self._start_one = start
        self._rank_specs = rank_specs
        self._port = port
        self._asked = False
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def pids(self) -> list[int]:
        """Return the process ids of the ranks started so far, by local rank."""
        return [one.child.pid for one in self._watch.ranks]

    @property
    def lost(self) -> OSError | None:
        """Return the error because of which some output could not be written; None if there was none. Final after the run."""
        return self._watch.printer.lost

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for all ranks to end. Return whether they have.

        Args:
            timeout_s: seconds to wait, or None to wait without limit.

        Raises:
            RankFailed: a rank failed, and the others were ended.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End all ranks (SIGTERM, the grace period, SIGKILL) and wait for it. `join` still raises an earlier failure."""
        self._asked = True
        self._watch.wake()
        if self._thread is not None:
            self._thread.join()

    def start(self) -> None:
        """Call `run` in a thread, and return when all ranks have been started. If one could not be started, raise its error."""
        atexit.register(self.stop)
        self._thread = threading.Thread(target=self._run_apart, name="shmload launcher", daemon=True)
        self._thread.start()
        self._started.wait()
        if len(self._watch.ranks) < len(self._rank_specs):  # a rank could not be started
            self.join()

    def _run_apart(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self.stop)

    def run(self) -> None:
        """Start all ranks in this thread, watch them, and return when all have ended.

        Raises:
            RankFailed: a rank failed.
            Stopped: a signal arrived that the program does not handle itself.
        """
        failed: list[RunningRank] = []
        number = 0
        ended = False
        try:
            with Signals(self._watch.wake) as signals:
                try:
                    for rank_spec in self._rank_specs:
                        if not signals.caught and not self._asked:
                            self._begin(rank_spec)
                    self._watch.printer.thread.start()
                    self._started.set()
                    while self._watch.living and not failed and not number and not self._asked:
                        failed = self._watch.first_failed(signals, None)
                        number = signals.take()
                    ended = not self._watch.living
                    number = number or signals.take()  # a signal that came before the first rank
                finally:
                    self._watch.end(signals)
        finally:
            self._started.set()
            self._watch.close(None if ended and not failed else DRAIN_S)
            if self._port is not None:
                self._port.close()
        if number:
            raise Stopped(number, "; ".join([f"stopped by {signal.Signals(number).name}", *self._watch.fates]))
        if failed:
            raise RankFailed(self._watch.failure(failed))

    def _begin(self, rank_spec: RankSpec) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        log_begin = 0
        try:
            if rank_spec.log:
                theirs.append(os.open(rank_spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))
                log_begin = os.fstat(theirs[0]).st_size
            for _ in range(1 if rank_spec.log else 3):  # for the report; without a log, also for stdout and stderr
                own, given = os.pipe()
                ours.append(own)
                theirs.append(given)
            *outputs, report = theirs
            child = self._start_one(rank_spec, Ends(outputs[0], outputs[-1], report))  # a log is for both outputs
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
            self._watch.printer.add(ours[0], prefix, "stdout")
            stderr = self._watch.printer.add(ours[1], prefix, "stderr")
        os.set_blocking(ours[-1], False)
        self._watch.add(rank_spec, child, stderr, ours[-1], log_begin=log_begin)
