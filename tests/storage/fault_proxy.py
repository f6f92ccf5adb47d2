"""A proxy that breaks answers to order: between a client and a server, in a thread of its own.

    with fault_proxy("http://127.0.0.1:9000") as proxy:
        proxy.script(Status(503), Reset(after=100), None)     one for each request that comes, None leaves it alone
        ...
        assert proxy.num_requests == 3

Faults after the script's end there are none. What a fault does to an answer it does after the server has done its part, unless it says
that the server is not asked. The Host header is passed on as it came, so signatures stay valid.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Status:
    """The server is not asked; this status comes instead."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Reset:
    """The connection is reset after so many bytes of the answer."""

    after: int = 0


@dataclass(frozen=True)
class Refuse:
    """The connection is reset before the server hears of the request."""


@dataclass(frozen=True)
class Truncate:
    """The head is whole, the connection ends after so many bytes of the body."""

    after: int = 0


@dataclass(frozen=True)
class Stall:
    """Nothing more comes after so many bytes of the answer; the connection stays open."""

    after: int = 0


@dataclass(frozen=True)
class Trickle:
    """The body comes a byte at a time, one each `pause_s`."""

    pause_s: float = 0.01


@dataclass(frozen=True)
class Length:
    """Content-Length says so many bytes more, or fewer, than come."""

    more: int


@dataclass(frozen=True)
class Header:
    """A header has another value; an empty one is left out."""

    name: str
    value: str


@dataclass(frozen=True)
class Garbage:
    """The answer is no HTTP."""

    data: bytes = b"\x00\xff\x00 this is no HTTP\r\n\r\n"


Fault = Status | Reset | Refuse | Truncate | Stall | Trickle | Length | Header | Garbage


class FaultProxy:
    """The running proxy. Scripts may be given from any thread."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._faults: deque[Fault | None] = deque()
        self._method = ""
        self.requests: list[tuple[str, str]] = []  # method and target
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._never = asyncio.Event()
        self._tasks: set[asyncio.Task[None] | None] = set()  # the loop itself keeps no task that waits
        self.url = ""

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def script(self, *faults: Fault | None, method: str = "") -> None:
        """What becomes of the next requests, or of the next with this method; forgets what was counted and planned before."""
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
        self._loop.run_until_complete(_turns())  # what was accepted last becomes a connection, which can be closed
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(_turns())  # connections end a turn after they are closed
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except asyncio.CancelledError:
            writer.transport.abort()  # close() would wait until a client that has stopped reading has read the rest
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection can be used again."""
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
        again = re.search(rb"(?i)\r\ntransfer-encoding", head) is None  # else nobody here knows where the body ends
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
            await self._never.wait()  # until the proxy ends; the client may go when it likes
        return again and not isinstance(fault, Truncate | Length | Garbage)


async def _turns() -> None:
    """Some of the loop's."""
    for _ in range(5):
        await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Ends a connection so that the other side gets ECONNRESET."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy before `upstream`, for as long as the block lasts."""
    proxy = FaultProxy(upstream)
    proxy._thread.start()
    proxy._ready.wait(10)
    try:
        yield proxy
    finally:
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        proxy._thread.join()
