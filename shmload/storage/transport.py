"""HTTP/1.1 over connections that are kept, each used by one request at a time, none by two processes.

Python's own client, because it reads the socket straight into the caller's memory without the GIL, and because it lives through a
fork: a child finds the pool of another pid and begins its own. A native client was measured and left: obstore 0.12 (Rust) takes
1.7 times the CPU, as it gathers a body elsewhere first, and in a child forked after its first use it hangs for good, with a new
store too: the threads of its runtime are not forked along.

What may pass is tried again: how often, how long, with which pauses.

Proxies as the environment names them: http_proxy, https_proxy, no_proxy, as urllib reads them.

A request to an https:// server goes through a tunnel (CONNECT), one to an http:// server is handed over whole, its target a URL. A
name and a password in the proxy's URL go to the proxy with each of the two, never to the server, and stand in no error.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import os
import random
import re
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shmload._core.receive import receive
from shmload.errors import StoreError
from shmload.storage.outage import Outage

__all__ = ["Answer", "Proxy", "Retry", "RetryPolicy", "TransientError", "Transport"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_wait: Callable[[float], object] = threading.Event().wait  # never set: a pause that signals may interrupt


class TransientError(Exception):
    """A try failed in a way that may pass.

    Args:
        what: what happened, in words.
        pause_s: how long the server asks to be left alone.
        of_store: whether the store as a whole does not answer, so that other objects cannot be read either.
        is_silent: whether the store said nothing until the try's time ran out.
    """

    def __init__(self, what: str, *, pause_s: float = 0.0, of_store: bool = False, is_silent: bool = False) -> None:
        super().__init__(what)
        self.pause_s = pause_s
        self.of_store, self.is_silent = of_store, is_silent


@dataclass(frozen=True)
class RetryPolicy:
    """How long an operation is tried.

    Attributes:
        retries: further tries after one that failed, without progress between them.
        timeout_s: after this long without progress no further try is begun.
        stall_s: a server that says nothing for so long has failed the try.
    """

    retries: int = 5
    timeout_s: float = 60.0
    stall_s: float = 10.0


class Retry:
    """Counts the tries of one operation, and waits between them.

    Args:
        retry_policy: how many and how long.
        doing: the operation in words, for the error.
        outage: the store's, if operations on its other objects are to fail with one that has used up its tries; None: each is
            tried as often as it may.
    Raises:
        StoreError: the store was silent for another operation less than `stall_s` ago.
    """

    def __init__(self, retry_policy: RetryPolicy, doing: str, outage: Outage | None = None) -> None:
        self.retry_policy = retry_policy
        self.doing = doing
        self._outage = outage
        self.progressed()
        self._retries = retry_policy.retries
        if outage is not None and (recent := outage.since(self._since - retry_policy.stall_s)) is not None:
            if recent.is_silent:
                raise StoreError(recent.text)
            self._retries = 0  # a store that refuses costs a try no time, and may be well again

    def progressed(self) -> None:
        """Bytes came: what failed before does not count any more."""
        self.num_failed = 0
        self._since = monotonic()

    def succeeded(self) -> None:
        """Note that the operation is complete, so the store answers."""
        if self._outage is not None:
            self._outage.end()

    @property
    def left_s(self) -> float:
        """Seconds until no further try is begun; a tenth at least."""
        return max(self.retry_policy.timeout_s - (monotonic() - self._since), 0.1)

    def failed(self, failure: TransientError) -> None:
        """Waits before the next try: twice as long each time, by chance between half and whole, so that many readers spread.

        Raises:
            StoreError: there is no next try, or another operation on this store has used up its own meanwhile.
        """
        self.num_failed += 1
        if failure.of_store:
            self._fail_with_another()
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.num_failed - 1)) * random.uniform(0.5, 1)
        pause = max(pause, failure.pause_s)
        spent = monotonic() - self._since
        if self.num_failed > self._retries:
            raise self._given_up(
                f"cannot {self.doing}: {failure}; failed {self.num_failed} times in {spent:.1f} s. "
                "Look after the server, or give the client more retries",
                failure,
            ) from None
        if spent + pause > self.retry_policy.timeout_s:
            raise self._given_up(
                f"cannot {self.doing}: {failure}; no progress in {spent:.1f} s ({self.num_failed} tries), of "
                f"timeout_s={self.retry_policy.timeout_s:g}. Look after the server, or give the client a longer timeout_s",
                failure,
            ) from None
        _wait(pause)
        if failure.of_store:
            self._fail_with_another()

    def _fail_with_another(self) -> None:
        if self._outage is not None and (found := self._outage.since(self._since)) is not None:
            raise StoreError(found.text) from None

    def _given_up(self, text: str, failure: TransientError) -> StoreError:
        if failure.of_store and self._outage is not None:
            self._outage.record(text, self._since, is_silent=failure.is_silent)
        return StoreError(text)


@dataclass(frozen=True)
class Proxy:
    """One proxy.

    Attributes:
        headers: that say who asks.
    """

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of_environment(cls, scheme: str, netloc: str) -> Self | None:
        """The proxy between here and a server; None: there is none.

        Raises:
            StoreError: it is of a kind that is not known here.
        """
        url = None if proxy_bypass(netloc) else getproxies().get(scheme)
        if not url:
            return None
        parts = urlsplit(url if "://" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", scheme) or not parts.hostname:
            raise StoreError(
                f"{scheme}_proxy names a proxy of kind {parts.scheme!r} ({parts.hostname}): http:// proxies are known here; unset "
                "it, name the server in no_proxy, or give one of those"
            )
        headers = {}
        if parts.username is not None:
            who = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(who).decode()}"
        return cls(parts.hostname, parts.port or 80, headers)

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port}"

    def refusal(self, status: int, base_url: str) -> StoreError:
        """The error for a proxy that does not let a request through."""
        if status == 407:
            return StoreError(
                f"{self} wants a name and a password for {base_url} (407): give them in the environment, as in "
                f"http_proxy=http://name:password@{self.host}:{self.port} and https_proxy, special characters as %40"
            )
        return StoreError(
            f"{self} does not let through to {base_url} ({status}): look at the URL, ask who runs it, or name the server in "
            "no_proxy"
        )


_SLOWEST = 1024  # bytes/s: what comes slower than that over `stall_s` stands still
_MOST_TEXT = 16 << 20  # bytes of an answer that is no object
_LOOK_NBYTES = 4 << 20  # what may come until somebody looks whether it is still wanted
_LOOK_MS = 200  # the time that may pass until then


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

    def readinto(self, buffer: Any) -> int:
        """Read what one look at the socket brings, also of a chunked body: Python's own wants the whole of each chunk at once."""
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
            raise http.client.RemoteDisconnected("it hung up in the middle of a chunk")
        self.chunk_left = left - got
        return got


