"""Checks of processors: how many this process may use, and how many threads its libraries will start."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from shmload.observe.doctor.finding import Finding
from shmload.observe.doctor.host import Host, listed
from shmload.shm import cgroups


def check_processors(host: Host) -> Iterator[Finding]:
    """Affinity and cgroup quota against what the machine has."""
    online, allowed = _counts(host)
    quota = cgroups.cpus(host.root)
    if allowed < online:
        yield Finding(
            "processors",
            "advice",
            f"this process may run on {allowed} of {online}: more workers than that take turns",
            "If that is not meant, look at taskset, docker run --cpuset-cpus, or torchrun's and Slurm's binding",
        )
    else:
        yield Finding("processors", "good", f"all {online} may be used")
    if quota is not None and quota < allowed:
        yield Finding(
            "processors",
            "advice",
            f"the cgroup gives {quota:g} processors' time, while {allowed} are to be seen: workers that use more are "
            "stopped for parts of each period, and waits become uneven",
            f"num_workers={max(ceil(quota), 1)} or fewer, or a larger quota (docker run --cpus, resources.limits.cpu)",
        )


def check_threads(host: Host) -> Iterator[Finding]:
    """How many threads numpy and torch start in the trainer; workers always run with one."""
    _, allowed = _counts(host)
    quota = cgroups.cpus(host.root)
    usable = allowed if quota is None else min(max(ceil(quota), 1), allowed)
    setting = host.environ.get("OMP_NUM_THREADS", "")
    if setting and not setting.split(",")[0].isdigit():
        yield Finding("threads", "advice", f"OMP_NUM_THREADS={setting!r} is no number and is ignored", "Set a number")
        return
    threads = int(setting.split(",")[0]) if setting else allowed
    told = f"OMP_NUM_THREADS={threads}" if setting else "OMP_NUM_THREADS is not set"
    if threads > usable:
        yield Finding(
            "threads",
            "advice",
            f"{told}: the trainer's libraries start {threads} threads for {usable} processors' time, and take them from workers",
            f"OMP_NUM_THREADS={usable}",
        )
    else:
        yield Finding("threads", "good", f"{told}; workers run with one each")


def _counts(host: Host) -> tuple[int, int]:
    """Processors online, and those among them that this process may run on."""
    online = listed(host.text("sys/devices/system/cpu/online") or "")
    allowed = listed(host.status("Cpus_allowed_list") or "")
    count = len(allowed & online if online else allowed) or len(online) or 1
    return max(len(online), count), count
