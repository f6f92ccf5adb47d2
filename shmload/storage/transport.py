"""HTTP/1.1 over connections that are kept, each used by one request at a time, none by two processes.

Python's own client, because it reads the socket straight into the caller's memory without the GIL, and because it lives through a
fork: a child finds the pool of another pid and begins its own. A native client was measured and left: obstore 0.12 (Rust) takes
1.7 times the CPU, as it gathers a body elsewhere first, and in a child forked after its first use it hangs for good, with a new
store too: the threads of its runtime are not forked along.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast
from urllib.parse import urlsplit

from shmload._core.receive import receive
from shmload.errors import StoreError
from shmload.storage.proxy import Proxy
from shmload.storage.retry import Unsure

__all__ = ["Answer", "Transport"]

_SLOWEST = 1024  # bytes/s: what comes slower than that over `stall_s` stands still
_MOST_TEXT = 16 << 20  # bytes of an answer that is no object
_LOOK_NBYTES, _LOOK_MS = (
    4 << 20,
    200,
)  # what may come, and the time that may pass, until somebody looks whether it is still wanted


class _OneLook(io.BufferedReader):
    """Gives what one look at the socket brings, so that a trickle is noticed; lines only whole, so that a head is."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            raise http.client.RemoteDisconnected("it hung up before its answer had begun")
        return line

    def readinto(self, buffer: Any) -> int:
        return self.readinto1(buffer)


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = _OneLook(self.fp.detach())


class _Connection(http.client.HTTPConnection):
    """To a server, or to the proxy before it."""

    response_class = _Response
    proxy: Proxy | None = None
    is_tunnel = False  # through the proxy


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """The same over TLS."""


