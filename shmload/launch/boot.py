"""What a rank's process runs before it becomes the rank's program: `python -I -S boot.py LAUNCHER_PID CPUS COMMAND...`.

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
    bind(int(sys.argv[1]), [int(cpu) for cpu in sys.argv[2].split(",") if cpu])
    os.execv(sys.argv[3], sys.argv[3:])
