"""Start a rank by fork: it has a copy of the memory of the launcher."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.context import ForkProcess
from typing import Any

from shmload.launch import boot, in_rank
from shmload.launch.rank_specs import Ends, RankSpec
from shmload.launch.signals import SIGNALS
from shmload.processes.child import Child


def start_forked(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Start a rank that calls `fn(local_rank, *args)`, by fork.

    Args:
        fn: the rank's function.
        args: its arguments after the local rank.
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
    """
    target = (rank_spec, ends, os.getpid(), fn, args)
    # Popen and not a started Process, because multiprocessing would reap that whenever it starts another one
    process = popen_fork.Popen(ForkProcess(target=_forked, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))

    def reap() -> int:
        code = process.wait()
        process.close()
        return code or 0

    return Child(process.pid, reap)


def _forked(rank_spec: RankSpec, ends: Ends, launcher_pid: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Do in a forked rank what boot.py and exec do in a spawned one, and call the function."""
    os.setpgid(0, 0)
    boot.bind(launcher_pid, rank_spec.cpus)
    for caught in SIGNALS:
        if callable(signal.getsignal(caught)):  # a handler that the launcher has installed
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # the launcher's program may have replaced sys.stdout or sys.stderr
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # for the lifetime of the process
    faulthandler.disable()  # otherwise handlers that the program has replaced would stay
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(rank_spec.environ)
    threads = rank_spec.environ.get("OMP_NUM_THREADS", str(len(rank_spec.cpus)))
    if "torch" in sys.modules and threads.isdecimal() and int(threads):  # torch has counted the launcher's processors
        sys.modules["torch"].set_num_threads(int(threads))
    in_rank.main(fn, args, rank_spec.local_rank, ends.report)
