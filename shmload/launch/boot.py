"""What a rank's process runs before it becomes the rank's program: `python -I -S boot.py LAUNCHER_PID CPUS LOGS COMMAND...`.

CPUS are a rank's processors, "0,1", or those of each local rank, "0,1;2,3": torch's agent starts all of a machine by one command
line. LOGS is a folder for the output, or empty: it goes where the launcher has sent it.

It imports nothing of shmload, since it runs before every rank, in 16 ms. Both things it asks of the kernel outlast the exec. The
death signal comes when the *thread* that started this process ends: the launcher starts ranks in the thread that watches them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1  # prctl(2)


def bind(launcher_pid: int, cpus: Iterable[int]) -> None:
    """Ties this process to its launcher's life and, if there are any, to its processors."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before the kernel was asked
        os._exit(1)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:  # the cpuset has changed since the launcher looked: then wherever it may run
            pass


if __name__ == "__main__":
    launcher_pid, table, logs, *command = sys.argv[1:]
    shares = table.split(";")
    own = [int(cpu) for cpu in shares[int(os.environ["LOCAL_RANK"]) if shares[1:] else 0].split(",") if cpu]
    bind(int(launcher_pid), own)
    if own:
        os.environ["SHMLOAD_RANK_CPUS"] = str(len(own))  # OWN_CPUS in shmload.world
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if logs:
        log = os.open(f"{logs}/rank_{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.execvp(command[0], command)
