"""The checks of `shmload doctor`: what on this host would break or slow down a loader.

A check returns a sentence if all is well, else `advice` or a `problem` with a remedy; `examine` makes all checks in the table
`CHECKS`. Checks read files below `Host.root` where they can, so that tests can substitute another host.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Literal

import shmload
from shmload.shm import cgroups, janitor
from shmload.shm.doorbell import Doorbell
from shmload.shm.free_memory import free_memory_bytes
from shmload.shm.host import Host, parse_list
from shmload.shm.names import new_stem
from shmload.shm.segment import Segment, try_memfd
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted

Level = Literal["good", "advice", "problem"]


@dataclass(frozen=True)
class Finding:
    """One sentence about the host.

    Attributes:
        check: the name of the check.
        level: "problem" if something fails; "advice" if it works but could be better or should be checked; "good" otherwise.
        text: what was found and, unless it is good, the consequence.
        remedy: what to change; empty if nothing.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""


CheckResult = str | tuple[Level, str, str]  # a check's result: a sentence if all is well; else level, text and remedy


def advice(text: str, remedy: str) -> CheckResult:
    """Return the finding that something works, but could be better."""
    return "advice", text, remedy


def problem(text: str, remedy: str) -> CheckResult:
    """Return the finding that something fails."""
    return "problem", text, remedy


# ------------------------------------------------------------ software

OLDEST_VERSIONS = {"torch": (2, 6), "numpy": (1, 26), "posix_ipc": (1, 1)}


