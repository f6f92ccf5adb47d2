"""Segments: pieces of shared memory that one process creates and others open by path.

A segment is a file in /dev/shm, like those of multiprocessing.shared_memory, or a memfd if /dev/shm has no room. A file in /dev/shm
is reserved whole with posix_fallocate, so that a lack of memory is an error now and not a SIGBUS later. That takes 0.25 s per GiB.
So a large ring uses a memfd, which is not limited by the size of /dev/shm: its size is compared with the free memory, and its
memory is reserved incrementally. The owner reserves the next part when it is idle, and workers have the kernel allocate the rows
that they are about to write (`Mapping.populate`).

The owner holds a flock on the file. That lock, and not a pid, shows others that the owner lives, because pids mean nothing across
containers that share /dev/shm. Other processes open `path`: the name, or the owner's descriptor under /proc. A descriptor's
number can be reused for another file, so such a path also contains the memfd's name, which is compared after opening. No name is
ever reused, so a path identifies one segment forever, and others may cache by path.

The file is created here, without multiprocessing's resource tracker. The tracker would share the trainer's process group and die
with it, and it would report and remove what the reaper and `shmload clean` (janitor.py) handle. On Python < 3.13, creating a
segment starts the tracker, a Python process of 30 ms, and each process that attaches starts one of its own, whose exit unlinks a
live segment.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import weakref
from contextlib import suppress
from typing import Literal

from shmload._core.mapping import Mapping
from shmload.errors import RingTooSmall
from shmload.processes import private_fds
from shmload.processes.file_lock import try_lock
from shmload.shm.free_memory import check_fits, shm_free_bytes
from shmload.shm.names import NEW, SHM_DIR, proc_self

Kind = Literal["auto", "shm", "memfd"]
UNCHECKED_NBYTES = 1 << 20  # up to this size, free memory is not checked: the check reads all cgroups, which delays the first batch
_NAMED = "#"  # separates a descriptor from the name of its memfd


class Segment:
    """A segment that this process owns until `close`. Make one with `create`.

    Attributes:
        name: its unique name.
        nbytes: its size.
        path: the argument of `open_segment` and `map_segment` in another process of this user.
        kind: "shm" for a file in /dev/shm, or "memfd".
        fd: the owner's descriptor.
        num_reserved: number of bytes from the start that are certain to have memory.
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
            name: the name, which must be unique on the host and never be reused.
            nbytes: the size.
            kind: "auto" takes a memfd if /dev/shm is too small, read-only or missing.
            slots: (number, bytes each) of the slots that it will contain, for the error message.
            num_reserved: bytes to reserve at once, from the start; None for all.
        Raises:
            RingTooSmall: there is not enough memory, or `kind` demands "shm" and /dev/shm has no room.
            OSError: too many files are open.
        """
        if nbytes > UNCHECKED_NBYTES:
            check_fits(nbytes, slots, promised_nbytes=unreserved_bytes())
        if num_reserved is None:
            num_reserved = nbytes
        if kind != "memfd":
            try:
                return cls._created(name, nbytes, _create_named(name, nbytes, num_reserved), "shm", num_reserved)
            except OSError as error:
                _check_descriptors(error)
                if kind == "shm":
                    raise RingTooSmall(_too_small(nbytes, slots, error)) from error
        try:
            return cls._created(name, nbytes, _create_memfd(name, nbytes, num_reserved), "memfd", num_reserved)
        except OSError as error:
            _check_descriptors(error)
            remedy = ": raise the limit on file sizes (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise RingTooSmall(f"cannot create a segment of {nbytes} bytes: {os.strerror(error.errno or 0)}{remedy}") from error

    @classmethod
    def _created(cls, name: str, nbytes: int, fd: int, kind: Literal["shm", "memfd"], num_reserved: int) -> Segment:
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
    """Open another process's segment for reading and writing, and return the descriptor, which the caller closes.

    Args:
        path: the `path` of the owner's segment.
    Raises:
        PermissionError: the path is not a file of this user.
        FileNotFoundError: its owner has ended, or has closed it.
    """
    place, _, name = path.partition(_NAMED)
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if path.startswith(SHM_DIR) else 0)
    fd = os.open(place, flags)
    if name and os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)") != f"/memfd:{name}":
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "its owner has closed it", path)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is not a segment of user {os.geteuid()}")
    return fd


def map_segment(path: str, **options: bool) -> Mapping:
    """Map all of another process's segment.

    Args:
        path: the `path` of the owner's segment.
        options: options of `Mapping`.
    Raises:
        OSError: as `open_segment`.
    """
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
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", path)
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


def _check_descriptors(error: OSError) -> None:
    """Raise if an error is a lack of descriptors and not of memory."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: a loader with workers keeps 3 files open, and 3 more for each worker. Close loaders that "
            "are no longer needed, or raise the limit (ulimit -n)",
        ) from error


def _taken_meanwhile(path: str, nbytes: int, num_reserved: int, error: OSError) -> str:
    return (
        f"{path}: the ring needs {nbytes} bytes, which were free when the ring was created. {num_reserved} are reserved, "
        f"and other processes have taken the rest ({os.strerror(error.errno or 0)}). Free memory, or lower "
        "prefetch_factor, num_workers or batch_size"
    )


def _too_small(nbytes: int, slots: tuple[int, int] | None, error: OSError) -> str:
    free = shm_free_bytes()
    text = f"{SHM_DIR} has {free} bytes free, the ring needs {nbytes} ({os.strerror(error.errno or 0)})"
    if slots is not None:
        text += f": {slots[0]} slots of {slots[1]} bytes, of which {free // max(slots[1], 1)} would fit"
    return text + ". Enlarge it (docker run --shm-size), lower prefetch_factor or batch_size, or let the ring use a memfd"
