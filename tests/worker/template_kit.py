"""Code for worker processes of these tests, and programs that start workers. Does not import torch."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = resource.RLIMIT_CORE


class Rows:
    """Sample i is an array of i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return np.full(4, i)


def private_mib(pid: int | str = "self") -> float:
    """Returns the private memory of a process in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024


def send_report(channel: Connection) -> None:
    """Sends what this process has and where it comes from."""
    parent = multiprocessing.parent_process()
    channel.send(
        {
            "ppid": os.getppid(),
            "parent": parent and parent.pid,
            "name": multiprocessing.current_process().name,
            "is_daemon": multiprocessing.current_process().daemon,
            "authkey": bytes(multiprocessing.current_process().authkey),
            "method": multiprocessing.get_start_method(),
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
            "path": sys.path,
            "argv": sys.argv,
            "umask": os.umask(0),
            "limit": resource.getrlimit(LIMIT),
            "ignores_usr1": signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN,
            "takes_int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
            "affinity": os.sched_getaffinity(0),
            "output": os.readlink("/proc/self/fd/1"),
            "modules": sorted(sys.modules),
            "random": [random.random(), np.random.random()],
            "private_mib": private_mib(),
            "descriptors": sorted(os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.exists(entry)),
        }
    )
    channel.close()


def write_at_exit(path: str, word: str) -> None:
    """Writes a word to a file when the process ends, and an unflushed one to its output."""
    atexit.register(lambda: Path(path).write_text(word))
    sys.stdout.write(word)


def wait_for(channel: Connection) -> None:
    """Reports that it has started and waits for a message."""
    channel.send("up")
    channel.recv()
