"""HTTP/1.1 over pooled connections, each used by one request at a time and never by two processes.

This uses Python's own HTTP client, because it reads from the socket directly into the caller's memory without the GIL, and
because it survives a fork: a child sees that the pool has another pid and starts its own. A native client was measured and
rejected: obstore 0.12 (Rust) takes 1.7 times the CPU, because it first collects a body elsewhere, and in a child that was forked
after the first use it hangs forever, even with a new store, because the threads of its runtime are not forked.

A request to an https:// server goes through a tunnel (CONNECT) of the proxy; a request to an http:// server is sent to the proxy
with the whole URL as its target. A name and a password in the proxy's URL are sent to the proxy only, never to the server, and
appear in no error.
"""

from __future__ import annotations

import functools
import http.client
import io
import os
import re
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast
from urllib.parse import urlsplit

from shmload._core.receive import receive
from shmload.errors import StoreError
from shmload.storage.proxy import Proxy
from shmload.storage.retry import TransientError

__all__ = ["Answer", "Transport"]

_SLOWEST = 1024  # bytes/s; a body that is slower than this over `stall_s` counts as stalled
_MOST_TEXT = 16 << 20  # maximum number of bytes of an answer that is not an object
_LOOK_NBYTES = 4 << 20  # bytes received between two chances for the caller to stop
_LOOK_MS = 200  # milliseconds between two chances for the caller to stop


class _SingleReads(io.BufferedReader):
    """A reader that returns the bytes of one read of the socket, so that a slow body is noticed, and only complete lines."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            raise http.client.RemoteDisconnected("it closed the connection before its answer began")
        return line

    def readinto(self, buffer: Any) -> int:
        return self.readinto1(buffer)


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = _SingleReads(self.fp.detach())

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that one read of the socket returns. Python's own method waits for each chunk of a chunked body."""
        inner: Any = self
        if not self.chunked or self.fp is None or inner._method == "HEAD":
            return super().readinto(buffer)
        left = inner._get_chunk_left()
        if left is None:
            return 0
        if left < 0:
            raise http.client.HTTPException("a chunk of negative length")
        got = self.fp.readinto(memoryview(buffer)[:left])
        if not got:
            raise http.client.RemoteDisconnected("it closed the connection in the middle of a chunk")
        self.chunk_left = left - got
        return got


class _Connection(http.client.HTTPConnection):
    """A connection to a server, or to the proxy in front of it."""

    response_class = _Response
    proxy: Proxy | None = None


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """A connection over TLS."""


