"""CPU time and memory of a process and everything below it, read from the kernel without a further package.

CPU: a process' own clock has nanoseconds (clock_getcpuclockid(3) makes its id from the pid), /proc/PID/stat only 10
ms ticks; the ticks serve for children that are dead and reaped. Memory: proportional set size (proc_pid_smaps(5)), in
which a page shared by n processes counts 1/n in each, so that a sum over the tree counts it once.
"""

import os
import resource
import time
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (field 3 of proc_pid_stat(5) is element 0)."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat(int(name))[1]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it ended between the listing and the reading
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def clock_s(pid: int) -> float:
    """CPU seconds of a process, dead threads included."""
    return time.clock_gettime((~pid << 3) | 2)


def tree_cpu_s() -> float:
    """CPU seconds used so far by this process and all below it, the dead ones included."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + dead.ru_utime + dead.ru_stime
    for pid in descendants(os.getpid()):
        try:
            fields = stat(pid)
            total += clock_s(pid) + (int(fields[13]) + int(fields[14])) * TICK_S
        except (OSError, IndexError):
            continue
    return total


def host_cpu_s() -> float:
    """CPU seconds used so far by everything on the machine, as proc_stat(5) counts them; what a hypervisor took not."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:8])
    return (user + nice + system + irq + softirq) * TICK_S


def run_delay_s() -> float:
    """Seconds this thread has waited for a core so far (/proc/thread-self/schedstat); 0 on a kernel that does not count them.

    A thread that only computes is not taken for one that waits for its data because the machine is busy.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def tree_pss_bytes(root: int) -> int:
    """Proportional set size of `root` and all below it, without pages of mapped files: those are the page cache's."""
    total = 0
    for pid in [root, *descendants(root)]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        total += (sizes.get("Pss", 0) - sizes.get("Pss_File", 0)) * 1024
    return total
