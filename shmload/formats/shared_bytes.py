"""`SharedBytes`: read-only bytes in shared memory. A pickle contains their location instead of the bytes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from shmload._core.mapping import Mapping as MappedMemory
from shmload.errors import RingTooSmall
from shmload.processes import private_fds
from shmload.shm import pickling
from shmload.shm.free_memory import available_bytes
from shmload.shm.names import proc_self
from shmload.shm.segment import open_segment
from shmload.shm.segment_group import SegmentGroup


class Reference(NamedTuple):
    """The location of shared memory, by which another process of the machine can map it."""

    path: str
    inode: tuple[int, int]  # device and number
    nbytes: int


class ReceivedBytes(np.ndarray[Any, Any]):
    """Bytes received from another machine, in private memory, with the attributes of `_core.mapping.Mapping`."""

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self.ctypes.data


class SharedBytes:
    """Read-only bytes in shared memory, mapped into this process.

    Other processes can map the memory while the instance that `written` returned, or one attached with `keeps_open`, exists. What
    they have mapped stays valid after that.

    Attributes:
        mapping: the bytes, read-only.
        reference: how other processes of this machine can map the memory; None if they cannot, because the bytes came from another
            machine.
    """

    def __init__(self, mapping: MappedMemory | ReceivedBytes, reference: Reference | None) -> None:
        self.mapping: Any = mapping  # code that takes a `_core.mapping.Mapping` accepts both types
        self.reference = reference

    @classmethod
    def written(cls, nbytes: int, parts: Iterable[tuple[int, Any]], what: str) -> SharedBytes:
        """Create a segment and write (offset, bytes) parts to it, which may leave gaps.

        The parts are written with a system call and not through a mapping, because the kernel then neither clears pages that are
        completely overwritten nor takes page faults.

        Args:
            nbytes: size of the segment.
            parts: offset and content of each part.
            what: what the memory is for, for errors.
        Raises:
            MemoryError: there is not enough memory; the message contains `what`.
        """
        nbytes = max(nbytes, 1)
        group = SegmentGroup()
        try:
            segment = group.segment("control", nbytes)
            for begin, part in parts:
                written = 0
                while written < part.nbytes:  # one call writes at most 2 GiB
                    written += os.pwrite(segment.fd, part[written:], begin + written)
            # populated, so that the kernel counts pages that a worker reads as shared with this process, not as the worker's own
            mapping = MappedMemory(segment.fd, nbytes, populate=True, writable=False)
        except RingTooSmall as error:
            group.close()
            raise MemoryError(
                f"{what} needs {nbytes} bytes, and this process may take {available_bytes()} more: free memory, or store less in it"
            ) from error
        except BaseException:
            group.close()
            raise
        status = os.fstat(segment.fd)
        memory = cls(mapping, Reference(segment.path, (status.st_dev, status.st_ino), nbytes))
        weakref.finalize(memory, group.close)
        return memory

    def to_pickle(self) -> Any:
        """Return the object that a pickle contains in place of the memory; `attach` accepts it."""
        return pickling.out_of_band(self.mapping) if self.reference is None or pickling.is_for_another_machine() else self.reference

    @classmethod
    def attach(cls, reference: Any, *, keeps_open: bool = False) -> SharedBytes:
        """Map the memory of another process.

        Args:
            reference: its Reference, or the bytes themselves if they came from another machine.
            keeps_open: keep a file descriptor, so that others can map the memory through this process, too.
        Raises:
            FileNotFoundError: the owner has released the memory.
        """
        if not isinstance(reference, Reference):
            return cls(np.frombuffer(reference, np.uint8).view(ReceivedBytes), None)
        try:
            fd = open_segment(reference.path)
        except OSError as error:
            raise _gone(reference.path) from error
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != reference.inode:
                raise _gone(reference.path)
            mapping = MappedMemory(fd, reference.nbytes, writable=False)
        except BaseException:
            os.close(fd)
            raise
        if not keeps_open:
            os.close(fd)
            return cls(mapping, reference)
        memory = cls(mapping, reference._replace(path=f"{proc_self()}/fd/{fd}"))
        weakref.finalize(memory, _release, private_fds.keep(fd), os.getpid())
        return memory


def _release(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has closed the descriptor, and may have reused its number
        private_fds.close(fd)


def _gone(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"the shared memory at {path} is gone: the process that created it has ended or released it. A pickled SharedIndex or "
        "dataset contains only the location of its memory: keep the original alive, or create it again here"
    )
