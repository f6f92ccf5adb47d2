"""One piece of memory that processes share: a named POSIX segment, or a memfd where /dev/shm has no room.

Named segments are such as multiprocessing.shared_memory makes, and reserved whole with posix_fallocate, so that too little room is
an error now and not a SIGBUS later. That takes 0.25 s a GiB. So a large ring lies in a memfd, for which no /dev/shm can be too
small: it is measured against the memory that is free, and gets its own by and by. Its owner reserves the next part when it has
nothing else to do, and workers have the kernel put memory behind the rows that they are about to write (`Mapping.populate`).

The owner holds a flock on the file: that, and not a pid, shows everyone that it lives, since pids mean nothing across containers
that share /dev/shm. Whoever attaches opens `path`: the name, or the owner's descriptor
under /proc. A descriptor's number is used again for another file, so such a path says the memfd's name, too, and whoever opens it
looks whether that is what has been opened. No name is ever given twice, so a path stands for one segment for all time: what others
keep of it, they may keep by its path.

The file is made here, and multiprocessing's resource tracker hears nothing of it. It would share the trainer's process group and
die with it, and it would report and remove what the reaper and `shmload clean` (janitor.py) see to. On Python < 3.13 to make one
starts it, a Python process of 30 ms, and whoever attaches starts one of its own, whose exit unlinks a live segment.

This process's cgroups, as the kernel reports them: where its limits stand, v1 and v2, from its own up to the root.

A container sees its own cgroup mounted at the top, while /proc still names the path on the host: folders that are not there are
passed by on the way up, and the top is always looked at.

How much memory there is, before any is taken: free memory, this process's cgroup, /dev/shm.

Parsers take the root of the file system as an argument, so that tests can show them trees of other machines.

What one loader shares with its workers: its segments and bells, under one stem, closed together.

A doorbell is a POSIX semaphore that says "look again", and nothing more: the truth stands in the owner words (src/protocol.h). It
is never a lock, as a killed holder would never give it back. Posts may be lost with a killed process and may come too often, so
every wait has an end and is followed by a look.

A bell has a name where names can be made. A read-only, full or missing /dev/shm has no place for one (the C library files
semaphores there): then the semaphore lies in a memfd, and its name is the owner's descriptor under /proc, as with segments.

With the first group of a process the leavings of dead ones are swept away and the reaper starts.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from shmload._core.bell import Bell, make_semaphore
from shmload._core.mapping import Mapping
from shmload.errors import RingTooSmall
from shmload.processes import private_fds
from shmload.processes.file_lock import FileLock, try_lock
from shmload.shm import janitor, reaper
from shmload.shm.names import NEW, SHM_DIR, new_stem, proc_self

try:
    import posix_ipc
except ImportError:  # it has no wheel for Python 3.14 and is not asked for there: every bell lies in a memfd
    posix_ipc = None

_NO_LIMIT = 1 << 60  # v1 says "none" by a number near 2^63


class CgroupMemory(NamedTuple):
    """One cgroup with a memory limit.

    Attributes:
        limit, used: bytes; `used` includes shared memory that its processes were the first to touch.
        rest: bytes still to be had. Page cache that the kernel would drop counts as free.
    """

    folder: Path
    version: int
    limit: int
    used: int
    rest: int


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(1 or 2, folder) of each cgroup that may rule over a controller, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = 2, mount / "unified" if (mount / "unified").is_dir() else mount
        elif controller in controllers.split(","):
            version, top = 1, mount / controller
        else:
            continue
        folder = top / path.strip("/")
        while True:
            yield version, folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def memory(root: Path = Path("/")) -> list[CgroupMemory]:
    """Every cgroup on the way up that limits this process's memory."""
    found = []
    for version, folder in folders("memory", root):
        limit, usage = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = number(folder / limit), number(folder / usage)
        if most is not None and used is not None:
            found.append(CgroupMemory(folder, version, most, used, max(most - used + _droppable(folder), 0)))
    return found


