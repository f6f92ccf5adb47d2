"""Functions that ranks run in tests. Nothing here imports torch, so that ranks start fast."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from multiprocessing import util
from pathlib import Path
from time import monotonic
from typing import Any


def write_environment(local_rank: int, folder: str) -> None:
    """Writes the rank's environment to a file."""
    Path(folder, str(local_rank)).write_text(repr((dict(os.environ), sorted(os.sched_getaffinity(0)))))


def add_seed(local_rank: int, generator: Any, shared: Any) -> None:
    """Adds the seed of a generator to a shared number."""
    with shared.get_lock():
        shared.value += generator.initial_seed()


def write_lines(local_rank: int) -> None:
    """Writes a line on each stream, the second without a newline."""
    print("out", local_rank)
    print("err", local_rank, end="", file=sys.stderr)


def fail(local_rank: int, how: str, barrier: Any, folder: str) -> None:
    """Fails in rank 1 when all ranks run; the others wait."""
    barrier.wait()
    if local_rank != 1:
        signal.pause()
    Path(folder, "time").write_text(repr(monotonic()))
    if how == "exception":
        raise ValueError("the sample is 7 years old")
    if how == "exit":
        os._exit(7)
    if how == "SystemExit":
        sys.exit(9)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.Signals[how])


def ignore_sigterm(local_rank: int, barrier: Any) -> None:
    """Ignores SIGTERM in rank 0 and fails in rank 1."""
    if local_rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    barrier.wait()
    if local_rank == 1:
        raise ValueError("broken")
    while True:
        signal.pause()


def fail_slowly(local_rank: int, barrier: Any, folder: str) -> None:
    """Writes a file in rank 0 on SIGTERM; fails in rank 1, whose exit takes until rank 0 has ended."""

    def leave(*_: Any) -> None:
        Path(folder, "left").touch()
        sys.exit(0)

    def outlive() -> None:
        if select.select([pidfd], [], [], 60.0)[0]:
            Path(folder, "outlived").touch()

    signal.signal(signal.SIGTERM, leave)
    if local_rank == 0:
        Path(folder, "pid").write_text(str(os.getpid()))
    barrier.wait()
    if local_rank == 1:
        pidfd = os.pidfd_open(int(Path(folder, "pid").read_text()))
        util.Finalize(None, outlive, exitpriority=1)
        raise ValueError("broken")
    signal.pause()


def stay(local_rank: int, folder: str, how: str = "idle") -> None:
    """Reports that the rank runs, and stays."""
    _up(folder, local_rank)
    if how == "in C":
        ctypes.PyDLL(None).sleep(300)  # holds the interpreter's lock during the sleep
    signal.pause()


def _up(folder: str, local_rank: int) -> None:
    path = Path(folder, f"up {local_rank}")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def meet(local_rank: int) -> None:
    """Serves the meeting point in rank 0, as torch's store does; the other ranks connect."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if local_rank == 0:
        with socket.create_server(address) as server:
            for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
                server.accept()[0].close()
        return
    deadline = monotonic() + 60
    while monotonic() < deadline:
        try:
            socket.create_connection(address).close()
            return
        except ConnectionRefusedError:
            pass
    raise TimeoutError


def write_many_lines(local_rank: int, num_lines: int) -> None:
    """Writes many lines on both streams alternately."""
    for number in range(num_lines):
        print(f"{local_rank} out {number} " + "x" * (number % 97))
        print(f"{local_rank} err {number} " + "x" * (number % 89), file=sys.stderr)


def write_forever_or_fail(local_rank: int) -> None:
    """Writes more in rank 0 than anything reads; fails in rank 1."""
    if local_rank == 1:
        raise ValueError("broken")
    while True:
        print("y" * 1000)


def nest(local_rank: int) -> None:
    """Runs a launcher inside a rank."""
    import shmload

    outer = os.environ["MASTER_PORT"]
    shmload.spawn(write_nested_environment, (outer,), nprocs=2)


def write_nested_environment(local_rank: int, outer_port: str) -> None:
    """Writes the environment of a rank inside a rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    print(*(os.environ[name] for name in names), os.environ["MASTER_PORT"] != outer_port)


def leave_a_child(local_rank: int, barrier: Any, folder: str) -> None:
    """Starts a program in rank 0 that nothing else would end; fails in rank 1 once it runs."""
    if local_rank == 0:
        Path(folder, "child").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    barrier.wait()
    if local_rank == 1:
        raise ValueError("broken")
    signal.pause()


def ignore(local_rank: int, folder: str) -> None:
    """Stays and ignores every signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stay(local_rank, folder)


def stay_until_sigterm(local_rank: int, folder: str) -> None:
    """Stays until SIGTERM, and records it."""

    def leave(*_: Any) -> None:
        Path(folder, f"left {local_rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    stay(local_rank, folder)
