"""A scripted proxy between a client and a server that injects faults into answers; runs in its own thread.
    with fault_proxy("http://127.0.0.1:9000") as proxy:
        proxy.script(Status(503), Reset(after=100), None)     one entry per request; None forwards it unchanged
        ...
        assert proxy.num_requests == 3
After the end of the script, requests are forwarded unchanged. The server has processed the request before a fault changes its
answer, unless the fault's docstring says that the request is not forwarded. The Host header is forwarded unchanged, so signatures
stay valid.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Status:
    """Returns this status; the request is not forwarded."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Reset:
    """Resets the connection after `after` bytes of the answer."""

    after: int = 0


@dataclass(frozen=True)
class Refuse:
    """Resets the connection; the request is not forwarded."""


@dataclass(frozen=True)
class Truncate:
    """Sends the complete head and ends the connection after `after` bytes of the body."""

    after: int = 0


@dataclass(frozen=True)
class Stall:
    """Stops after `after` bytes of the answer and keeps the connection open."""

    after: int = 0


@dataclass(frozen=True)
class Trickle:
    """Sends the body one byte every `pause_s` seconds."""

    pause_s: float = 0.01


@dataclass(frozen=True)
class Length:
    """Changes Content-Length to differ from the number of bytes sent."""

    more: int


@dataclass(frozen=True)
class Header:
    """Changes the value of a header, or removes the header if the value is empty."""

    name: str
    value: str


@dataclass(frozen=True)
class Garbage:
    """Sends an answer that is not HTTP."""

    data: bytes = b"\x00\xff\x00 this is no HTTP\r\n\r\n"


Fault = Status | Reset | Refuse | Truncate | Stall | Trickle | Length | Header | Garbage


class FaultProxy:
    """The running proxy. Scripts may be set from any thread."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._faults: deque[Fault | None] = deque()
        self._method = ""
        self.requests: list[tuple[str, str]] = []  # (method, target)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._never = asyncio.Event()
        self._tasks: set[asyncio.Task[None] | None] = set()  # strong references, because the event loop keeps only weak ones
        self.url = ""

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def script(self, *faults: Fault | None, method: str = "") -> None:
        """Sets the faults of the next requests (or the next with this method); resets the counters and any earlier script."""
        self.requests = []
        self._method = method
        self._faults = deque(faults)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_turns())  # so that connections accepted last can be closed
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(_turns())  # connections end one iteration after they are closed
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except asyncio.CancelledError:
            writer.transport.abort()  # close() would wait until a client that no longer reads has read the rest
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if not writer.is_closing():
                writer.write_eof()  # a process forked meanwhile has the socket, too: closing it here alone ends nothing
            writer.close()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request; returns whether the connection can be reused."""
        head = await reader.readuntil(b"\r\n\r\n")
        match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(match[1]) if match else 0)
        method, target = head.split(b" ", 2)[:2]
        self.requests.append((method.decode(), target.decode()))
        fault = None
        if self._faults and self._method in ("", method.decode()):
            fault = self._faults.popleft()
        if isinstance(fault, Refuse):
            return _reset(writer)
        if isinstance(fault, Status):
            lines = "".join(f"{name}: {value}\r\n" for name, value in fault.headers)
            said = b"" if method == b"HEAD" else fault.body
            writer.write(f"HTTP/1.1 {fault.status} X\r\n{lines}Content-Length: {len(said)}\r\n\r\n".encode() + said)
            await writer.drain()
            return True
        head, body = await self._ask(head, body)
        return await self._answer(writer, fault, head, body)

    async def _ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.transport.abort()
        answer_head, _, answer_body = answer.partition(b"\r\n\r\n")
        return re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", answer_head), answer_body

    async def _answer(self, writer: asyncio.StreamWriter, fault: Fault | None, head: bytes, body: bytes) -> bool:
        if isinstance(fault, Length):
            head = re.sub(rb"(?i)(\r\ncontent-length: *)(\d+)", lambda m: m[1] + b"%d" % max(0, int(m[2]) + fault.more), head)
        if isinstance(fault, Header):
            head = re.sub(rb"(?i)\r\n%s: [^\r]*" % fault.name.encode(), b"", head)
            if fault.value:
                head += f"\r\n{fault.name}: {fault.value}".encode()
        again = re.search(rb"(?i)\r\ntransfer-encoding", head) is None  # otherwise the end of the body is unknown
        if not again:
            head += b"\r\nConnection: close"
        whole = head + b"\r\n\r\n" + body
        if isinstance(fault, Garbage):
            whole = fault.data
        if isinstance(fault, Truncate):
            whole = whole[: len(head) + 4 + fault.after]
        if isinstance(fault, Trickle):
            writer.write(head + b"\r\n\r\n")
            for number in range(len(body)):
                writer.write(body[number : number + 1])
                await writer.drain()
                await asyncio.sleep(fault.pause_s)
            return True
        if isinstance(fault, Reset | Stall):
            whole = whole[: fault.after]
        writer.write(whole)
        await writer.drain()
        if isinstance(fault, Reset):
            return _reset(writer)
        if isinstance(fault, Stall):
            await self._never.wait()  # until the proxy ends; the client may disconnect at any time
        return again and not isinstance(fault, Truncate | Length | Garbage)


async def _turns() -> None:
    """Runs some iterations of the event loop."""
    for _ in range(5):
        await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Ends a connection so that the peer gets ECONNRESET, although processes forked meanwhile have the socket, too."""
    unspecified = bytes(16)  # a sockaddr of AF_UNSPEC, which dissolves the connection (connect(2))
    ctypes.CDLL(None).connect(writer.get_extra_info("socket").fileno(), unspecified, len(unspecified))
    writer.transport.abort()
    return False


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Runs a proxy in front of `upstream` until the block ends."""
    proxy = FaultProxy(upstream)
    proxy._thread.start()
    proxy._ready.wait(10)
    try:
        yield proxy
    finally:
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        proxy._thread.join()