def cpus(root: Path = Path("/")) -> float | None:
    """How many processors' time this process may use; None if no cgroup limits that."""
    found = []
    for version, folder in folders("cpu", root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(found, default=None)


def number(path: Path) -> int | None:
    """The number in a file; None if there is none or it stands for "no limit"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value < _NO_LIMIT else None


def _droppable(folder: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def shm_free_bytes(root: str = SHM_DIR) -> int:
    """Bytes free in /dev/shm; 0 if it is missing or read-only."""
    try:
        if not os.access(root, os.W_OK):
            return 0
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may still take: free memory, and what every cgroup it is in leaves."""
    return min([free_memory_bytes(root), *(cgroup.rest for cgroup in memory(root))])


def check_fits(nbytes: int, slots: tuple[int, int] | None = None, root: Path = Path("/")) -> None:
    """Refuses what is larger than the memory there is: taking it would not fail, but wake the kernel's OOM killer.

    Args:
        slots: (number, bytes each) of a ring.
    Raises:
        RingTooSmall: says bytes needed and free, how many slots would fit, and what to change.
    """
    free = max(available_bytes(root) - unreserved_bytes(), 0)
    if nbytes > free:
        needed, room = f"a segment needs {nbytes} bytes", ""
        if slots is not None:
            needed = f"the ring needs {nbytes} bytes, {slots[0]} slots of {slots[1]}"
            room = f", room for {free // max(slots[1], 1)} slots"
        raise RingTooSmall(
            f"{needed}; this process may take {free} more{room}. Lower prefetch_factor, num_workers or batch_size, or free memory"
        )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that programs may take before the kernel swaps or kills; very many if it does not say."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


Kind = Literal["auto", "shm", "memfd"]

_NAMED = "#"  # what stands between a descriptor and the name of its memfd


class Segment:
    """`nbytes` of shared memory, owned by this process until `close`.

    Attributes:
        path: what another process of this user opens to attach.
        kind: "shm" or "memfd".
        fd: the owner's descriptor.
        num_reserved: bytes, from its start on, that have memory for certain.
    """

    def __init__(self, name: str, nbytes: int, fd: int, kind: Literal["shm", "memfd"]) -> None:
        self.name, self.nbytes, self.kind = name, nbytes, kind
        self.num_reserved = 0
        self.fd = private_fds.keep(fd)
        self.path = f"{SHM_DIR}/{name}" if kind == "shm" else memfd_path(name, fd)
        self._pid = os.getpid()
        self._is_closed = False

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, kind: Kind = "auto", slots: tuple[int, int] | None = None, num_reserved: int | None = None
    ) -> Segment:
        """Makes a segment, filled with zeros.

        Args:
            kind: "auto" takes a memfd if /dev/shm is too small, read-only or missing.
            slots: (number, bytes each) that it will hold, for the error message.
            num_reserved: bytes to reserve at once, from its start on; None: all.
        Raises:
            RingTooSmall: there is not enough memory, or `kind` demands "shm" and /dev/shm has no room.
        """
        check_fits(nbytes, slots)
        if num_reserved is None:
            num_reserved = nbytes
        if kind != "memfd":
            try:
                return cls._made(name, nbytes, _create_named(name, nbytes, num_reserved), "shm", num_reserved)
            except OSError as error:
                if kind == "shm":
                    raise RingTooSmall(_too_small(nbytes, slots, error)) from error
        try:
            return cls._made(name, nbytes, _create_memfd(name, nbytes, num_reserved), "memfd", num_reserved)
        except OSError as error:
            remedy = ": raise the limit on file sizes (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise RingTooSmall(f"a segment of {nbytes} bytes: {os.strerror(error.errno or 0)}{remedy}") from error

    @classmethod
    def _made(cls, name: str, nbytes: int, fd: int, kind: Literal["shm", "memfd"], num_reserved: int) -> Segment:
        segment = cls(name, nbytes, fd, kind)
        segment.num_reserved = num_reserved
        if num_reserved < nbytes:
            _sparse.add(segment)
        return segment

    def reserve(self, nbytes: int) -> None:
        """Reserves so many bytes more, if there are as many left.

        Raises:
            RingTooSmall: there is not enough memory any more.
        """
        nbytes = min(nbytes, self.nbytes - self.num_reserved)
        try:
            os.posix_fallocate(self.fd, self.num_reserved, nbytes)
        except OSError as error:
            raise RingTooSmall(_taken_meanwhile(self.path, self.nbytes, self.num_reserved, error)) from error
        self.num_reserved += nbytes
        if self.num_reserved == self.nbytes:
            _sparse.discard(self)

    def close(self) -> None:
        """Gives up the name and the descriptor; mappings stay. Does nothing in a forked child, or twice."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        _sparse.discard(self)
        if self.kind == "shm":
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        private_fds.close(self.fd)

    @property
    def unreserved_nbytes(self) -> int:
        """Bytes that have no memory yet. In a forked child, whose it is not, none."""
        return max(self.nbytes - os.fstat(self.fd).st_blocks * 512, 0) if os.getpid() == self._pid else 0


_sparse: weakref.WeakSet[Segment] = weakref.WeakSet()  # segments that are not reserved whole yet


def unreserved_bytes() -> int:
    """Bytes of this process's own segments that have no memory yet: what is free is not free for others."""
    return sum(segment.unreserved_nbytes for segment in list(_sparse))


