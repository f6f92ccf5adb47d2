"""What of this host would go wrong with a loader, in plain words: one small function a check, and `examine`, which makes them all.

A check reads files below `Host.root` where it can, so that another host can be stood in its place. What is compiled is
imported where it is used: it may not even be importable where nothing is built.
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Literal

import shmload
from shmload.shm import owners, segment
from shmload.shm.names import STEM_PATTERN, Host, listed, new_stem

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


def good(check: str, text: str) -> Finding:
    """Nothing needs to be changed."""
    return Finding(check, "good", text)


def advice(check: str, text: str, remedy: str = "") -> Finding:
    """It works, and could be better."""
    return Finding(check, "advice", text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """Something fails."""
    return Finding(check, "problem", text, remedy)


def mib(nbytes: int) -> str:
    """Bytes as people say them."""
    return f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.0f} MiB"


FEW_FILES = 256  # torch and Python take some ten, a loader two, each worker two, each shard that is read another
FEW_PROCESSES = 64  # beside those that run: threads count, and torch starts one for each core


def check_open_files(host: Host) -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    limit = host.limit("Max open files")
    if limit is None or limit.soft is None:
        yield good("open files", "not limited")
    elif limit.soft < FEW_FILES:
        yield advice(
            "open files",
            f'{limit.soft} descriptors: a loader of few workers gets by, many workers or open shards end in "Too many open files"',
            "ulimit -n 4096, or docker run --ulimit nofile=4096:4096",
        )
    else:
        yield good("open files", f"{limit.soft:,} descriptors")


def check_locked_memory(host: Host) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK: shmload locks nothing, so it is only shown."""
    limit = host.limit("Max locked memory")
    allowed = "not limited" if limit is None or limit.soft is None else f"{mib(limit.soft)} may be locked"
    yield good("locked memory", f"{allowed}; a loader locks none")


def check_processes(host: Host) -> Iterator[Finding]:
    """How many processes and threads may still be started: RLIMIT_NPROC, and the cgroups' own limits."""
    rests = []
    for _, folder in segment.folders("pids", host.root):
        most, used = segment.number(folder / "pids.max"), segment.number(folder / "pids.current")
        if most is not None and used is not None:
            rests.append(max(most - used, 0))
    rest = min(rests, default=FEW_PROCESSES)
    limit = host.limit("Max processes")
    if rest < FEW_PROCESSES:
        text = f"the cgroup lets {rest} more processes and threads start"
        remedy = "Raise it (docker run --pids-limit)"
    elif limit is not None and limit.soft is not None and limit.soft < FEW_PROCESSES:
        text, remedy = f"this user may run {limit.soft} processes and threads in all", "ulimit -u 4096"
    else:
        yield good("processes", "enough may be started")
        return
    workers = "workers beyond that fail to start"
    yield advice("processes", f"{text}: {workers}", f"{remedy}, or lower num_workers and OMP_NUM_THREADS")


LITTLE_NBYTES = 1 << 30


def check_free_memory(host: Host) -> Iterator[Finding]:
    """What the machine has left."""
    free = segment.free_memory_bytes(host.root)
    if free >= 1 << 62:
        yield advice("memory", "/proc/meminfo cannot be read: whether a ring fits is not known before it is touched", "Mount /proc")
    elif free < LITTLE_NBYTES:
        yield advice(
            "memory",
            f"only {mib(free)} are free: a ring that does not fit is refused",
            "Free memory, or lower prefetch_factor, num_workers or batch_size",
        )
    else:
        yield good("memory", f"{mib(free)} are free")


def check_cgroup_memory(host: Host) -> Iterator[Finding]:
    """The tightest memory limit that this process is under. Shared memory counts against it."""
    found = segment.memory(host.root)
    if not found:
        yield good("cgroup memory", "no cgroup limits it")
        return
    tightest = min(found, key=lambda cgroup: cgroup.rest)
    use = (
        f"{mib(tightest.used)} of {mib(tightest.limit)} are used (cgroup v{tightest.version}), shared memory counts; "
        f"{mib(tightest.rest)} are left"
    )
    if tightest.rest < min(LITTLE_NBYTES, tightest.limit / 4):
        yield advice(
            "cgroup memory",
            f"{use}: a larger ring is refused, and beyond it the kernel kills a process of the container",
            "Raise the container's limit (docker run --memory, resources.limits.memory), or lower prefetch_factor, "
            "num_workers or batch_size",
        )
    else:
        yield good("cgroup memory", use)


