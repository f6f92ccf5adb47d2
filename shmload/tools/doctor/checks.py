"""Checks of the host: versions, compiled modules, the kernel, memory, processors, and what a process is limited to."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Literal

from shmload.shm import segment
from shmload.shm.host import Host, listed

Level = Literal["good", "advice", "problem"]


@dataclass(frozen=True)
class Finding:
    """One sentence about the host.

    Attributes:
        check: what was looked at.
        level: "problem": something fails; "advice": it works, and could be better or deserves a look; "good".
        text: what was found and, unless it is good, what comes of it.
        remedy: what to change; empty if nothing needs to be.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def mib(nbytes: int) -> str:
    """Bytes as people say them."""
    return f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.0f} MiB"


FEW_FILES = 256  # torch and Python take some ten, a loader two, each worker two, each shard that is read another
FEW_PROCESSES = 64  # beside those that run: threads count, and torch starts one for each core


def check_open_files(host: Host) -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    limit = host.limit("Max open files")
    if limit is None or limit.soft is None:
        yield Finding("open files", "good", "not limited")
    elif limit.soft < FEW_FILES:
        yield Finding(
            "open files",
            "advice",
            f"{limit.soft} descriptors: a loader of few workers gets by, many workers or open shards end in "
            '"Too many open files"',
            "ulimit -n 4096, or docker run --ulimit nofile=4096:4096",
        )
    else:
        yield Finding("open files", "good", f"{limit.soft:,} descriptors")


def check_locked_memory(host: Host) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK: shmload locks nothing, so it is only told."""
    limit = host.limit("Max locked memory")
    told = "not limited" if limit is None or limit.soft is None else f"{mib(limit.soft)} may be locked"
    yield Finding("locked memory", "good", f"{told}; a loader locks none")


def check_processes(host: Host) -> Iterator[Finding]:
    """How many processes and threads may still be started: RLIMIT_NPROC, and the cgroups' own limits."""
    rests = []
    for _, folder in segment.folders("pids", host.root):
        most, used = segment.number(folder / "pids.max"), segment.number(folder / "pids.current")
        if most is not None and used is not None:
            rests.append(most - used)
    rest = min(rests, default=None)
    if rest is not None and rest < FEW_PROCESSES:
        yield Finding(
            "processes",
            "advice",
            f"the cgroup lets {max(rest, 0)} more processes and threads start: workers beyond that fail to start",
            "Raise it (docker run --pids-limit), or lower num_workers and OMP_NUM_THREADS",
        )
        return
    limit = host.limit("Max processes")
    if limit is not None and limit.soft is not None and limit.soft < FEW_PROCESSES:
        yield Finding(
            "processes",
            "advice",
            f"this user may run {limit.soft} processes and threads in all: workers beyond that fail to start",
            "ulimit -u 4096, or lower num_workers and OMP_NUM_THREADS",
        )
        return
    yield Finding("processes", "good", "enough may be started")


LITTLE_NBYTES = 1 << 30


def check_free_memory(host: Host) -> Iterator[Finding]:
    """What the machine has left."""
    free = segment.free_memory_bytes(host.root)
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
    found = segment.memory(host.root)
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


def check_processors(host: Host) -> Iterator[Finding]:
    """Affinity and cgroup quota against what the machine has."""
    online, allowed = _counts(host)
    quota = segment.cpus(host.root)
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
    quota = segment.cpus(host.root)
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


OLDEST_VERSIONS = {"torch": (2, 13), "numpy": (2, 0), "posix_ipc": (1, 1)}


def check_versions(
    find: Callable[[str], str] = version, python: tuple[int, ...] = sys.version_info[:3]
) -> Iterator[Finding]:
    """Python and what shmload stands on."""
    told = [f"Python {'.'.join(map(str, python))}"]
    if python < (3, 11):
        yield Finding("versions", "problem", f"{told[0]} is too old", "Python 3.11 or newer")
    for name, oldest in OLDEST_VERSIONS.items():
        try:
            found = find(name)
        except PackageNotFoundError:
            yield Finding("versions", "problem", f"{name} is not installed", f"pip install {name}")
            continue
        told.append(f"{name} {found}")
        if _numbers(found) < oldest:
            needed = ".".join(map(str, oldest))
            yield Finding("versions", "problem", f"{name} {found} is too old", f"pip install '{name}>={needed}'")
    yield Finding("versions", "good", ", ".join(told))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def check_compiled(folder: Path, load: Callable[[str], ModuleType] = importlib.import_module) -> Iterator[Finding]:
    """Whether every compiled module is there and is of the same build as the Python around it: its stub says what it must have."""
    missing, stale = [], []
    stubs = sorted(folder.glob("*.pyi"))
    for stub in stubs:
        try:
            module = load(f"shmload._core.{stub.stem}")
        except ImportError:
            missing.append(stub.stem)
            continue
        if any(not _has(module, name) for name in _declared(stub)):
            stale.append(stub.stem)
    if missing:
        yield Finding(
            "compiled modules",
            "problem",
            f"{', '.join(missing)}: missing, or built for another Python or C library",
            "Install shmload anew (pip install --force-reinstall), or build the source tree: pip install -e .",
        )
    if stale:
        yield Finding(
            "compiled modules",
            "problem",
            f"{', '.join(stale)}: of another version than the Python around",
            "Install shmload anew (pip install --force-reinstall), or build the source tree: pip install -e .",
        )
    if not missing and not stale:
        yield Finding("compiled modules", "good", f"all {len(stubs)} are there and match")


def _declared(stub: Path) -> Iterator[str]:
    """The public names of a stub, members of classes as "class.member"."""
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}"


def _has(module: ModuleType, name: str) -> bool:
    value: object = module
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def check_start_method(has_gpu: bool, method: str | None = None) -> Iterator[Finding]:
    """How workers start if nobody says otherwise."""
    method = method or multiprocessing.get_start_method()
    if method == "fork" and has_gpu:
        yield Finding(
            "start method",
            "advice",
            "fork, Python's own here: workers that are forked after CUDA was used, or while other threads run, may hang",
            'multiprocessing_context="forkserver", or take the first batch before CUDA is used',
        )
    elif method == "fork":
        yield Finding("start method", "good", "fork: the quickest, as long as no other threads run when workers start")
    else:
        yield Finding(
            "start method", "good", f"{method}: workers inherit nothing by chance; datasets must be picklable"
        )


OLDEST_KERNEL = (5, 3)  # pidfd_open, by which workers and trainer see each other's end


def check_kernel(host: Host) -> Iterator[Finding]:
    """Whether it has what supervision needs."""
    release = host.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield Finding("kernel", "advice", "its version cannot be read", "Mount /proc")
    elif (int(match[1]), int(match[2])) < OLDEST_KERNEL:
        yield Finding(
            "kernel",
            "problem",
            f"Linux {release} has no pidfd_open: no worker can start",
            f"Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer",
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