def memfd_path(name: str, fd: int) -> str:
    """What `open_segment` takes for a memfd of this process's, as long as it is open here.

    Args:
        name: that it was made with, and no other is.
    """
    return f"{proc_self()}/fd/{fd}{_NAMED}{name}"


def try_memfd() -> None:
    """Makes a memfd, opens it as a worker would, and lets it go; OSError or RingTooSmall where that is not to be had."""
    made = Segment.create("shmload-try", 4096, kind="memfd")
    try:
        os.close(open_segment(made.path))
    finally:
        made.close()


@functools.cache
def memfds_work() -> bool:
    """Whether they do for this process: a sandbox may forbid them, or have no /proc."""
    try:
        try_memfd()
    except (OSError, RingTooSmall):
        return False
    return True


def open_segment(path: str) -> int:
    """Opens another process's segment for reading and writing.

    Raises:
        PermissionError: what is there is not a file of this user.
        FileNotFoundError: its owner has gone, or has given it up.
    """
    place, _, name = path.partition(_NAMED)
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if path.startswith(SHM_DIR) else 0)
    fd = os.open(place, flags)
    if name and os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)") != f"/memfd:{name}":
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "its owner has given it up", path)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is no segment of user {os.geteuid()}")
    return fd


def map_segment(path: str, **options: bool) -> Mapping:
    """All of a segment that another process has made, mapped; OSError as `open_segment`."""
    fd = open_segment(path)
    try:
        return Mapping(fd, os.fstat(fd).st_size, **options)
    finally:
        os.close(fd)


