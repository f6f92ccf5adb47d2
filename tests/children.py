"""Child processes that run a few lines of Python, print answers line by line, and continue when they are sent a line."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def python(code: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Starts a process that runs `code` and prints its answers line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
    )


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs such a process and kills it at the end of the block."""
    child = python(code, *arguments)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def read_line(child: subprocess.Popen[str]) -> str:
    """Returns the child's next line."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def send_line(child: subprocess.Popen[str]) -> None:
    """Sends the child a line."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def waits_for_a_lock(child: subprocess.Popen[str]) -> bool:
    """Returns whether the child waits for a file lock, which /proc/locks marks with an arrow. It must not have printed anything."""
    assert not select.select([child.stdout], [], [], 0)[0]
    with open("/proc/locks") as locks:
        return any("->" in line and f" {child.pid} " in line for line in locks)
