"""Checks of memory: what is free on the machine, and what its cgroups leave to this process."""

from __future__ import annotations

from collections.abc import Iterator

from shmload.observe.doctor.finding import Finding, mib
from shmload.observe.doctor.host import Host
from shmload.shm import cgroups, preflight

LITTLE_NBYTES = 1 << 30


def check_free_memory(host: Host) -> Iterator[Finding]:
    """What the machine has left."""
    free = preflight.free_memory_bytes(host.root)
    if free >= 1 << 62:
        yield Finding(
            "memory",
            "advice",
            "/proc/meminfo cannot be read: whether a ring fits is not known before it is touched",
            "Mount /proc",
        )
    elif free < LITTLE_NBYTES:
        yield Finding(
            "memory",
            "advice",
            f"only {mib(free)} are free: a ring that does not fit is refused",
            "Free memory, or lower prefetch_factor, num_workers or batch_size",
        )
    else:
        yield Finding("memory", "good", f"{mib(free)} are free")


def check_cgroup_memory(host: Host) -> Iterator[Finding]:
    """The tightest memory limit that this process is under. Shared memory counts against it."""
    found = cgroups.memory(host.root)
    if not found:
        yield Finding("cgroup memory", "good", "no cgroup limits it")
        return
    tightest = min(found, key=lambda cgroup: cgroup.rest)
    told = (
        f"{mib(tightest.used)} of {mib(tightest.limit)} are used (cgroup v{tightest.version}), shared memory counts; "
        f"{mib(tightest.rest)} are left"
    )
    if tightest.rest < min(LITTLE_NBYTES, tightest.limit / 4):
        yield Finding(
            "cgroup memory",
            "advice",
            f"{told}: a larger ring is refused, and beyond it the kernel kills a process of the container",
            "Raise the container's limit (docker run --memory, resources.limits.memory), or lower prefetch_factor, "
            "num_workers or batch_size",
        )
    else:
        yield Finding("cgroup memory", "good", told)