def _create_named(name: str, nbytes: int, num_reserved: int) -> int:
    if shm_free_bytes() < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _make_file(name + NEW, nbytes)
    path = f"{SHM_DIR}/{name}{NEW}"
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not try_lock(fd):  # a janitor looks at it now, and may remove it
            raise BlockingIOError(errno.EWOULDBLOCK, "it is locked already", path)
        os.fchmod(fd, 0o600)
        _reserve_first(fd, num_reserved)
        os.rename(path, f"{SHM_DIR}/{name}")  # never seen unlocked under its name: a janitor takes what it can lock
    except BaseException:  # a signal's, too: to reserve takes its time
        for made in (path, f"{SHM_DIR}/{name}"):
            with suppress(FileNotFoundError):
                os.unlink(made)
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _create_memfd(name: str, nbytes: int, num_reserved: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        _reserve_first(fd, num_reserved)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve_first(fd: int, nbytes: int) -> None:
    if nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def _make_file(name: str, nbytes: int) -> None:
    """Creates the file as shm_open does, without multiprocessing (see the module's docstring)."""
    path = f"{SHM_DIR}/{name}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _taken_meanwhile(path: str, nbytes: int, num_reserved: int, error: OSError) -> str:
    return (
        f"{path}: the ring was to have {nbytes} bytes, which were free when it was made. It got {num_reserved}, and others have "
        f"taken the rest ({os.strerror(error.errno or 0)}). Free memory, or lower prefetch_factor, num_workers or batch_size"
    )


def _too_small(nbytes: int, slots: tuple[int, int] | None, error: OSError) -> str:
    free = shm_free_bytes()
    text = f"{SHM_DIR} has {free} bytes free, the ring needs {nbytes} ({os.strerror(error.errno or 0)})"
    if slots is not None:
        text += f": {slots[0]} slots of {slots[1]} bytes, of which {free // max(slots[1], 1)} would fit"
    return text + ". Enlarge it (docker run --shm-size), lower prefetch_factor or batch_size, or let the ring use a memfd"


log = logging.getLogger("shmload")


class JointBell:
    """Several bells that are rung as one: somebody at each of them looks."""

    def __init__(self, bells: Sequence[Doorbell]) -> None:
        self._bells = tuple(bells)

    def post_up_to(self, count: int) -> None:
        """Rings each so often that `count` rings are pending there."""
        for bell in self._bells:
            bell.post_up_to(count)


class Doorbell(Bell):
    """One semaphore. Whoever created it gives up its name with `close`.

    Args:
        name: begins with a slash; what `attach` takes.
        fd: of the memfd in which it lies; -1: it is a named one.
    """

    def __init__(self, name: str, fd: int = -1, *, is_owner: bool) -> None:
        self.name, self._fd = name, fd
        self._owner_pid = os.getpid() if is_owner else 0

    @classmethod
    def create(cls, name: str) -> Doorbell:
        """Makes a bell that nobody has rung.

        Args:
            name: begins with a slash. A bell in a memfd has another one.
        Raises:
            OSError: there is no room, or no descriptor, for either kind.
        """
        if posix_ipc is None:
            return cls._unnamed(name)
        try:
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except (OSError, ValueError, posix_ipc.Error) as error:
            log.debug("the bell %s gets no name (%s): it lies in a memfd", name, error)
            return cls._unnamed(name)
        try:
            return cls(name, is_owner=True)
        except BaseException:
            posix_ipc.unlink_semaphore(name)
            raise

    @classmethod
    def _unnamed(cls, name: str) -> Doorbell:
        fd = private_fds.keep(os.memfd_create(name[1:], os.MFD_CLOEXEC))
        try:
            os.fchmod(fd, 0o600)
            make_semaphore(fd)
            return cls(memfd_path(name[1:], fd), fd, is_owner=True)
        except BaseException:
            private_fds.close(fd)
            raise

    @classmethod
    def attach(cls, name: str) -> Self:
        """Opens another process's bell.

        Raises:
            FileNotFoundError: its owner has gone.
        """
        if not name.startswith("/proc/"):
            return cls(name, is_owner=False)
        fd = open_segment(name)
        try:
            return cls(name, fd, is_owner=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Gives up the name, if this process made it. Safe to call twice, and in a forked child."""
        if self._owner_pid != os.getpid():
            return
        self._owner_pid = 0
        if self._fd >= 0:
            private_fds.close(self._fd)
            return
        with suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(self.name)


_alive: weakref.WeakSet[Group] = weakref.WeakSet()
_has_swept = False


class _Mark:
    """An empty locked file in the place of a control segment that has no name there: bells have, and a janitor would take them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = FileLock.open(path + NEW, os.O_CREAT | os.O_EXCL, 0o600)
        if not self._lock.try_acquire():  # as above
            self._lock.close()
            os.unlink(path + NEW)
            raise BlockingIOError(errno.EWOULDBLOCK, "it is locked already", path)
        os.rename(path + NEW, path)  # never seen unlocked: see janitor.py

    def close(self) -> None:
        """Removes it. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._lock.close()


class Group:
    """The segments and bells of one loader. Closed at the process's end at the latest.

    Attributes:
        control: the control segment, once there is one.
    """

    def __init__(self) -> None:
        global _has_swept
        if not _has_swept:
            _has_swept = True
            try:
                for leftover in janitor.sweep():
                    if leftover.error:
                        log.warning("could not remove %s of a loader that died: %s", leftover.stem, leftover.error)
                    else:
                        log.info("removed %s: %d bytes of a loader that died", leftover.stem, leftover.nbytes)
            except OSError as error:
                log.warning("could not sweep the leavings of dead loaders: %s", error)
        self._pid = os.getpid()
        self._owned: list[Segment | Doorbell | _Mark] = []
        self.control: Segment | None = None
        reaper.enter()
        self.stem = new_stem()
        _alive.add(self)

    def segment(self, part: str, nbytes: int, **options: Any) -> Segment:
        """A new segment of the group; `options` as Segment.create has them."""
        segment = Segment.create(f"{self.stem}-{part}", nbytes, **options)
        self._owned.append(segment)
        if part == "control":
            self.control = segment
            if segment.kind == "memfd":
                try:
                    self._owned.append(_Mark(f"{SHM_DIR}/{segment.name}"))
                except OSError as error:  # no folder, or it is read-only: then nothing of ours can be there to be taken
                    log.debug("no mark for %s: %s", segment.name, error)
        return segment

    def doorbell(self, part: str) -> Doorbell:
        """A new bell of the group."""
        bell = Doorbell.create(f"/{self.stem}-{part}")
        self._owned.append(bell)
        return bell

    def give_up(self, segment: Segment) -> None:
        """Closes one segment before the others."""
        self._owned.remove(segment)
        segment.close()

    def close(self) -> None:
        """Gives up every name. Mappings stay valid. Does nothing in a forked child, or twice."""
        if self._pid != os.getpid():
            return
        self._pid = -1
        for owned in reversed(self._owned):
            owned.close()
        self._owned.clear()
        _alive.discard(self)
        reaper.leave()


@atexit.register
def _close_groups() -> None:
    for group in list(_alive):
        group.close()
