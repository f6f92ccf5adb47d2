"""Checks of the system: kernel, /proc, PID 1, the reaper's tools, GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from shmload.observe.doctor.finding import Finding
from shmload.observe.doctor.host import Host

OLDEST = (5, 3)  # pidfd_open, by which workers and trainer see each other's end


def check_kernel(host: Host) -> Iterator[Finding]:
    """Whether it has what supervision needs."""
    release = host.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield Finding("kernel", "advice", "its version cannot be read", "Mount /proc")
    elif (int(match[1]), int(match[2])) < OLDEST:
        yield Finding(
            "kernel",
            "problem",
            f"Linux {release} has no pidfd_open: no worker can start",
            f"Linux {OLDEST[0]}.{OLDEST[1]} or newer",
        )
    else:
        yield Finding("kernel", "good", f"Linux {release}")


def check_proc(host: Host) -> Iterator[Finding]:
    """Whether /proc is there, and is that of this PID namespace."""
    number = host.status("Pid")
    if number is None:
        yield Finding(
            "/proc",
            "problem",
            "it is not mounted: a ring in a memfd cannot be opened by workers, and limits cannot be read",
            "mount -t proc proc /proc",
        )
    elif int(number) != host.pid:
        yield Finding(
            "/proc",
            "advice",
            f"it is an outer PID namespace's (there this is process {number}, here {host.pid}): rings work, tools like ps and top "
            "mislead",
            "Mount one of this namespace: unshare --mount-proc",
        )
    else:
        yield Finding("/proc", "good", "it is this PID namespace's")


def check_pid_1(host: Host) -> Iterator[Finding]:
    """Whether signals and orphans are seen to, if a training is a container's first process."""
    if host.pid == 1 or (host.text("proc/1/comm") or "").startswith("python"):
        yield Finding(
            "PID 1",
            "advice",
            "Python is this container's first process: SIGTERM does nothing to it unless it has a handler, so that an orderly stop "
            "becomes a kill; and nobody buries orphans (a loader buries its own workers)",
            "Start the container with an init: docker run --init, or tini",
        )
    else:
        yield Finding("PID 1", "good", "it is no Python program")


def check_reaper(host: Host) -> Iterator[Finding]:
    """What removes names when a trainer is killed."""
    path = host.environ.get("PATH", "/usr/bin:/bin")
    if not (host.root / "bin/sh").exists():
        yield Finding(
            "reaper",
            "advice",
            "there is no /bin/sh: what a killed trainer leaves in /dev/shm stays until the next loader starts",
            "Install a shell, or run shmload clean --yes after kills",
        )
    elif shutil.which("flock", path=":".join(f"{host.root}/{part.lstrip('/')}" for part in path.split(":"))) is None:
        yield Finding(
            "reaper",
            "advice",
            "there is no flock command: of a killed trainer with a SharedIndex a few hundred bytes stay until the next start",
            "Install util-linux or busybox",
        )
    else:
        yield Finding("reaper", "good", "a killed trainer's memory is removed at once")


def has_gpu(host: Host) -> bool:
    """Whether a driver shows one."""
    return (host.root / "dev/kfd").exists() or any((host.root / "dev").glob("nvidia[0-9]*"))


def check_gpu(host: Host, torch_cuda: str | None) -> Iterator[Finding]:
    """Whether there is a GPU, and whether torch could use it."""
    devices = list((host.root / "dev").glob("nvidia[0-9]*"))
    if not has_gpu(host):
        yield Finding("GPU", "good", "there is none; loaders work without")
    elif devices and torch_cuda is None:
        yield Finding(
            "GPU",
            "advice",
            f"{len(devices)} from NVIDIA, and this torch was built without CUDA: it will not be used",
            "Install a torch with CUDA",
        )
    else:
        yield Finding("GPU", "good", f"{len(devices)} from NVIDIA" if devices else "one or more from AMD")
