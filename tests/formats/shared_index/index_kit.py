"""Datasets that contain an index, rows of every kind, and measurements of memory from inside a process.

A plain module beside the tests (conftest puts it on the path), so that workers of every start method can import it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

from shmload import SharedIndex


class Photo(NamedTuple):
    """A row with named fields."""

    path: str
    label: int


class Files:
    """A dataset as users write it, with an index among other attributes."""

    def __init__(self, n: int) -> None:
        self.paths = SharedIndex(path_of(i) for i in range(n))
        self.labels = SharedIndex.from_columns({"label": range(n)}).column("label")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.paths[index], int(self.paths.take([index])[0][-12:-4])


def path_of(index: int) -> str:
    return f"/data/photos/train/n{index % 1000:08d}/photo_{index:08d}.jpg"


def growth_of_epoch(entries: Sequence[Any]) -> int:
    """Returns the bytes of private memory that a forked child gains by reading every entry once, in random order."""
    n, stride = len(entries), 7919
    assert n % stride
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = private_bytes()
            for position in range(n):
                len(entries[position * stride % n])
            os.write(writer, str(private_bytes() - before).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return int(answer)


def private_bytes() -> int:
    """Returns this process's memory that is not shared with other processes."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def gone_within(paths: Sequence[str | os.PathLike[str]], seconds: float) -> bool:
    """Waits until none of the files exists. Returns whether that happened in time."""
    deadline, pause = monotonic() + seconds, threading.Event()
    while (left := any(map(os.path.exists, paths))) and monotonic() < deadline:
        pause.wait(0.01)
    return not left
