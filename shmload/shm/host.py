"""Read the properties of a host from /proc, /sys and the environment. Tests can pass the root of another host's files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    """A resource limit; None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Host:
    """A host, read through its files.

    Attributes:
        root: the root of its file system.
        environ: the environment variables of a training run there.
        pid: the process's id in its own PID namespace.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pid: int = field(default_factory=os.getpid)

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding white space, or None if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def room(self, path: str) -> tuple[int, int] | None:
        """Return the total and free bytes of a folder's file system, or None if there is no such folder."""
        try:
            status = os.statvfs(self.root / path)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def limit(self, name: str) -> Limit | None:
        """Return a row of /proc/self/limits, by its name there, or None if it is missing."""
        for line in (self.text("proc/self/limits") or "").splitlines():
            if line.startswith(name):
                soft, hard, *_ = line[len(name) :].split()
                return Limit(*(None if word == "unlimited" else int(word) for word in (soft, hard)))
        return None

    def status(self, name: str) -> str | None:
        """Return a row of /proc/self/status, or None if it is missing."""
        for line in (self.text("proc/self/status") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
        return None


def parse_list(ranges: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
