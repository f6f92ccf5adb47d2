"""Ports for servers that start later, in another process."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_random = random.SystemRandom()


def free_port(num: int = 1) -> int:
    """Returns the first of `num` consecutive unused ports.

    They are below those that the kernel gives to clients, because a client of another test could get such a port before the server
    has started.
    """
    limit = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _random.randrange(_FIRST, limit - num) if limit > 2 * _FIRST else 0
        sockets = [socket.socket() for _ in range(num)]
        try:
            sockets[0].bind(("127.0.0.1", port))
            port = int(sockets[0].getsockname()[1])
            for number, each in enumerate(sockets[1:], 1):
                each.bind(("127.0.0.1", port + number))
            return port
        except (OSError, OverflowError):
            continue
        finally:
            for each in sockets:
                each.close()
