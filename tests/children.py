"""Children that run a few lines of Python, answer line by line on stdout, and go on when they are given a line."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def python(code: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """A process that runs `code`; its answers come line by line from its stdout."""
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
    """Such a process, which is killed in the end."""
    child = python(code, *arguments)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def says(child: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go_on(child: subprocess.Popen[str]) -> None:
    """Gives it a line."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def waits_for_a_lock(child: subprocess.Popen[str]) -> bool:
    """As the kernel tells: a blocked lock stands in /proc/locks behind an arrow. It must not have said a word."""
    assert not select.select([child.stdout], [], [], 0)[0]
    with open("/proc/locks") as locks:
        return any("->" in line and f" {child.pid} " in line for line in locks)