class _StallDetector:
    """Raises TransientError when a body has stalled; a slow body is allowed."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._done, self._then = 0, monotonic()

    def check(self, done: int) -> None:
        """Check the progress. `done` is the number of bytes received so far."""
        if (now := monotonic()) - self._then > self._stall_s:
            if done - self._done < _SLOWEST * self._stall_s:
                text = f"the server sent {done - self._done:,} bytes in {now - self._then:.0f} s"
                raise TransientError(text, of_store=True, is_silent=True)
            self._done, self._then = done, now


@dataclass
class _Pool:
    """The idle connections of one process."""

    pid: int
    idle: list[_Connection] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: bool = False  # whether the server has ever answered; if not, the address is more likely wrong


class Answer:
    """An answer: status, headers, and a body that is read at most once. Close it, so that the connection can be reused."""

    def __init__(self, transport: Transport, connection: _Connection, response: _Response) -> None:
        self._transport = transport
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = response.headers
        self.reason = response.reason

    @property
    def nbytes(self) -> int | None:
        """Return the number of remaining bytes of the body; None if the server has not announced it."""
        return self._response.length

    def reading(self, out: memoryview) -> Iterator[int]:
        """Read until `out` is full or the body ends. Yield the number of bytes so far after each read of the socket."""
        done, stall = 0, _StallDetector(self._transport.stall_s)
        while done < len(out):
            try:
                got = self._response.readinto(out[done:])
            except (OSError, http.client.HTTPException) as error:
                raise _broken(error) from None
            if got == 0:
                return
            done += got
            yield done
            stall.check(done)

    def num_read_ahead(self) -> int:
        """Return how many bytes of the body are buffered. If none are, wait for some. Return 0 at the body's end."""
        if self._response.isclosed():
            return 0
        try:
            return len(self._response.fp.peek())
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from None

    def is_plain(self) -> bool:
        """Return whether the socket carries the body's bytes as they are: not encrypted and not chunked."""
        return not isinstance(self._connection, _SecureConnection) and self._response.length is not None

    def to_file(self, fd: int, offset: int, nbytes: int, crc: int) -> Iterator[tuple[int, int]]:
        """Receive a plain body directly into a file. No bytes of it may be buffered.

        After each read of the socket, yield the number of bytes so far and the CRC-32C, which continues `crc`.

        Args:
            fd: descriptor of the file.
            offset: offset in the file.
            nbytes: maximum number of bytes.
            crc: CRC-32C of the bytes before.
        Raises:
            TransientError: the connection broke.
            OSError: the file cannot be written.
        """
        if nbytes <= 0 or self._response.isclosed():
            return
        done, stall = 0, _StallDetector(self._transport.stall_s)
        socket_fd = self._response.fp.fileno()
        while done < nbytes:
            wanted = min(nbytes - done, _LOOK_NBYTES)
            got, crc, is_over, number, file_number = receive(socket_fd, fd, offset + done, wanted, crc, _LOOK_MS)
            done += got
            self._response.length = cast(int, self._response.length) - got
            yield done, crc
            if number:
                raise _broken(OSError(number, os.strerror(number)))
            if file_number:
                raise OSError(file_number, os.strerror(file_number))
            if is_over:
                return
            stall.check(done)

    def text(self) -> bytes:
        """Return the body of an answer that is not an object."""
        try:
            return self._response.read(_MOST_TEXT)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from None

    def close(self) -> None:
        self._transport.give_back(self._connection, whole=self._response.isclosed())
        self._response.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport:
    """Connections to one host. Picklable; each process opens its own connections.

    Args:
        base_url: scheme, host and port.
        stall_s: seconds without an answer after which a request fails.
        ca_file: file of certificates to trust in place of the system's.
    """

    def __init__(self, base_url: str, *, stall_s: float, ca_file: str | None = None) -> None:
        self.base_url = base_url
        self.stall_s = stall_s
        self.ca_file = ca_file
        parts = urlsplit(base_url)
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self.netloc = parts.netloc
        self._begin()

    def _begin(self) -> None:
        self._pool = _Pool(os.getpid())
        # closes idle connections when this object is garbage collected, because unclosed sockets cause warnings
        weakref.finalize(self, _close_all, self._pool.idle).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = dict(state)
        self._begin()

    def request(self, method: str, target: str, headers: Mapping[str, str]) -> Answer:
        """Send a request without a body and read the answer's head.

        Args:
            method: HTTP method.
            target: path and query, as they are sent.
            headers: headers of the request.
        Raises:
            TransientError: no answer came.
            StoreError: no answer can come, for example because the host does not exist.
        """
        while True:
            connection, used = self._connection()
            proxy = connection.proxy
            try:
                if proxy is not None and not self.secure:
                    connection.request(method, self.base_url + target, headers={**headers, **proxy.headers})
                else:
                    connection.request(method, target, headers=dict(headers))
                response = cast(_Response, connection.getresponse())
            except BaseException as error:
                connection.close()
                if not isinstance(error, (OSError, http.client.HTTPException)):
                    raise
                if used and not isinstance(error, TimeoutError):
                    continue  # the server has closed the idle connection
                raise self._failure(error, proxy) from None
            if proxy is not None and response.status == 407:
                response.close()
                connection.close()
                raise proxy.refusal(407, self.base_url)
            self._here().answered = True
            return Answer(self, connection, response)

    def _failure(self, error: Exception, proxy: Proxy | None) -> StoreError | TransientError:
        """Return the error to raise if no answer came."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return StoreError(f"{self.base_url} is not trusted: {error.verify_message}. Give its certificates as ca_file")
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
            if proxy is not None:
                return StoreError(f"{proxy} has no address: check http_proxy and https_proxy")
            return StoreError(
                f"the host {self.host} does not exist: check the URL {self.base_url}, and for an S3-compatible store "
                "AWS_ENDPOINT_URL in the environment"
            )
        if isinstance(error, ConnectionRefusedError) and not self._here().answered:
            return StoreError(f"nothing listens at {proxy or self.base_url}: check host and port, or start the server")
        if proxy is not None and (refused := _TUNNEL_REFUSED.match(str(error))):
            return proxy.refusal(int(refused[1]), self.base_url)
        is_silent = isinstance(error, TimeoutError)
        return TransientError(f"no answer from {self.base_url} ({describe(error)})", of_store=True, is_silent=is_silent)

    def give_back(self, connection: _Connection, *, whole: bool) -> None:
        """Keep a connection for the next request if the whole answer was read; else close it."""
        pool = self._here()
        if not whole or connection.sock is None:
            connection.close()
            return
        with pool.lock:
            pool.idle.append(connection)

    def close(self) -> None:
        """Close this process's idle connections. New ones are opened when they are needed."""
        pool = self._here()
        with pool.lock:
            while pool.idle:
                pool.idle.pop().close()

    def _here(self) -> _Pool:
        """Return this process's pool. A forked child must not use its parent's connections."""
        if self._pool.pid != os.getpid():
            _close_all(self._pool.idle)  # closes only this process's copies of the descriptors
            self._begin()
        return self._pool

    def _connection(self) -> tuple[_Connection, bool]:
        """Return a connection, and whether it has been used before."""
        pool = self._here()
        with pool.lock:
            while pool.idle:
                found = pool.idle.pop()
                if not _is_readable(found.sock):
                    return found, True
                found.close()
        proxy = Proxy.of_environment("https" if self.secure else "http", self.netloc)
        host, port = (self.host, self.port) if proxy is None else (proxy.host, proxy.port)
        made: _Connection
        if self.secure:
            made = _SecureConnection(host, port, timeout=self.stall_s, context=_context(self.ca_file))
        else:
            made = _Connection(host, port, timeout=self.stall_s)
        if proxy is not None and self.secure:
            made.set_tunnel(self.host, self.port, proxy.headers)
        made.proxy = proxy
        return made, False


def _close_all(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.close()


@functools.lru_cache(maxsize=8)
def _context(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (4\d\d)")  # http.client's message


def _is_readable(sock: socket.socket) -> bool:
    """Return whether an idle connection is readable, which means that the server has closed it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _broken(error: BaseException) -> TransientError:
    text = f"the connection broke in the middle of a body ({describe(error)})"
    return TransientError(text, of_store=True, is_silent=isinstance(error, TimeoutError))


def describe(error: BaseException) -> str:
    """Describe a network error in a few words."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    said = " ".join(ascii(str(error))[1:-1].split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
