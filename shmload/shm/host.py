"""This host as /proc, /sys and the environment tell of it, under any root, so that another host can be stood in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    """A resource limit; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Host:
    """Where checks look.

    Attributes:
        root: of the file system.
        environ: the environment variables a training would have.
        pid: this process's, in its own PID namespace.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pid: int = field(default_factory=os.getpid)

    def text(self, path: str) -> str | None:
        """A file's text without the white space around it; None if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def room(self, path: str) -> tuple[int, int] | None:
        """Bytes of the file system that a folder lies in: all, and free; None if there is none."""
        try:
            status = os.statvfs(self.root / path)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def limit(self, name: str) -> Limit | None:
        """One row of /proc/self/limits, by its words there; None if it is not told."""
        for line in (self.text("proc/self/limits") or "").splitlines():
            if line.startswith(name):
                soft, hard, *_ = line[len(name) :].split()
                return Limit(*(None if word == "unlimited" else int(word) for word in (soft, hard)))
        return None

    def status(self, name: str) -> str | None:
        """One row of /proc/self/status."""
        for line in (self.text("proc/self/status") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
        return None


def listed(ranges: str) -> set[int]:
    """The numbers of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
