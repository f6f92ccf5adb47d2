"""Print the output of ranks, line by line, with the rank's number before each line.

One thread reads all pipes and writes whole lines. So lines of different ranks do not mix, and the launcher can watch ranks even
while the reader of its output is slow. A line ends at \\n or \\r (progress bars); a line longer than a megabyte is split.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from typing import IO, Any

_CHUNK = 1 << 16  # bytes read at a time
_LONGEST = 1 << 20  # bytes after which a line is split
TAIL = 200  # lines of a rank's stderr that are kept for error messages


class Pipe:
    """The pipe from one rank's stdout or stderr.

    Args:
        fd: the reading end; `close` closes it.
        prefix: printed before each line.
        stream: the text file that lines are written to; None to write nothing.

    Attributes:
        tail: the last `TAIL` lines.
        lost: the error because of which lines could not be written; None if all were written, or if their reader has gone.
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
        """Read once and write complete lines. Return whether there may be more to read now."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._emit(self._rest)
            self._rest = b""
            return False
        data = self._rest + data
        # a \r at the end may be the first half of \r\n
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if not end and len(data) > _LONGEST:
            end = len(data)
        self._emit(data[:end])
        self._rest = data[end:]
        return True

    def close(self) -> None:
        """Write an incomplete last line, and close the pipe."""
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
            except (BrokenPipeError, ValueError):  # the reader of the stream has gone, or the stream is closed; ranks continue
                self._stream = None
            except OSError as error:  # a full disk may have room for later lines
                self.lost = error


def _write(stream: IO[Any], data: bytes) -> None:
    stream.flush()
    below = getattr(stream, "buffer", None)
    if below is not None:
        below.write(data)
        below.flush()
    else:  # a notebook's stream has no buffer
        stream.write(data.decode(errors="replace"))
        stream.flush()


class Printer:
    """The pipes of all ranks, and the thread that prints their output.

    Attributes:
        thread: the thread, which the caller starts once all pipes have been added.
        lost: the `lost` of the first pipe that has one; known after `finish`.
    """

    def __init__(self) -> None:
        self.lost: OSError | None = None
        self._pipes: dict[int, Pipe] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.thread = threading.Thread(target=self._run, name="shmload output", daemon=True)

    def add(self, fd: int, prefix: str, name: str) -> Pipe:
        """Take over the reading end of a pipe, before the thread is started.

        Args:
            fd: the reading end.
            prefix: printed before each line.
            name: "stdout" or "stderr", the stream of this process that lines are written to.
        """
        pipe = self._pipes[fd] = Pipe(fd, prefix, getattr(sys, name))
        return pipe

    def finish(self, timeout_s: float | None = None) -> None:
        """Print the remaining output and end the thread. Call this when all ranks have ended. Idempotent.

        Output that other processes write to a pipe later is lost.

        Args:
            timeout_s: seconds to wait for the reader of the output, or None to wait without limit.
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