class _Connection(http.client.HTTPConnection):
    """To a server, or to the proxy before it."""

    response_class = _Response
    proxy: Proxy | None = None


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """The same over TLS."""


class _Pace:
    """Tells a body that comes slowly from one that stands still."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._done, self._then = 0, monotonic()

    def look(self, done: int) -> None:
        """At so many bytes: raises TransientError if hardly any came since the last look that counted."""
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
            TransientError: the connection broke.
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
        self._begin()

    def _begin(self) -> None:
        self._pool = _Pool(os.getpid())
        weakref.finalize(self, _close_all, self._pool.idle).atexit = False  # keeps them from going before they are closed

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = dict(state)
        self._begin()

    def request(self, method: str, target: str, headers: Mapping[str, str]) -> Answer:
        """Sends one request without a body and reads the answer's head.

        Args:
            target: path and query, as they are sent.
        Raises:
            TransientError: no answer came.
            StoreError: none can come.
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
                    continue  # the server had closed it meanwhile
                raise self._failure(error, proxy) from None
            if proxy is not None and response.status == 407:
                response.close()
                connection.close()
                raise proxy.refusal(407, self.base_url)
            self._here().answered = True
            return Answer(self, connection, response)

    def _failure(self, error: Exception, proxy: Proxy | None) -> StoreError | TransientError:
        """What it means that no answer came."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return StoreError(f"{self.base_url} is not trusted: {error.verify_message}. Give its certificates as ca_file")
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
            if proxy is not None:
                return StoreError(f"{proxy} has no address: look at http_proxy and https_proxy")
            return StoreError(f"there is no host {self.host}: look at the URL {self.base_url}")
        if isinstance(error, ConnectionRefusedError) and not self._here().answered:
            return StoreError(f"nothing listens at {proxy or self.base_url}: look at host and port, or start the server")
        if proxy is not None and (refused := _TUNNEL_REFUSED.match(str(error))):
            return proxy.refusal(int(refused[1]), self.base_url)
        is_silent = isinstance(error, TimeoutError)
        return TransientError(f"no answer from {self.base_url} ({words(error)})", of_store=True, is_silent=is_silent)

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

    def _here(self) -> _Pool:
        """This process's pool. A parent's connections are not used: what a child says there would disturb it."""
        if self._pool.pid != os.getpid():
            _close_all(self._pool.idle)  # this process's descriptors of them only
            self._begin()
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


def _broken(error: BaseException) -> TransientError:
    text = f"the connection broke in the middle of a body ({words(error)})"
    return TransientError(text, of_store=True, is_silent=isinstance(error, TimeoutError))


def words(error: BaseException) -> str:
    """An error of the network in a few words."""
    if isinstance(error, TimeoutError):
        return "it said nothing for too long"
    said = " ".join(ascii(str(error))[1:-1].split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
