"""A reservation in a budgeted folder: a file that is being written and already counts with its full size."""

from __future__ import annotations

import os
from collections.abc import Callable

from shmload import faults
from shmload.errors import StoreError
from shmload.processes.file_lock import FileLock
from shmload.storage.file_lease import Lease, Release
from shmload.storage.folder_session import Session
from shmload.storage.ledger import NEW, OURS, PublishedFile

__all__ = ["Reservation"]

Grow = Callable[[int, int, float | None], None]
"""Reserves more bytes for a file: (bytes reserved so far, additional bytes, timeout in seconds)."""


class Reservation:
    """A file that is being written. It is hidden, and counts with all its reserved bytes, until it is published or abandoned.

    Use it as a context manager: it abandons the file unless the block has published it. If the process is killed, the next
    process that needs room removes the file. Write to `path` or `fd` as to a file of its full length (mode "r+b", not "wb"),
    never past its end.

    Args:
        session: the state of this process in the folder.
        file: the file, open and locked.
        name: name of the temporary file.
        nbytes: number of bytes reserved.
        durable: whether to sync the file to the disk before it is published.
        grow: reserves more bytes for the file.
        let_go: ends the lease that `publish_leased` returns.
    Attributes:
        name: name of the temporary file.
        nbytes: number of bytes reserved; also the file's length until it is published.
    """

    def __init__(
        self, session: Session, file: FileLock, name: str, nbytes: int, *, durable: bool, grow: Grow, let_go: Release
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self._session = session
        self._file = file
        self._durable = durable
        self._grow = grow
        self._let_go = let_go
        self._is_open = True

    @property
    def path(self) -> str:
        """Return the path of the file until it is published."""
        return f"{self._session.folder}/{NEW}/{self.name}"

    @property
    def fd(self) -> int:
        """Return the file's descriptor, open for reading and writing. Do not close it, and do not use it after `publish`."""
        self._check_open()
        return self._file.fd

    def grow(self, nbytes: int, *, timeout_s: float | None = 0.0) -> None:
        """Reserve `nbytes` more bytes. Bytes that were written before stay.

        Args:
            nbytes: number of additional bytes.
            timeout_s: seconds to wait for room; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there is no room for them; the reservation stays as it was.
            ValueError: `nbytes` is negative.
        """
        self._check_open()
        if nbytes < 0:
            raise ValueError(f"a reservation must grow by at least 0 bytes, got {nbytes}")
        self._grow(self.nbytes, nbytes, timeout_s)
        self.nbytes += nbytes

    def publish(self, name: str, *, nbytes: int | None = None) -> PublishedFile:
        """Give the file its name. From then on it is visible to all processes, complete, and may be evicted.

        Args:
            name: name within the folder.
            nbytes: number of bytes written, if fewer than were reserved; the rest of the reservation is returned.
        Raises:
            FileExistsError: the folder has a file of this name.
            StoreError: more bytes were written than reserved.
        """
        with self.publish_leased(name, nbytes=nbytes) as lease:
            return lease.files[0]  # type: ignore[no-any-return]  # the block's value is of either class

    def publish_leased(self, name: str, *, nbytes: int | None = None) -> Lease:
        """Publish the file and lease it at the same moment, so that it cannot be evicted in between.

        Args:
            name: name within the folder.
            nbytes: number of bytes written, if fewer than were reserved.
        Raises:
            FileExistsError: the folder has a file of this name.
            StoreError: more bytes were written than reserved.
        """
        check_name(name)
        session, fd, folder = self._session, self.fd, self._session.folder
        written = os.fstat(fd).st_size
        if not os.path.samestat(os.stat(self.path), os.fstat(fd)):
            raise StoreError(f"{self.path} was replaced by another file: write into the reserved file instead of replacing it")
        if written > self.nbytes or (nbytes is not None and nbytes > self.nbytes):
            raise StoreError(
                f"{max(written, nbytes or 0)} bytes were written for {name}, but only {self.nbytes} are reserved: "
                f"reserve enough, or grow the reservation first"
            )
        if nbytes is not None and nbytes != written:
            os.ftruncate(fd, nbytes)
        if self._durable:
            os.fdatasync(fd)
        os.fchmod(fd, os.fstat(fd).st_mode | OURS)
        faults.hit("before_publish")
        with session.locked() as ledger:
            if os.path.lexists(f"{folder}/{name}"):
                raise FileExistsError(f"{folder} already has a file {name}: publish under another name, or discard that file first")
            ledger.changing()
            time_ns = ledger.next_time()
            os.utime(fd, ns=(time_ns, time_ns))
            os.rename(self.path, f"{folder}/{name}")
            faults.hit("after_publish")
            status = os.fstat(fd)
            kept = PublishedFile(name, status.st_size, status.st_mtime_ns, status.st_ino)
            ledger.end_writing(self.name)
            ledger.add(kept)
            session.process_leases.hold([kept.ino])
        self._is_open = False
        session.end_writing(self.name)
        return Lease(folder, (kept,), self._let_go)

    def abandon(self) -> None:
        """Remove the file and return its room. Do nothing after `publish`, or in a forked child."""
        if not self._is_open or self._session.is_closed or self._session.pid != os.getpid():
            return
        self._is_open = False
        with self._session.locked() as ledger:
            ledger.changing()
            if os.path.exists(self.path):
                os.unlink(self.path)
            ledger.end_writing(self.name)
        self._session.end_writing(self.name)

    def _check_open(self) -> None:
        if not self._is_open or self._session.is_closed:
            raise ValueError(f"the reservation {self.name} has been published or abandoned, or its folder was closed")
        if self._session.pid != os.getpid():
            raise ValueError(
                f"the reservation {self.name} belongs to process {self._session.pid}: make another one in a forked child"
            )

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __repr__(self) -> str:
        return f"<Reservation of {self.nbytes} bytes in {self._session.folder}{'' if self._is_open else ', ended'}>"


def check_name(name: str) -> None:
    """Raise ValueError if the name cannot be that of a file in the folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(f"a file name must have 1 to 255 bytes, no '/', and no '.' at its beginning, got {name!r}")
