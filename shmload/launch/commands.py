"""A rank as a command: `shmload launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shmload.launch.seat import Child, Ends, Seat

_BOOT = str(Path(__file__).with_name("boot.py"))


def booted(command: Sequence[str], seat: Seat, ends: Ends, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a command as a rank: tied to this thread, in a process group of its own.

    The terminal's ^C goes to the foreground's group alone: it reaches the launcher, which decides what becomes of the ranks.

    Args:
        keep: descriptors that the command inherits besides.
    """
    return subprocess.Popen(
        [
            sys.executable,
            *("-I", "-S", _BOOT),
            str(os.getpid()),
            ",".join(map(str, seat.cpus)),
            *command,
        ],
        stdin=subprocess.DEVNULL,
        stdout=ends.stdout,
        stderr=ends.stderr,
        pass_fds=keep,
        env=seat.environ,
        process_group=0,
    )


class Command:
    """Runs a command line in each rank."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def start(self, seat: Seat, ends: Ends) -> Child:
        """Starts the command of a rank."""
        process = booted(self._command, seat, ends)
        return Child(process.pid, process.wait)
