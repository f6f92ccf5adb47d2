"""Watch, end and reap child processes by their pidfds, and get their exit codes.

A pidfd refers to one process for good, so no signal can reach another process that got the same id. Three things may happen between
the start of a process and the first check of it, and all of them are handled here:

* the process has ended already, and the kernel keeps no exit code: the program ignores SIGCHLD, or waits for all of its children
* another part of the program collects the exit code first
* no descriptor is left: the process is killed, because a process that cannot be watched must not run
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Generic, TypeVar

from shmload.processes.exit_codes import UNKNOWN_EXIT
from shmload.processes.interrupts import interrupts_held


class Child:
    """A started process.

    Args:
        pid: its process id.
        collect: function that waits for the ended process and returns its exit code. If None, the code is collected by the pidfd,
            which works for any child of this process.

    Attributes:
        pid: its process id.
        pidfd: a descriptor that is readable once the process has ended; -1 after `reap`.
        exit_code: negative for a signal, UNKNOWN_EXIT if another part of the program has collected it; None before `wait`.

    Raises:
        OSError: no descriptor is left, and the process was killed.
    """

    def __init__(self, pid: int, collect: Callable[[], int] | None = None) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._collect = collect or self._wait
        try:
            self.pidfd = _pidfd(pid)
        except OSError:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.pidfd = -1
            self._collect()
            raise

    @property
    def lives(self) -> bool:
        """Return whether the process is still running."""
        return self.pidfd >= 0 and not has_ended(self.pidfd)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended.

        Args:
            number: the signal.
        """
        send(self.pidfd, number)

    def ask_to_end(self) -> None:
        """Send SIGTERM, and SIGCONT in case the process is stopped."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def kill(self) -> int:
        """End the process at once, and return its exit code. Its pidfd stays readable until `reap`."""
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        if self.exit_code is None:
            has_ended(self.pidfd, None)
            self.exit_code = self._collect()
        return self.exit_code

    def reap(self) -> int:
        """Wait until the process has ended, close its pidfd, and return its exit code. Idempotent."""
        code = self.wait()
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)
        return code

    def _wait(self) -> int:
        try:
            if self.pidfd < 0:
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        except OSError:  # not, or no longer, a child of this process
            return UNKNOWN_EXIT
        if found is None:
            return UNKNOWN_EXIT
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _pidfd(pid: int) -> int:
    """Return the process's pidfd, or a descriptor that is readable at once if the process has ended and its id is free."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.close(writer)
        return reader


def send(pidfd: int, number: int) -> None:
    """Send a signal to a process, unless it has ended.

    Args:
        pidfd: the process.
        number: the signal.
    """
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, number)


def has_ended(pidfd: int, timeout_s: float | None = 0.0) -> bool:
    """Return whether a process has ended.

    Args:
        pidfd: the process.
        timeout_s: seconds to wait for its end, or None to wait without limit.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


T = TypeVar("T", bound=Child)


class Children(Generic[T]):
    """A set of children that are watched in one poll, if needed together with other descriptors."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._by_pidfd: dict[int, T] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._by_pidfd.values()))

    def __len__(self) -> int:
        return len(self._by_pidfd)

    def add(self, child: T) -> None:
        """Watch a child until `reap`.

        Args:
            child: a process that has not been reaped.
        """
        self._by_pidfd[child.pidfd] = child
        self._poll.register(child.pidfd, select.POLLIN)

    def reap(self, child: T) -> int:
        """Wait until a child has ended, stop watching it, and return its exit code.

        Args:
            child: a process that was added.
        """
        del self._by_pidfd[child.pidfd]
        self._poll.unregister(child.pidfd)
        return child.reap()

    def watch(self, fd: int) -> None:
        """Also watch another descriptor for input.

        Args:
            fd: the descriptor; call `unwatch` before it is closed.
        """
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor that was given to `watch`.

        Args:
            fd: the descriptor.
        """
        self._poll.unregister(fd)

    def ended(self) -> list[T]:
        """Return the children that have ended and have not been reaped. Cost: one poll, about 0.5 us."""
        return [self._by_pidfd[fd] for fd, _ in self._poll.poll(0) if fd in self._by_pidfd]

    def wait(self, timeout_s: float | None) -> tuple[list[T], set[int]]:
        """Wait for an event. Return the children that have ended, and the other descriptors that have input.

        Args:
            timeout_s: seconds to wait, or None to wait without limit.
        """
        found = self._poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1000)
        ended = [self._by_pidfd[fd] for fd, _ in found if fd in self._by_pidfd]
        return ended, {fd for fd, _ in found if fd not in self._by_pidfd}

    def end(
        self, grace_s: float, look: Callable[[float | None], object], *, is_enough: Callable[[], bool] = lambda: False
    ) -> list[T]:
        """Wait for all children to end, then kill those that still run. Return those that were killed.

        An exception in the first wait, such as ^C, ends the grace period: the rest are killed and reaped before it is raised.

        Args:
            grace_s: seconds before the others are killed.
            look: function that waits up to the given number of seconds (None: without limit) for an event, and calls `reap` for
                children that have ended.
            is_enough: called after each look; True ends the grace period.
        """
        deadline = monotonic() + grace_s
        killed: list[T] = []
        try:
            while self._by_pidfd and not is_enough() and (left := deadline - monotonic()) > 0:
                look(left)
        finally:
            with interrupts_held():
                killed += self._by_pidfd.values()
                for child in killed:
                    child.send(signal.SIGKILL)  # ends a stopped process too
                while self._by_pidfd:
                    look(None)
        return killed
