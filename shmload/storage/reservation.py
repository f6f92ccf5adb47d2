"""Room in a budgeted folder, taken before anything is written there."""

from __future__ import annotations

import io
import mmap
import os
from typing import TYPE_CHECKING

from shmload import faults
from shmload.errors import StoreError
from shmload.storage.lease import Lease
from shmload.storage.ledger import NEW, OURS, Kept
from shmload.storage.settling import FRESH, boot_id

if TYPE_CHECKING:
    from shmload.storage.folder import BudgetedFolder
    from shmload.storage.session import Session

__all__ = ["Reservation"]


class Reservation:
    """A file that is being written: nobody sees it, and it counts with all the bytes reserved until it is published or abandoned.

    A context manager that abandons what the block has not published. What its process leaves when it is killed is removed by the
    next process that needs room. Write to `path` or `fd` as to a file of its full length (mode "r+b", not "wb"), never beyond it.

    Args:
        folder: that made it: BudgetedFolder.reserve.
        session: its process at the folder.
    Attributes:
        name: of the temporary file.
        nbytes: what is reserved; also the file's length until it is published.
    """

    def __init__(self, folder: BudgetedFolder, session: Session, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._folder = folder
        self._session = session
        self._is_open = True

    @property
    def path(self) -> str:
        """Where the file lies until it is published."""
        return f"{self._session.folder}/{NEW}/{self.name}"

    @property
    def fd(self) -> int:
        """Its descriptor, open for reading and writing; not to be closed, nor used behind `publish`."""
        self._check_open()
        return self._session.descriptors[self.name]

    def open(self) -> io.FileIO:
        """The file, opened once more, at its begin: for writers that take a file. To be closed before `publish`."""
        self._check_open()
        return io.FileIO(self.path, "r+")

    def map(self) -> mmap.mmap:
        """The file as writable memory. To be closed before `publish`."""
        self._check_open()
        with self.open() as file:  # its own description: one that is mapped would keep the writer's lock alive
            return mmap.mmap(file.fileno(), self.nbytes)

    def grow(self, nbytes: int, *, timeout_s: float | None = 0.0) -> None:
        """Reserves more: `nbytes` in addition. What is written stays.

        Args:
            nbytes: how many more.
            timeout_s: seconds to wait for room; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there is no room for it; the reservation stays as it was.
        """
        self._check_open()
        self._folder._grow(self._session, self.name, self.nbytes, nbytes, timeout_s)
        self.nbytes += nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back `nbytes` of what is reserved, at the file's end.

        Args:
            nbytes: how many fewer.
        Raises:
            ValueError: so many are not reserved.
        """
        self._check_open()
        if not 0 <= nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes cannot be given back: {self.nbytes} are reserved")
        with self._session.locked() as ledger:
            ledger.changing()
            os.ftruncate(self.fd, self.nbytes - nbytes)
            ledger.set_writing(self.name, self.nbytes - nbytes)
            self._session.presence.ring()
        self.nbytes -= nbytes

    def publish(self, name: str, *, nbytes: int | None = None) -> Kept:
        """Gives the file its name: from here on all see it, whole, and it may be evicted.

        Args:
            name: within the folder; another file of that name is an error.
            nbytes: how many bytes were written, if fewer than were reserved; the rest is given back.
        Raises:
            FileExistsError: the folder has a file of that name.
            StoreError: more was written than reserved.
        """
        return self._publish(name, nbytes, leases=False).files[0]

    def publish_leased(self, name: str, *, nbytes: int | None = None) -> Lease:
        """`publish`, and leases the file in the same moment.

        Args:
            name: within the folder; another file of that name is an error.
            nbytes: how many bytes were written, if fewer than were reserved.
        Raises:
            FileExistsError: the folder has a file of that name.
            StoreError: more was written than reserved.
        """
        return self._publish(name, nbytes, leases=True)

    def abandon(self) -> None:
        """Removes the file and gives its room back. Does nothing once it is published, or in a forked child."""
        if not self._is_open or self._session.pid != os.getpid():
            return
        self._is_open = False
        with self._session.locked() as ledger:
            ledger.changing()
            if os.path.exists(self.path):
                os.unlink(self.path)
            ledger.end_writing(self.name)
        self._session.end_writing(self.name)

    def _publish(self, name: str, nbytes: int | None, *, leases: bool) -> Lease:
        check_name(name)
        session, fd, folder = self._session, self.fd, self._session.folder
        written = os.fstat(fd).st_size
        if not os.path.samestat(os.stat(self.path), os.fstat(fd)):
            raise StoreError(
                f"{self.path} is another file than the one reserved: write into it instead of replacing it"
            )
        if written > self.nbytes or (nbytes is not None and nbytes > self.nbytes):
            raise StoreError(
                f"{max(written, nbytes or 0)} bytes were written for {name} where {self.nbytes} are reserved: "
                f"reserve enough, or grow the reservation first"
            )
        if nbytes is not None and nbytes != written:
            os.ftruncate(fd, nbytes)
        mark = OURS
        if self._folder.durable:
            if boot_id() is None:
                os.fdatasync(fd)
            else:
                mark |= FRESH
        os.fchmod(fd, os.fstat(fd).st_mode | mark)
        faults.hit("before_publish")
        with session.locked() as ledger:
            if os.path.lexists(f"{folder}/{name}"):
                raise FileExistsError(
                    f"{folder} has a file {name} already: publish under another name, or discard it first"
                )
            ledger.changing()
            time_ns = ledger.next_time()
            os.utime(fd, ns=(time_ns, time_ns))
            os.rename(self.path, f"{folder}/{name}")
            faults.hit("after_publish")
            status = os.fstat(fd)
            kept = Kept(name, status.st_size, status.st_mtime_ns, status.st_ino)
            ledger.end_writing(self.name)
            ledger.add(kept)
            if leases:
                session.presence.hold([kept.ino])
        self._is_open = False
        session.end_writing(self.name)
        if mark & FRESH:
            self._folder.settling.published(f"{folder}/{name}")
        return Lease(folder, (kept,), self._let_go if leases else _nothing)

    def _let_go(self, inos: tuple[int, ...]) -> None:
        self._folder._let_go(self._session, inos)

    def _check_open(self) -> None:
        if not self._is_open or self._session.pid < 0:
            raise ValueError(f"the reservation {self.name} has been published or abandoned, or its folder closed")
        if self._session.pid != os.getpid():
            raise ValueError(
                f"the reservation {self.name} is process {self._session.pid}'s: a forked child makes its own"
            )

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __repr__(self) -> str:
        return f"<Reservation of {self.nbytes} bytes in {self._session.folder}{'' if self._is_open else ', ended'}>"


def check_name(name: str) -> None:
    """Refuses what cannot be a file of the folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(
            f"a file of the folder is named by 1 to 255 bytes without '/' and not beginning with '.'; got {name!r}"
        )


def _nothing(_: tuple[int, ...]) -> None:
    """The release of what was never leased."""