class _Pace:
    """Tells a body that comes slowly from one that stands still."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._done, self._then = 0, monotonic()

    def look(self, done: int) -> None:
        """At so many bytes: raises Unsure if hardly any came since the last look that counted."""
        if (now := monotonic()) - self._then > self._stall_s:
            if done - self._done < _SLOWEST * self._stall_s:
                raise Unsure(f"the server sent {done - self._done:,} bytes in {now - self._then:.0f} s")
            self._done, self._then = done, now


@dataclass
class _Pool:
    """The idle connections of one process."""

    pid: int
    idle: list[_Connection] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: bool = False  # whether anyone ever answered there: what never did is more likely a wrong address


class Answer:
    """A status with its headers, and a body that is read at most once. Close it: a connection with all read is used again."""

    def __init__(self, transport: Transport, connection: _Connection, response: _Response) -> None:
        self._transport = transport
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = response.headers
        self.reason = response.reason

    @property
    def nbytes(self) -> int | None:
        """The body's length, as far as it is said."""
        return self._response.length

    def reading(self, out: memoryview) -> Iterator[int]:
        """Reads until `out` is full or the body ends, and says after each look at the socket how many bytes have come so far."""
        done, pace = 0, _Pace(self._transport.stall_s)
        while done < len(out):
            try:
                got = self._response.readinto(out[done:])
            except (OSError, http.client.HTTPException) as error:
                raise _broken(error) from None
            if got == 0:
                return
            done += got
            yield done
            pace.look(done)

    def num_read_ahead(self) -> int:
        """How many bytes of the body have come along with the head; waits for some if none have. 0: it is over."""
        if self._response.isclosed():
            return 0
        try:
            return len(self._response.fp.peek())
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from None

    def is_plain(self) -> bool:
        """Whether the body lies in the socket as it is: not encrypted, not in pieces."""
        return not isinstance(self._connection, _SecureConnection) and self._response.length is not None

    def to_file(self, fd: int, offset: int, nbytes: int, crc: int) -> Iterator[tuple[int, int]]:
        """Writes so many bytes of a plain body, of which none is read ahead, straight into a file, until it ends.

        Says after each look at the socket how many have come so far, and their CRC-32C behind `crc`.

        Raises:
            Unsure: the connection broke.
            OSError: the file cannot be written.
        """
        if nbytes <= 0 or self._response.isclosed():
            return
        done, pace = 0, _Pace(self._transport.stall_s)
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
            pace.look(done)

    def text(self) -> bytes:
        """The body of an answer that is no object."""
        nbytes = self.nbytes
        try:
            found = self._response.read(_MOST_TEXT)
        except (OSError, http.client.HTTPException) as error:
            raise Unsure(f"the connection broke in the middle of an answer ({words(error)})") from None
        if nbytes is not None and len(found) < min(nbytes, _MOST_TEXT):
            raise Unsure(f"an answer ended after {len(found):,} of {nbytes:,} bytes")
        return found

    def close(self) -> None:
        self._transport.give_back(self._connection, whole=self._response.isclosed())
        self._response.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport:
    """Requests to one host. Picklable; each process has connections of its own.

    Args:
        base_url: scheme, host and port.
        stall_s: how long a server may say nothing.
        ca_file: certificates to trust beside the system's.
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
        self._pool = _Pool(os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_pool": _Pool(os.getpid())}

    def request(self, method: str, target: str, headers: Mapping[str, str]) -> Answer:
        """Sends one request without a body and reads the answer's head.

        Args:
            target: path and query, as they are sent.
        Raises:
            Unsure: no answer came.
            StoreError: none can come.
        """
        while True:
            connection, used = self._connection()
            proxy = connection.proxy
            try:
                if proxy is not None and not connection.is_tunnel:
                    connection.request(method, self.base_url + target, headers={**headers, **proxy.headers})
                else:
                    connection.request(method, target, headers=dict(headers))
                response = cast(_Response, connection.getresponse())
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise StoreError(
                    f"{self.base_url} is not trusted: {error.verify_message}. Give its certificates as ca_file"
                ) from None
            except socket.gaierror as error:
                connection.close()
                if error.errno == socket.EAI_AGAIN:
                    raise Unsure(f"{proxy or self.host} could not be looked up ({error.strerror})") from None
                if proxy is not None:
                    raise StoreError(f"{proxy} has no address: look at http_proxy and https_proxy") from None
                raise StoreError(f"there is no host {self.host}: look at the URL {self.base_url}") from None
            except ConnectionRefusedError:
                connection.close()
                if self._here().answered:
                    raise Unsure(f"{self.base_url} takes no connections any more") from None
                raise StoreError(
                    f"nothing listens at {proxy or self.base_url}: look at host and port, or start the server"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if proxy is not None and (refused := _TUNNEL_REFUSED.match(str(error))):
                    raise proxy.refusal(int(refused[1]), self.base_url) from None
                if used and not isinstance(error, TimeoutError):
                    continue
                raise Unsure(f"no answer from {self.base_url} ({words(error)})") from None
            except BaseException:
                connection.close()
                raise
            if proxy is not None and response.status == 407:
                response.close()
                connection.close()
                raise proxy.refusal(407, self.base_url)
            self._here().answered = True
            return Answer(self, connection, response)

    def give_back(self, connection: _Connection, *, whole: bool) -> None:
        """Keeps a connection for the next request, if all of the answer was read."""
        pool = self._here()
        if not whole or connection.sock is None:
            connection.close()
            return
        with pool.lock:
            pool.idle.append(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        pool = self._here()
        with pool.lock:
            while pool.idle:
                pool.idle.pop().close()

    def __del__(self) -> None:
        for connection in self._pool.idle:
            connection.close()

    def _here(self) -> _Pool:
        """This process's pool. A parent's connections are not used: what a child says there would disturb it."""
        if self._pool.pid != os.getpid():
            for connection in self._pool.idle:
                connection.close()  # this process's descriptor of it only
            self._pool = _Pool(os.getpid())
        return self._pool

    def _connection(self) -> tuple[_Connection, bool]:
        """A connection, and whether it has been used."""
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
        if self.secure or (proxy is not None and proxy.secure):
            made = _SecureConnection(host, port, timeout=self.stall_s, context=_context(self.ca_file))
        else:
            made = _Connection(host, port, timeout=self.stall_s)
        made.proxy = proxy
        if proxy is not None and self.secure:
            made.is_tunnel = True
            made.set_tunnel(self.host, self.port, proxy.headers)
        return made, False


@functools.lru_cache(maxsize=8)
def _context(ca_file: str | None) -> ssl.SSLContext:
    made = ssl.create_default_context()
    if ca_file is not None:
        made.load_verify_locations(ca_file)
    return made


_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (4\d\d)")  # http.client's words


def _is_readable(sock: socket.socket) -> bool:
    """Whether an idle connection has something to say: that it is closed."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _broken(error: BaseException) -> Unsure:
    return Unsure(f"the connection broke in the middle of a body ({words(error)})")


def words(error: BaseException) -> str:
    """An error of the network in a few words."""
    if isinstance(error, TimeoutError):
        return "it said nothing for too long"
    said = " ".join(ascii(str(error))[1:-1].split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
