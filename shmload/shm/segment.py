"""The shared memory of one loader: segments, doorbells, the group that owns them, and the check that they fit into memory.

A *segment* is a named POSIX segment like multiprocessing.shared_memory's, or a memfd if /dev/shm has no room. A named segment is
reserved whole with posix_fallocate, so that a lack of memory is an error now and not a SIGBUS later. That takes 0.25 s a GiB. So
a large ring uses a memfd, which is not limited by the size of /dev/shm: its size is compared with the free memory, and its memory
is reserved incrementally. The owner reserves the next part when it is idle, and workers have the kernel allocate the rows that
they are about to write (`Mapping.populate`).

The owner holds a flock on the file. That lock, and not a pid, shows others that the owner lives, because pids mean nothing across
containers that share /dev/shm. Other processes open `path`: the name, or the owner's descriptor under /proc. A descriptor's
number can be reused for another file, so such a path also contains the memfd's name, which is compared after opening. No name is
ever reused, so a path identifies one segment forever, and others may cache by path.

The file is created here, without multiprocessing's resource tracker. The tracker would share the trainer's process group and die
with it, and it would report and remove what the reaper and `shmload clean` (janitor.py) handle. On Python < 3.13, creating a
segment starts the tracker, a Python process of 30 ms, and each process that attaches starts one of its own, whose exit unlinks a
live segment.

*Free memory* is the smallest of the machine's free memory and the rest of every cgroup of this process, v1 and v2, from its own
up to the root. A container sees its own cgroup mounted at the top, while /proc still names the path on the host: missing folders
are skipped on the way up, and the top is always read. Functions that parse take the root of the file system as an argument, so
that tests can pass the trees of other machines.

A *doorbell* is a POSIX semaphore that means "look again", and nothing more: the state is in the owner words (src/protocol.h). It
is never a lock, because a killed holder would never release it. Posts may be lost with a killed process and may come too often,
so every wait has a timeout and is followed by a look. A bell has a name where possible. A read-only, full or missing /dev/shm
cannot hold it (the C library keeps semaphores there): then the semaphore is in a memfd, and its name is the owner's descriptor
under /proc, as with segments.

A *group* is the segments and bells of one loader, under one stem and closed together. The first group of a process removes what
dead loaders have left and starts the reaper.
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
except ImportError:  # no wheel for Python 3.14, where it is not required: every bell is in a memfd
    posix_ipc = None

_NO_LIMIT = 1 << 60  # v1 expresses "no limit" by a number near 2^63


class CgroupMemory(NamedTuple):
    """One cgroup with a memory limit.

    Attributes:
        folder: its directory in the cgroup file system.
        version: 1 or 2.
        limit, used: in bytes; `used` includes shared memory that its processes were the first to touch.
        rest: bytes still available. Page cache that the kernel would drop counts as free.
    """

    folder: Path
    version: int
    limit: int
    used: int
    rest: int


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield (1 or 2, folder) for each cgroup that may limit a controller, the innermost first."""
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
    """Return every cgroup, from this process's own up, that limits its memory."""
    found = []
    for version, folder in folders("memory", root):
        limit, usage = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = number(folder / limit), number(folder / usage)
        if most is not None and used is not None:
            found.append(CgroupMemory(folder, version, most, used, max(most - used + _droppable(folder), 0)))
    return found


def cpus(root: Path = Path("/")) -> float | None:
    """Return how many processors' time this process may use; None if no cgroup limits it."""
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
    """Return the number in a file; None if there is no number or it means "no limit"."""
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
    """Return the free bytes in /dev/shm; 0 if it is missing or read-only."""
    try:
        if not os.access(root, os.W_OK):
            return 0
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still allocate: the free memory, limited by each of its cgroups."""
    return min([free_memory_bytes(root), *(cgroup.rest for cgroup in memory(root))])


def check_fits(nbytes: int, slots: tuple[int, int] | None = None, root: Path = Path("/")) -> None:
    """Raise if `nbytes` exceeds the available memory. Allocating more would not fail, but invoke the kernel's OOM killer.

    Args:
        nbytes: the size of the segment.
        slots: (number, bytes each) of a ring.
        root: the root of the file system.
    Raises:
        RingTooSmall: the memory is too small. The message has the bytes needed and free, how many slots would fit, and a remedy.
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
    """Return the bytes that programs may allocate before the kernel swaps or kills; a very large number if unknown."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


Kind = Literal["auto", "shm", "memfd"]

_NAMED = "#"  # separates a descriptor from the name of its memfd


class Segment:
    """`nbytes` of shared memory, owned by this process until `close`.

    Attributes:
        path: the path that another process of this user opens to attach.
        kind: "shm" or "memfd".
        fd: the owner's descriptor.
        num_reserved: bytes from the start that are certain to have memory.
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
        """Create a segment, filled with zeros.

        Args:
            name: the name; never reused.
            nbytes: the size.
            kind: "auto" takes a memfd if /dev/shm is too small, read-only or missing.
            slots: (number, bytes each) of the slots that it will contain, for the error message.
            num_reserved: bytes to reserve at once, from the start; None for all.
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
        """Reserve up to `nbytes` more bytes.

        Raises:
            RingTooSmall: there is no longer enough memory.
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
        """Remove the name and close the descriptor; mappings stay valid. Does nothing in a forked child. Idempotent."""
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
        """Return the number of bytes that have no memory yet; 0 in a forked child, which does not own the segment."""
        return max(self.nbytes - os.fstat(self.fd).st_blocks * 512, 0) if os.getpid() == self._pid else 0


