"""The time in which a worker process computed, or waited for a processor: the rest of its work is waiting for storage."""

from __future__ import annotations

from shmload.processes.proc_stat import cpu_ns


def runnable_ns(pid: int) -> int | None:
    """Return how long a process has computed since it began, and its first thread has waited for a processor.

    Several threads that compute at once count several times. Time in which a CPU quota was used up counts as waiting.

    Args:
        pid: the process; it may be another user's.
    Returns:
        nanoseconds; None if the process has ended, or the system does not tell.
    Cost: 10 us.
    """
    try:
        computed = cpu_ns(pid)
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:  # nanoseconds on a processor, and waiting for one
            return computed + int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
