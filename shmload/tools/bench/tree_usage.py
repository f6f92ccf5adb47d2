"""CPU and memory of a process and all below it, as the kernel reports them.

CPU: a process's own clock has nanoseconds, /proc/PID/stat only ticks of 10 ms; the ticks are used for children that have been
reaped. Memory: the proportional set size (proc_pid_smaps(5)), in which a page shared by n processes counts 1/n in each, so that a
sum over the tree counts it once.
"""

import os
import resource
import time
from pathlib import Path

from shmload.processes.proc_stat import PARENT, REAPED_TICKS, cpu_ns, stat_of

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Return the process ids of everything below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat_of(name)[PARENT]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it ended between listing and reading
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def tree_cpu_s() -> float:
    """Return the CPU seconds used so far by this process and all below it, reaped ones included."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + dead.ru_utime + dead.ru_stime
    for pid in descendants(os.getpid()):
        try:
            fields = stat_of(pid)
            total += cpu_ns(pid) / 1e9 + sum(map(int, fields[REAPED_TICKS])) * TICK_S
        except (OSError, IndexError):
            continue
    return total


def tree_pss_bytes(root: int) -> int:
    """Return the proportional set size of `root` and all below it, without mapped files, which belong to the page cache."""
    total = 0
    for pid in [root, *descendants(root)]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        total += (sizes.get("Pss", 0) - sizes.get("Pss_File", 0)) * 1024
    return total
