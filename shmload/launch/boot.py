"""The program that a rank's process runs before the user's program: `python -I -S boot.py LAUNCHER_PID CPUS LOGS COMMAND...`.

CPUS are the processors of one rank, "0,1", or of each local rank, "0,1;2,3", because torch's agent starts all ranks of a machine
with one command line. LOGS is a folder for the output; if empty, the output goes where the launcher sends it.

It imports nothing of shmload, because it delays every rank; so it takes 16 ms. The death signal and the affinity that it sets
survive the exec. The death signal is sent when the *thread* that started this process ends, so the launcher starts ranks in the
thread that watches them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1  # prctl(2)


def bind(launcher_pid: int, cpus: Iterable[int]) -> None:
    """Make this process die with its launcher, and bind it to its processors.

    Args:
        launcher_pid: process id of the launcher, the parent of this process.
        cpus: the processors; empty for no binding.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # the launcher died before prctl
        os._exit(1)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:  # the cpuset has changed since the launcher read it: run anywhere
            pass


if __name__ == "__main__":
    launcher_pid, table, logs, *command = sys.argv[1:]
    shares = table.split(";")
    own = [int(cpu) for cpu in shares[int(os.environ["LOCAL_RANK"]) if shares[1:] else 0].split(",") if cpu]
    bind(int(launcher_pid), own)
    if own:
        os.environ["SHMLOAD_RANK_CPUS"] = str(len(own))  # OWN_CPUS in shmload.processes.ranks
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if logs:
        log = os.open(f"{logs}/rank_{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.execvp(command[0], command)
