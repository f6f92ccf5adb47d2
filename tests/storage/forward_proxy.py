"""A forward proxy as in company networks: it forwards requests with absolute URLs and opens tunnels, optionally with a password."""

from __future__ import annotations

import base64
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


class _Handler(socketserver.StreamRequestHandler):
    server: Any

    def handle(self) -> None:
        while request := self._head():
            line, headers = request
            method, target, _ = line.split(" ")
            authorization = headers.pop("proxy-authorization", None)
            self.server.requests.append((method, target, authorization))
            self.server.signatures.append(headers.get("authorization", ""))
            if self.server.refuses or authorization != self.server.wanted:
                status = self.server.refuses or "407 Proxy Authentication Required"
                self.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                return
            if method == "CONNECT":
                host, port = target.rsplit(":", 1)
                self._tunnel(host, int(port))
                return
            parts = urlsplit(target)
            if parts.scheme != "http":
                self.wfile.write(b"HTTP/1.1 400 No URL\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            self._forward(method, parts, headers)

    def _head(self) -> tuple[str, dict[str, str]] | None:
        lines = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            lines.append(line.decode("latin-1").strip())
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        return (lines[0], headers) if lines else None

    def _forward(self, method: str, parts: Any, headers: dict[str, str]) -> None:
        """Forwards one request; the answer ends when the server closes its connection."""
        if self.server.leads_to:
            # A server that knows only its own name would take another host for a bucket.
            headers["host"] = ":".join(map(str, self.server.leads_to))
        with socket.create_connection(self.server.leads_to or (parts.hostname, parts.port or 80)) as upstream:
            target = parts.path + (f"?{parts.query}" if parts.query else "")
            lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            upstream.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))
            while data := upstream.recv(1 << 16):
                self.wfile.write(data)
        self.connection.shutdown(socket.SHUT_RDWR)

    def _tunnel(self, host: str, port: int) -> None:
        with socket.create_connection((host, port)) as upstream:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(upstream, self.connection))
            back.start()
            _pump(self.connection, upstream)
            back.join()


def _pump(source: socket.socket, to: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:  # one of the two has disconnected
        pass


class ForwardProxy(socketserver.ThreadingTCPServer):
    """The running proxy.


    Attributes:
        requests: (method, target, Proxy-Authorization) of each request.
        signatures: the Authorization of each request.
        wanted: the required Proxy-Authorization; None if no password is required.
        refuses: a status line that refuses all requests; "" to accept them.
        leads_to: host and port of the server that answers all requests; the requested server if None.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, who: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, str | None]] = []
        self.signatures: list[str] = []
        self.wanted = None if who is None else f"Basic {base64.b64encode(who.encode()).decode()}"
        self.refuses = ""
        self.leads_to: tuple[str, int] | None = None
        self.place = f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


@contextmanager
def forward_proxy(who: str | None = None) -> Iterator[ForwardProxy]:
    """Runs a proxy until the block ends.


    Args:
        who: the required "name:password"; None if no password is required.
    """
    with ForwardProxy(who) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