def check_versions(host: Host, find: Callable[[str], str] = version, python: tuple[int, ...] = sys.version_info[:3]) -> CheckResult:
    """Check the versions of Python and of shmload's dependencies."""
    versions = [f"Python {'.'.join(map(str, python))}"]
    wrong, remedies = [], []
    if python < (3, 11):
        wrong.append(f"{versions[0]} is too old")
        remedies.append("Python 3.11 or newer")
    for name, oldest in OLDEST_VERSIONS.items():
        if name == "posix_ipc" and python >= (3, 14):
            continue  # it has no wheel there, and doorbell.py does without it
        try:
            found = find(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            remedies.append(f"pip install {name}")
            continue
        versions.append(f"{name} {found}")
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            wrong.append(f"{name} {found} is too old")
            remedies.append(f"pip install '{name}>={'.'.join(map(str, oldest))}'")
    return problem("; ".join(wrong), "; ".join(remedies)) if wrong else ", ".join(versions)


CORE = Path(shmload.__file__).parent / "_core"


def check_compiled(host: Host, folder: Path = CORE, load: Callable[[str], object] = importlib.import_module) -> CheckResult:
    """Check that every compiled module can be imported. Their names are those of the stubs."""
    stubs = sorted(stub.stem for stub in folder.glob("*.pyi"))
    missing = [stub for stub in stubs if _fails(partial(load, f"shmload._core.{stub}"))]
    if missing:
        return problem(
            f"{', '.join(missing)}: missing, or built for another Python or C library",
            "Install shmload again (pip install --force-reinstall), or build the source tree: pip install -e .",
        )
    return f"all {len(stubs)} are there"


def _fails(attempt: Callable[[], object]) -> str:
    """Return the error message of a failed attempt; empty if it succeeds."""
    try:
        attempt()
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _gpus(host: Host) -> str:
    """Return which GPUs a driver shows, as text; empty if none."""
    num = len(list((host.root / "dev").glob("nvidia[0-9]*")))
    return f"{num} from NVIDIA" if num else "one or more from AMD" if (host.root / "dev/kfd").exists() else ""


def check_gpu(host: Host, cuda: Callable[[], object] = lambda: importlib.import_module("torch.version").cuda) -> CheckResult:
    """Check whether there is a GPU, and whether torch can use it."""
    found = _gpus(host)
    if "NVIDIA" in found and not cuda():
        return advice(f"{found}, and this torch was built without CUDA: it will not be used", "Install a torch with CUDA")
    return found or "no GPU; loaders work without one"


def check_start_method(host: Host, method: str | None = None) -> CheckResult:
    """Check the default start method of workers."""
    method = method or multiprocessing.get_start_method()
    if method != "fork":
        return f"{method}: workers inherit nothing from the trainer's memory; datasets must be picklable"
    if _gpus(host):
        return advice(
            "fork, Python's default here: workers that are forked after CUDA was used, or while other threads run, may hang",
            'multiprocessing_context="forkserver", or take the first batch before CUDA is used',
        )
    return "fork: the quickest, as long as no other threads run when workers start"


# ------------------------------------------------------------ the kernel, limits, memory, processors

OLDEST_KERNEL = (5, 3)  # pidfd_open, by which workers and trainer detect each other's end


def check_kernel(host: Host) -> CheckResult:
    """Check that the kernel has what supervision needs."""
    release = host.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return advice("its version cannot be read", "Mount /proc")
    if (int(match[1]), int(match[2])) < OLDEST_KERNEL:
        newer = ".".join(map(str, OLDEST_KERNEL))
        return problem(f"Linux {release} has no pidfd_open: no worker can start", f"Linux {newer} or newer")
    return f"Linux {release}"


def check_proc(host: Host) -> CheckResult:
    """Check that /proc is mounted, and belongs to this PID namespace."""
    number = host.status("Pid")
    if number is None:
        text = "it is not mounted: a ring in a memfd cannot be opened by workers, and limits cannot be read"
        return problem(text, "mount -t proc proc /proc")
    if int(number) != host.pid:
        there = f"there this is process {number}, here {host.pid}"
        text = f"it is an outer PID namespace's ({there}): rings work, but tools like ps and top show other process ids"
        return advice(text, "Mount one of this namespace: unshare --mount-proc")
    return "it is this PID namespace's"


def check_pid_1(host: Host) -> CheckResult:
    """Check that signals and orphans are handled, if the trainer is a container's first process."""
    if host.pid == 1 or (host.text("proc/1/comm") or "").startswith("python"):
        return advice(
            "Python is this container's first process: SIGTERM does nothing to it unless it has a handler, so that an orderly stop "
            "becomes a kill; and no process reaps orphans (a loader reaps its own workers)",
            "Start the container with an init: docker run --init, or tini",
        )
    return "it is not a Python program"


def check_reaper(host: Host) -> CheckResult:
    """Check for the programs that remove shared memory when a trainer is killed."""
    folders = host.environ.get("PATH", "/usr/bin:/bin").split(":")
    if not (host.root / "bin/sh").exists():
        text = "there is no /bin/sh: what a killed trainer leaves in /dev/shm stays until the next loader starts"
        return advice(text, "Install a shell, or run shmload clean --yes after kills")
    if shutil.which("flock", path=":".join(f"{host.root}/{folder.lstrip('/')}" for folder in folders)) is None:
        text = "there is no flock command: a killed trainer with a SharedIndex leaves a few hundred bytes until the next start"
        return advice(text, "Install util-linux or busybox")
    return "a killed trainer's memory is removed at once"


FEW_FILES = 256  # torch and Python take about ten, a loader two, each worker two, each shard that is being read one more
FEW_PROCESSES = 64  # in addition to the running ones: threads count, and torch starts one for each core


def check_open_files(host: Host) -> CheckResult:
    """Check the limit on open files, RLIMIT_NOFILE."""
    limit = host.limit("Max open files")
    if limit is None or limit.soft is None:
        return "not limited"
    if limit.soft >= FEW_FILES:
        return f"{limit.soft:,} descriptors"
    return advice(
        f'{limit.soft} descriptors: enough for a few workers; many workers or open shards end in "Too many open files"',
        "ulimit -n 4096, or docker run --ulimit nofile=4096:4096",
    )


def check_processes(host: Host) -> CheckResult:
    """Check how many processes and threads may still be started: RLIMIT_NPROC, and the cgroups' own limits."""
    rest = FEW_PROCESSES
    for _, folder in cgroups.cgroup_folders("pids", host.root):
        most, used = cgroups.read_limit(folder / "pids.max"), cgroups.read_limit(folder / "pids.current")
        if most is not None and used is not None:
            rest = min(rest, max(most - used, 0))
    limit = host.limit("Max processes")
    if rest < FEW_PROCESSES:
        text, remedy = f"the cgroup lets {rest} more processes and threads start", "Raise it (docker run --pids-limit)"
    elif limit is not None and limit.soft is not None and limit.soft < FEW_PROCESSES:
        text, remedy = f"this user may run {limit.soft} processes and threads in all", "ulimit -u 4096"
    else:
        return "enough may be started"
    return advice(f"{text}: workers beyond that fail to start", f"{remedy}, or lower num_workers and OMP_NUM_THREADS")


LITTLE_NBYTES = 1 << 30
LOWER = "lower prefetch_factor, num_workers or batch_size"


def check_free_memory(host: Host) -> CheckResult:
    """Check the machine's free memory."""
    free = free_memory_bytes(host.root)
    if free >= 1 << 62:
        return advice("/proc/meminfo cannot be read: whether a ring fits is not known before it is touched", "Mount /proc")
    if free < LITTLE_NBYTES:
        return advice(f"only {size_text(free)} are free: a ring that does not fit is refused", f"Free memory, or {LOWER}")
    return f"{size_text(free)} are free"


def check_cgroup_memory(host: Host) -> CheckResult:
    """Check the tightest memory limit of this process's cgroups. Shared memory counts against it."""
    tightest = min(cgroups.memory_cgroups(host.root), key=lambda cgroup: cgroup.rest, default=None)
    if tightest is None:
        return "no cgroup limits it"
    use = (
        f"{size_text(tightest.used)} of {size_text(tightest.limit)} are used (cgroup v{tightest.version}), shared memory counts; "
        f"{size_text(tightest.rest)} are left"
    )
    if tightest.rest < min(LITTLE_NBYTES, tightest.limit / 4):
        return advice(
            f"{use}: a larger ring is refused, and beyond it the kernel kills a process of the container",
            f"Raise the container's limit (docker run --memory, resources.limits.memory), or {LOWER}",
        )
    return use


def _processors(host: Host) -> tuple[int, int]:
    """Return the number of processors online, and of those that this process may run on."""
    online = parse_list(host.text("sys/devices/system/cpu/online") or "")
    allowed = parse_list(host.status("Cpus_allowed_list") or "")
    count = len(allowed & online if online else allowed) or len(online) or 1
    return max(len(online), count), count


def check_processors(host: Host) -> CheckResult:
    """Check affinity and cgroup quota against the machine's processors."""
    online, allowed = _processors(host)
    quota = cgroups.cpu_limit(host.root)
    found = []
    if allowed < online:
        text = f"this process may run on {allowed} of {online}: more workers than that take turns"
        found.append((text, "If that is not intended, check taskset, docker run --cpuset-cpus, or torchrun's and Slurm's binding"))
    if quota is not None and quota < allowed:
        text = f"the cgroup gives {quota:g} processors' time, while {allowed} are visible: workers that use more are "
        text += "stopped for parts of each period, and waits become uneven"
        remedy = f"num_workers={max(ceil(quota), 1)} or fewer, or a larger quota (docker run --cpus, resources.limits.cpu)"
        found.append((text, remedy))
    return advice(*map("; ".join, zip(*found, strict=True))) if found else f"all {online} may be used"


def check_threads(host: Host) -> CheckResult:
    """Check how many threads numpy and torch start in the trainer; workers always run with one."""
    _, allowed = _processors(host)
    usable = min(max(ceil(cgroups.cpu_limit(host.root) or allowed), 1), allowed)
    setting = host.environ.get("OMP_NUM_THREADS", "")
    number = setting.split(",")[0]
    if setting and not number.isdigit():
        return advice(f"OMP_NUM_THREADS={setting!r} is not a number and is ignored", "Set a number")
    threads = int(number or allowed)
    said = f"OMP_NUM_THREADS={threads}" if setting else "OMP_NUM_THREADS is not set"
    if threads <= usable:
        return f"{said}; workers run with one each"
    text = f"{said}: the trainer's libraries start {threads} threads for {usable} processors' time, and take them from workers"
    return advice(text, f"OMP_NUM_THREADS={usable}")


# ------------------------------------------------------------ shared memory

SMALL_NBYTES = 512 << 20  # docker's default is 64 MiB; a ring of batches of photos takes a few hundred
WITHOUT_SHM = "rings and doorbells are in memfds; a SharedIndex with a name cannot be shared"


def check_shm(host: Host) -> CheckResult:
    """Check the size, free space and permissions of /dev/shm."""
    path, room = host.root / "dev/shm", host.room("dev/shm")
    if room is None or not path.is_dir():
        return advice(f"there is none: {WITHOUT_SHM}", "Mount a tmpfs at /dev/shm")
    size, free = room
    if not os.access(path, os.W_OK) or _is_read_only(path):
        return advice(f"it cannot be written to: {WITHOUT_SHM}", "Mount it writable, mode 1777")
    if free < size / 10 or free < 16 << 20:
        return advice(
            f"{size_text(free)} of {size_text(size)} are free: rings that do not fit are in memfds; other programs "
            "may be refused or killed by SIGBUS",
            "See what is there: ls -lS /dev/shm; shmload clean removes what dead loaders have left",
        )
    if size < SMALL_NBYTES:
        return advice(
            f"{size_text(size)} is small: a larger ring is in a memfd; torch's own DataLoader would be killed by SIGBUS",
            "Give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm",
        )
    return f"{size_text(free)} of {size_text(size)} are free"


def _is_read_only(path: os.PathLike[str]) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def try_segment() -> None:
    """Create a named segment and remove it."""
    Segment.create(f"{new_stem()}-doctor", 4096, kind="shm").close()


def try_semaphore() -> None:
    """Create a semaphore as a loader would, ring it, and close it."""
    bell = Doorbell.create(f"/{new_stem()}-doctor")
    try:
        bell.post()
        if not bell.wait(0):
            raise OSError("a post was lost")
    finally:
        bell.close()


def check_segments(host: Host, named: Callable[[], None] = try_segment, memfd: Callable[[], None] = try_memfd) -> CheckResult:
    """Check that a segment can be created, of at least one of the two kinds that a ring can use."""
    no_segment, no_memfd = _fails(named), _fails(memfd)
    if no_segment and no_memfd:
        return problem(
            f"no loader with workers can start: neither a named segment ({no_segment}) nor a memfd ({no_memfd}) can be made",
            "Make /dev/shm writable, or permit memfd_create and /proc/<pid>/fd in the container's security profile",
        )
    if no_memfd:
        text = (
            f"memfds do not work ({no_memfd}): a ring that does not fit into /dev/shm is refused, and a large one is slow to start"
        )
        return advice(text, "Permit memfd_create and mount /proc, or make /dev/shm large")
    return "memfds work; named segments do not, and are not needed" if no_segment else "named segments and memfds work"


def check_semaphores(host: Host, semaphore: Callable[[], None] = try_semaphore) -> CheckResult:
    """Check the semaphores by which a loader wakes its workers."""
    if why := _fails(semaphore):
        return problem(
            f"no loader with workers can start: a semaphore cannot be made ({why})",
            "Make /dev/shm writable, or permit memfd_create in the container's security profile",
        )
    return "they work"


def check_leftovers(host: Host) -> CheckResult:
    """Check for shared memory that dead loaders of this user have left."""
    found = janitor.find_leftovers(str(host.root / "dev/shm"))
    if not found:
        return "dead loaders have left nothing"
    text = f"{counted(len(found), 'dead loader')} left {size_text(sum(one.nbytes for one in found))} in /dev/shm"
    return advice(text, "Remove them: shmload clean --yes (the next loader to start does it, too)")


# ------------------------------------------------------------ all of them

CHECKS: dict[str, Callable[[Host], CheckResult]] = {  # in the order in which a loader would meet the problems
    "versions": check_versions,
    "compiled modules": check_compiled,
    "kernel": check_kernel,
    "/proc": check_proc,
    "PID 1": check_pid_1,
    "/dev/shm": check_shm,
    "segments": check_segments,
    "semaphores": check_semaphores,
    "leftovers": check_leftovers,
    "reaper": check_reaper,
    "memory": check_free_memory,
    "cgroup memory": check_cgroup_memory,
    "open files": check_open_files,
    "processes": check_processes,
    "processors": check_processors,
    "threads": check_threads,
    "start method": check_start_method,
    "GPU": check_gpu,
}


def examine(host: Host) -> list[Finding]:
    """Return the findings of all checks of a host, in the order of `CHECKS`."""
    found = []
    for name, check in CHECKS.items():
        said: CheckResult
        try:
            said = check(host)
        except Exception as error:  # a check reads what other kernels write: it must not hide other findings
            said = advice(f"could not be checked: {type(error).__name__}: {error}", "Please report it")
        found.append(Finding(name, "good", said) if isinstance(said, str) else Finding(name, *said))
    return found