def check_processors(host: Host) -> Iterator[Finding]:
    """Affinity and cgroup quota against what the machine has."""
    online, allowed = _counts(host)
    quota = segment.cpus(host.root)
    if allowed < online:
        yield advice(
            "processors",
            f"this process may run on {allowed} of {online}: more workers than that take turns",
            "If that is not meant, look at taskset, docker run --cpuset-cpus, or torchrun's and Slurm's binding",
        )
    else:
        yield good("processors", f"all {online} may be used")
    if quota is not None and quota < allowed:
        yield advice(
            "processors",
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
        yield advice("threads", f"OMP_NUM_THREADS={setting!r} is no number and is ignored", "Set a number")
        return
    threads = int(setting.split(",")[0]) if setting else allowed
    setting_text = f"OMP_NUM_THREADS={threads}" if setting else "OMP_NUM_THREADS is not set"
    if threads > usable:
        yield advice(
            "threads",
            f"{setting_text}: the trainer's libraries start {threads} threads for {usable} processors' time, and take them "
            "from workers",
            f"OMP_NUM_THREADS={usable}",
        )
    else:
        yield good("threads", f"{setting_text}; workers run with one each")


def _counts(host: Host) -> tuple[int, int]:
    """Processors online, and those among them that this process may run on."""
    online = listed(host.text("sys/devices/system/cpu/online") or "")
    allowed = listed(host.status("Cpus_allowed_list") or "")
    count = len(allowed & online if online else allowed) or len(online) or 1
    return max(len(online), count), count


OLDEST_VERSIONS = {"torch": (2, 13), "numpy": (2, 0), "posix_ipc": (1, 1)}


def check_versions(find: Callable[[str], str] = version, python: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Python and what shmload stands on."""
    versions = [f"Python {'.'.join(map(str, python))}"]
    if python < (3, 11):
        yield problem("versions", f"{versions[0]} is too old", "Python 3.11 or newer")
    for name, oldest in OLDEST_VERSIONS.items():
        try:
            found = find(name)
        except PackageNotFoundError:
            yield problem("versions", f"{name} is not installed", f"pip install {name}")
            continue
        versions.append(f"{name} {found}")
        if _numbers(found) < oldest:
            needed = ".".join(map(str, oldest))
            yield problem("versions", f"{name} {found} is too old", f"pip install '{name}>={needed}'")
    yield good("versions", ", ".join(versions))


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
    remedy = "Install shmload anew (pip install --force-reinstall), or build the source tree: pip install -e ."
    for names, what in (
        (missing, "missing, or built for another Python or C library"),
        (stale, "of another version than the Python around"),
    ):
        if names:
            yield problem("compiled modules", f"{', '.join(names)}: {what}", remedy)
    if not missing and not stale:
        yield good("compiled modules", f"all {len(stubs)} are there and match")


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
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def check_start_method(has_gpu: bool, method: str | None = None) -> Iterator[Finding]:
    """How workers start if nobody says otherwise."""
    method = method or multiprocessing.get_start_method()
    if method == "fork" and has_gpu:
        yield advice(
            "start method",
            "fork, Python's own here: workers that are forked after CUDA was used, or while other threads run, may hang",
            'multiprocessing_context="forkserver", or take the first batch before CUDA is used',
        )
    elif method == "fork":
        yield good("start method", "fork: the quickest, as long as no other threads run when workers start")
    else:
        yield good("start method", f"{method}: workers inherit nothing by chance; datasets must be picklable")


OLDEST_KERNEL = (5, 3)  # pidfd_open, by which workers and trainer see each other's end


def check_kernel(host: Host) -> Iterator[Finding]:
    """Whether it has what supervision needs."""
    release = host.text("proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        yield advice("kernel", "its version cannot be read", "Mount /proc")
    elif (int(match[1]), int(match[2])) < OLDEST_KERNEL:
        yield problem(
            "kernel",
            f"Linux {release} has no pidfd_open: no worker can start",
            f"Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer",
        )
    else:
        yield good("kernel", f"Linux {release}")


def check_proc(host: Host) -> Iterator[Finding]:
    """Whether /proc is there, and is that of this PID namespace."""
    number = host.status("Pid")
    if number is None:
        yield problem(
            "/proc",
            "it is not mounted: a ring in a memfd cannot be opened by workers, and limits cannot be read",
            "mount -t proc proc /proc",
        )
    elif int(number) != host.pid:
        yield advice(
            "/proc",
            f"it is an outer PID namespace's (there this is process {number}, here {host.pid}): rings work, tools like ps and top "
            "mislead",
            "Mount one of this namespace: unshare --mount-proc",
        )
    else:
        yield good("/proc", "it is this PID namespace's")


def check_pid_1(host: Host) -> Iterator[Finding]:
    """Whether signals and orphans are seen to, if a training is a container's first process."""
    if host.pid == 1 or (host.text("proc/1/comm") or "").startswith("python"):
        yield advice(
            "PID 1",
            "Python is this container's first process: SIGTERM does nothing to it unless it has a handler, so that an orderly stop "
            "becomes a kill; and nobody buries orphans (a loader buries its own workers)",
            "Start the container with an init: docker run --init, or tini",
        )
    else:
        yield good("PID 1", "it is no Python program")


def check_reaper(host: Host) -> Iterator[Finding]:
    """What removes names when a trainer is killed."""
    path = host.environ.get("PATH", "/usr/bin:/bin")
    if not (host.root / "bin/sh").exists():
        yield advice(
            "reaper",
            "there is no /bin/sh: what a killed trainer leaves in /dev/shm stays until the next loader starts",
            "Install a shell, or run shmload clean --yes after kills",
        )
    elif shutil.which("flock", path=":".join(f"{host.root}/{part.lstrip('/')}" for part in path.split(":"))) is None:
        yield advice(
            "reaper",
            "there is no flock command: of a killed trainer with a SharedIndex a few hundred bytes stay until the next start",
            "Install util-linux or busybox",
        )
    else:
        yield good("reaper", "a killed trainer's memory is removed at once")


def has_gpu(host: Host) -> bool:
    """Whether a driver shows one."""
    return (host.root / "dev/kfd").exists() or any((host.root / "dev").glob("nvidia[0-9]*"))


def check_gpu(host: Host, torch_cuda: str | None) -> Iterator[Finding]:
    """Whether there is a GPU, and whether torch could use it."""
    devices = list((host.root / "dev").glob("nvidia[0-9]*"))
    if not has_gpu(host):
        yield good("GPU", "there is none; loaders work without")
    elif devices and torch_cuda is None:
        yield advice(
            "GPU",
            f"{len(devices)} from NVIDIA, and this torch was built without CUDA: it will not be used",
            "Install a torch with CUDA",
        )
    else:
        yield good("GPU", f"{len(devices)} from NVIDIA" if devices else "one or more from AMD")


# ------------------------------------------------------------ shared memory

SMALL_NBYTES = 512 << 20  # docker gives 64 MiB where nobody asks; a ring of photos in batches takes a few hundred
SHM_SIZE = "Give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def check_shm(host: Host) -> Iterator[Finding]:
    """Size, room and rights of /dev/shm."""
    path = host.root / "dev/shm"
    room = host.room("dev/shm")
    if room is None or not path.is_dir():
        yield advice(
            "/dev/shm",
            "there is none: rings and bells lie in memfds; a SharedIndex with a name has no place to meet at",
            "Mount a tmpfs at /dev/shm",
        )
        return
    size, free = room
    if not os.access(path, os.W_OK) or _is_read_only(path):
        yield advice(
            "/dev/shm",
            "it cannot be written to: rings and bells lie in memfds; a SharedIndex with a name has no place to meet at",
            "Mount it writable, mode 1777",
        )
    elif free < size / 10 or free < 16 << 20:
        yield advice(
            "/dev/shm",
            f"{mib(free)} of {mib(size)} are free: rings that do not fit lie in memfds; other programs "
            "may be refused or killed by SIGBUS",
            "See what lies there: ls -lS /dev/shm; shmload clean removes what dead loaders have left",
        )
    elif size < SMALL_NBYTES:
        yield advice(
            "/dev/shm",
            f"{mib(size)} is small: a larger ring lies in a memfd; torch's own DataLoader would be killed by SIGBUS",
            SHM_SIZE,
        )
    else:
        yield good("/dev/shm", f"{mib(free)} of {mib(size)} are free")


def _is_read_only(path: os.PathLike[str]) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def try_segment() -> None:
    """Makes a named segment and removes it."""
    from shmload.shm.segment import Segment

    Segment.create(f"{new_stem()}-doctor", 4096, kind="shm").close()


def try_memfd() -> None:
    """Makes a memfd, opens it as a worker would, and lets it go."""
    from shmload.shm.segment import Segment, open_segment

    segment = Segment.create("shmload-doctor", 4096, kind="memfd")
    try:
        os.close(open_segment(segment.path))
    finally:
        segment.close()


def try_semaphore() -> None:
    """Makes a semaphore as a loader would, rings it and lets it go."""
    from shmload.shm.segment import Doorbell

    bell = Doorbell.create(f"/{new_stem()}-doctor")
    try:
        bell.post()
        if not bell.wait(0):
            raise OSError("a post was lost")
    finally:
        bell.close()


def check_kinds(
    segment: Callable[[], None] = try_segment, memfd: Callable[[], None] = try_memfd, semaphore: Callable[[], None] = try_semaphore
) -> Iterator[Finding]:
    """Retry what a loader is made of: a ring needs one of the two kinds of segment, and bells."""
    no_segment, no_memfd, no_bell = _fails(segment), _fails(memfd), _fails(semaphore)
    if no_segment and no_memfd:
        yield problem(
            "segments",
            f"no loader with workers can start: neither a named segment ({no_segment}) nor a memfd ({no_memfd}) can be made",
            "Make /dev/shm writable, or permit memfd_create and /proc/<pid>/fd in the container's security profile",
        )
    elif no_memfd:
        yield advice(
            "segments",
            f"memfds do not work ({no_memfd}): a ring that does not fit into /dev/shm is refused",
            "Permit memfd_create and mount /proc, or make /dev/shm large",
        )
    elif no_segment:
        yield good("segments", "memfds work; named segments do not, and are not needed")
    else:
        yield good("segments", "named segments and memfds work")
    if no_bell:
        yield problem(
            "semaphores",
            f"no loader with workers can start: a semaphore cannot be made ({no_bell})",
            "Make /dev/shm writable, or permit memfd_create in the container's security profile",
        )
    else:
        yield good("semaphores", "they work")


def _fails(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def check_leftovers(host: Host) -> Iterator[Finding]:
    """What dead loaders of this user have left, and what other users hold."""
    folder = str(host.root / "dev/shm")
    found = owners.find_leftovers(folder)
    if found:
        yield advice(
            "leftovers",
            f"{len(found)} dead loader{'s' * (len(found) > 1)} left {mib(sum(one.nbytes for one in found))} in /dev/shm",
            "Remove them: shmload clean --yes (the next loader to start does it, too)",
        )
    else:
        yield good("leftovers", "dead loaders have left nothing")
    foreign = _foreign_bytes(folder)
    if foreign:
        yield advice(
            "leftovers", f"other users' loaders, living or dead, hold {mib(foreign)} of /dev/shm; they are theirs to remove"
        )


def _foreign_bytes(folder: str) -> int:
    nbytes = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if STEM_PATTERN.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) and status.st_uid != os.getuid():
                    nbytes += status.st_blocks * 512
    except OSError:  # no folder, or what was listed has gone
        pass
    return nbytes


# ------------------------------------------------------------ all of them

CORE = Path(shmload.__file__).parent / "_core"


def examine(host: Host) -> list[Finding]:
    """What every check says of a host, in the order in which things would go wrong."""
    found: list[Finding] = []
    for name, check in _checks(host):
        try:
            found += check()
        except Exception as error:  # a check reads what other kernels write: it must not hide the others' findings
            found.append(Finding(name, "advice", f"could not be checked: {type(error).__name__}: {error}", "Please report it"))
    return found


def _checks(host: Host) -> Iterable[tuple[str, Callable[[], Iterable[Finding]]]]:
    yield "versions", check_versions
    yield "compiled modules", partial(check_compiled, CORE)
    yield "kernel", partial(check_kernel, host)
    yield "/proc", partial(check_proc, host)
    yield "PID 1", partial(check_pid_1, host)
    yield "/dev/shm", partial(check_shm, host)
    yield "segments", check_kinds
    yield "leftovers", partial(check_leftovers, host)
    yield "reaper", partial(check_reaper, host)
    yield "memory", partial(check_free_memory, host)
    yield "cgroup memory", partial(check_cgroup_memory, host)
    yield "open files", partial(check_open_files, host)
    yield "locked memory", partial(check_locked_memory, host)
    yield "processes", partial(check_processes, host)
    yield "processors", partial(check_processors, host)
    yield "threads", partial(check_threads, host)
    yield "start method", lambda: check_start_method(has_gpu(host))
    yield "GPU", lambda: check_gpu(host, _cuda_of_torch())


def _cuda_of_torch() -> str | None:
    try:
        from torch.version import cuda
    except ImportError:
        return None
    return str(cuda) if cuda else None
