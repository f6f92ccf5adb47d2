"""What ranks print, brought out line by line with the rank's number before it.

One thread reads all pipes and writes whole lines, so lines of ranks do not mix, and the launcher goes on watching ranks while
whoever reads its output does not. A line ends at \\n or \\r (progress bars); one that is longer than a megabyte is cut there.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from typing import IO, Any

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
