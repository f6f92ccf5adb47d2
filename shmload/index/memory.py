"""An index's memory: made and filled by one process, mapped read-only by all, freed by the kernel with the last.

The maker owns a segment (shm/segment.py) in a group of its own, so the reaper and the janitor see to its name. What travels to
another process is a Reference: the way to the segment and its inode. A way may have led elsewhere since (a descriptor's number is
used again), an inode has not. To another machine the bytes themselves travel (shm/travel.py).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shmload._core.mapping import Mapping
from shmload.errors import RingTooSmall
from shmload.index.pack import Packed
from shmload.shm import owner, travel
from shmload.shm.group import Group
from shmload.shm.names import proc_self
from shmload.shm.preflight import available_bytes
from shmload.shm.segment import open_segment


class Reference(NamedTuple):
    """What a process needs to map an index's memory."""

    path: str
    inode: tuple[int, int]  # device and number
    nbytes: int


class Sent(np.ndarray[Any, Any]):
    """Bytes that have come from another machine, with a Mapping's attributes."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.ctypes.data


class Memory:
    """One mapping of an index, in this process.

    Attributes:
        mapping: the bytes, read-only.
        reference: how other processes of this machine come to them; None: not at all, they have come from another machine.
    """

    def __init__(self, mapping: Mapping | Sent, reference: Reference | None) -> None:
        self.mapping: Any = mapping  # what takes a Mapping takes either
        self.reference = reference

    @classmethod
    def create(cls, packed: Packed) -> Memory:
        """Makes a segment with the packed columns; its name goes with this object or its process.

        Raises:
            MemoryError: there is not enough.
        """
        return cls.written(packed.layout.nbytes, packed.write, f"an index of {packed.layout.count} entries")

    @classmethod
    def written(cls, nbytes: int, write: Callable[[int], None], what: str) -> Memory:
        """Makes a segment that `write` fills through its descriptor.

        Raises:
            MemoryError: there is not enough; `what` says for what.
        """
        nbytes = max(nbytes, 1)
        group = Group()
        try:
            segment = group.segment("control", nbytes)
            write(segment.fd)
            # populated, so that the kernel counts what a worker reads as shared with this process, and not as the worker's own
            mapping = Mapping(segment.fd, nbytes, populate=True, writable=False)
        except RingTooSmall as error:
            group.close()
            raise MemoryError(
                f"{what} needs {nbytes} bytes, and this process may take {available_bytes()} "
                "more: free memory, or hold less in it"
            ) from error
        except BaseException:
            group.close()
            raise
        status = os.fstat(segment.fd)
        memory = cls(mapping, Reference(segment.path, (status.st_dev, status.st_ino), nbytes))
        weakref.finalize(memory, group.close)
        return memory

    def ticket(self) -> Any:
        """What a pickle says of the memory, for `attach`."""
        return travel.carried(self.mapping) if self.reference is None or travel.is_abroad() else self.reference

    @classmethod
    def attach(cls, reference: Any, *, keeps_open: bool = False) -> Memory:
        """Maps another process's index.

        Args:
            reference: its Reference, or the bytes themselves, which came from another machine.
            keeps_open: hold a descriptor, so that others can come to the memory through this process, too.
        Raises:
            FileNotFoundError: its owner has let it go.
        """
        if not isinstance(reference, Reference):
            return cls(np.frombuffer(reference, np.uint8).view(Sent), None)
        try:
            fd = open_segment(reference.path)
        except OSError as error:
            raise _gone(reference.path) from error
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != reference.inode:
            os.close(fd)
            raise _gone(reference.path)
        mapping = Mapping(fd, reference.nbytes, writable=False)
        if not keeps_open:
            os.close(fd)
            return cls(mapping, reference)
        memory = cls(mapping, reference._replace(path=f"{proc_self()}/fd/{fd}"))
        weakref.finalize(memory, _release, owner.keep(fd), os.getpid())
        return memory


def _release(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the descriptor is closed, and its number may be another's
        owner.close(fd)


def _gone(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"the index at {path} is gone: the process that made it has ended or let it go. A pickled SharedIndex or dataset only says "
        "where the memory is; keep it alive where it was made, or make it again here"
    )
