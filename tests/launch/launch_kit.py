"""Waits for ranks of launchers that run in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

Run = Callable[..., "subprocess.Popen[str]"]
UP_S = 60.0  # time for interpreters to start on a busy machine


def wait_for_ranks(folder: Path, count: int, launcher: subprocess.Popen[str]) -> list[int]:
    """Returns the process ids of the ranks in rank order, once `count` ranks have reported that they run."""
    deadline, pause = monotonic() + UP_S, threading.Event()
    paths = [folder / f"up {rank}" for rank in range(count)]
    while not all(path.exists() for path in paths):
        assert launcher.poll() is None, launcher.communicate()
        assert monotonic() < deadline, "ranks have not started"
        pause.wait(0.01)
    return [int(path.read_text()) for path in paths]


def all_end(pids: Iterable[int], timeout_s: float = UP_S) -> bool:
    """Returns whether the processes end in time; a zombie counts as ended."""
    deadline = monotonic() + timeout_s
    ended = True
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended &= bool(select.select([pidfd], [], [], max(deadline - monotonic(), 0))[0])
        os.close(pidfd)
    return ended


def assert_signal_ends_ranks(launcher: subprocess.Popen[str], pids: list[int], number: signal.Signals) -> None:
    """Sends a signal to the launcher's process group, as a terminal does, and checks that both ranks end in order."""
    assert pids == [os.getpgid(pid) for pid in pids], "the terminal's ^C must not reach them"
    os.killpg(launcher.pid, number)
    message = f"shmload launch: stopped by {number.name}; ranks 0 and 1 ended when asked to (SIGTERM)\n"
    assert launcher.communicate(timeout=120) == ("", message)
    assert launcher.returncode == 128 + number
    assert all_end(pids, 0)