_sparse: weakref.WeakSet[Segment] = weakref.WeakSet()  # segments that are not reserved completely yet


def unreserved_bytes() -> int:
    """Return the bytes of this process's own segments that have no memory yet. They count as free, but are not free for others."""
    return sum(segment.unreserved_nbytes for segment in list(_sparse))


def memfd_path(name: str, fd: int) -> str:
    """Return the path by which `open_segment` opens a memfd of this process, as long as it is open here.

    Args:
        name: the unique name that it was created with.
        fd: its descriptor.
    """
    return f"{proc_self()}/fd/{fd}{_NAMED}{name}"


def try_memfd() -> None:
    """Create a memfd, open it as a worker would, and close it. Raise OSError or RingTooSmall if that is impossible."""
    made = Segment.create("shmload-try", 4096, kind="memfd")
    try:
        os.close(open_segment(made.path))
    finally:
        made.close()


@functools.cache
def memfds_work() -> bool:
    """Return whether memfds work for this process: a sandbox may forbid them, or have no /proc."""
    try:
        try_memfd()
    except (OSError, RingTooSmall):
        return False
    return True


def open_segment(path: str) -> int:
    """Open another process's segment for reading and writing.

    Raises:
        PermissionError: the path is not a file of this user.
        FileNotFoundError: its owner has ended, or has closed it.
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
    """Map all of another process's segment. It raises OSError in the same cases as `open_segment`."""
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
        if not try_lock(fd):  # a janitor is examining it, and may remove it
            raise BlockingIOError(errno.EWOULDBLOCK, "it is locked already", path)
        os.fchmod(fd, 0o600)
        _reserve_first(fd, num_reserved)
        os.rename(path, f"{SHM_DIR}/{name}")  # never visible unlocked under its name, because a janitor removes what it can lock
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
    """Create the file as shm_open does, without multiprocessing (see the module's docstring)."""
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
        f"{path}: the ring needs {nbytes} bytes, which were free when the ring was made. It got {num_reserved}, and others have "
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
    """Several bells that are rung together: one waiter at each of them wakes."""

    def __init__(self, bells: Sequence[Doorbell]) -> None:
        self._bells = tuple(bells)

    def post_up_to(self, count: int) -> None:
        """Ring each bell until `count` rings are pending there."""
        for bell in self._bells:
            bell.post_up_to(count)


class Doorbell(Bell):
    """One semaphore. The process that created it removes its name with `close`.

    Args:
        name: begins with a slash; the argument of `attach`.
        fd: the memfd that contains it; -1 for a named semaphore.
    """

    def __init__(self, name: str, fd: int = -1, *, is_owner: bool) -> None:
        self.name, self._fd = name, fd
        self._owner_pid = os.getpid() if is_owner else 0

    @classmethod
    def create(cls, name: str) -> Doorbell:
        """Create a bell without pending rings.

        Args:
            name: begins with a slash. A bell in a memfd gets another name.
        Raises:
            OSError: a bell of neither kind can be created, for lack of memory or of descriptors.
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
        """Open another process's bell.

        Raises:
            FileNotFoundError: its owner has ended.
        """
        if not name.startswith("/proc/"):
            return cls(name, is_owner=False)
        fd = open_segment(name)
        try:
            return cls(name, fd, is_owner=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the name, if this process created it. Does nothing in a forked child. Idempotent."""
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
    """An empty locked file in place of an unnamed control segment, so that a janitor does not remove the group's named bells."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = FileLock.open(path + NEW, os.O_CREAT | os.O_EXCL, 0o600)
        if not self._lock.try_acquire():  # as above
            self._lock.close()
            os.unlink(path + NEW)
            raise BlockingIOError(errno.EWOULDBLOCK, "it is locked already", path)
        os.rename(path + NEW, path)  # never visible unlocked: see janitor.py

    def close(self) -> None:
        """Remove the file. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._lock.close()


class Group:
    """The segments and bells of one loader. Closed when the process ends at the latest.

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
        """Create a segment of the group; `options` are those of Segment.create."""
        segment = Segment.create(f"{self.stem}-{part}", nbytes, **options)
        self._owned.append(segment)
        if part == "control":
            self.control = segment
            if segment.kind == "memfd":
                try:
                    self._owned.append(_Mark(f"{SHM_DIR}/{segment.name}"))
                except OSError as error:  # no folder, or it is read-only: then it cannot contain bells to remove
                    log.debug("no mark for %s: %s", segment.name, error)
        return segment

    def doorbell(self, part: str) -> Doorbell:
        """Create a bell of the group."""
        bell = Doorbell.create(f"/{self.stem}-{part}")
        self._owned.append(bell)
        return bell

    def close_segment(self, segment: Segment) -> None:
        """Close one segment before the group is closed."""
        self._owned.remove(segment)
        segment.close()

    def close(self) -> None:
        """Remove every name. Mappings stay valid. Does nothing in a forked child. Idempotent."""
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
