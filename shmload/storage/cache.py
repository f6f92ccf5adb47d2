"""Copies of a store's objects on a local disk, within a budget, shared by all processes of a node.

A file's name is made of the object's key and its version (etag), so a changed object is another file, and what is found under a
name is what was asked for: nothing says otherwise anywhere, and nothing can be stale. A file is fetched by one process; the others
that want it wait, and one of them takes over at once when it fails or dies.

The best file to evict is the one whose next use lies farthest in the future (Belady, 1966). Nobody knows the future but a loader,
whose schedule is a formula: a process announces what it will open, and evicts by that. First goes what it has not announced,
least recently used first; then what is needed after the file that room is asked for, the latest first. What is needed sooner stays,
and the request waits. Ranks and workers of one dataset read from the same shards at the same time, so each goes by its own
announcement.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shmload import faults
from shmload.errors import StoreError
from shmload.storage.folder import BudgetedFolder, FolderStatistics, Lease, Reservation, begun
from shmload.storage.ledger import Kept

__all__ = ["Cache", "LocalCacheStatistics"]

DIGEST_DIGITS = 16  # of a file's name: which key it is


def digest_of(key: str) -> str:
    """The first part of a file's name: 64 bits of the key."""
    return hashlib.blake2b(os.fsencode(key), digest_size=DIGEST_DIGITS // 2).hexdigest()


Fetch = Callable[[int], None]
"""Writes all of an object into the file that a descriptor names, by pwrite: a third of a mapping's cost."""


@dataclass(frozen=True, slots=True)
class LocalCacheStatistics:
    """What a process has had of a cache, and the cache's folder now.

    Attributes:
        num_hits: objects that were there, or that another process brought meanwhile.
        num_fetched: objects that this process fetched.
        nbytes_fetched: their bytes.
        folder: the folder that all processes share.
    """

    num_hits: int
    num_fetched: int
    nbytes_fetched: int
    folder: FolderStatistics


class Cache:
    """A budget of a disk in front of object stores. Any number of ranks and workers of a node use one folder.

    Picklable; a forked or spawned process goes on with what it is given, and announces what it needs itself. What is killed leaves
    nothing half done that anybody sees, and nothing behind: the next process that needs room removes what it was writing.

    Args:
        folder: on a local disk; made if it is not there.
        capacity_bytes: what the files may add up to; all users of the folder give the same.
        durable: a file's bytes are on the disk before it is seen, so that a power failure cuts none. Without it bytes may then be
            missing, though the length is right.
    Attributes:
        path: the folder.
        capacity_bytes: the budget.
    Raises:
        ValueError: no budget, or living processes use the folder with another one.
        StoreError: the folder's file system has no locks.
    Cost: 25 us for a lease of a file that is there.
    Thread/process safety: all methods, from any thread and process.
    Example:
        >>> import tempfile
        >>> cache = Cache(tempfile.mkdtemp(), 10_000)
        >>> def fetch(fd):
        ...     os.pwrite(fd, b"payload", 0)
        >>> with cache.open("s3://bucket/part-0.tar", 7, fetch, etag="v1") as lease:
        ...     os.pread(lease.fd, 100, 0)
        b'payload'
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int, *, durable: bool = True) -> None:
        self._folder = BudgetedFolder(folder, capacity_bytes, durable=durable)
        self._begin()

    def open(self, key: str, nbytes: int, fetch: Fetch, *, etag: str, timeout_s: float | None = 600.0) -> Lease:
        """A lease of an object's file, which is fetched first if it is not there.

        Args:
            key: where the object is, its store's address included and no credentials: the same for all who mean the same object.
            nbytes: its length, which is checked.
            fetch: called with the descriptor of a file of that length, if the object must be fetched; writes all of it. What it
                raises is raised here, and the next one tries.
            etag: its version. Files of other versions of the key are not taken, and removed where nobody reads them.
            timeout_s: seconds to wait for room or for another process that fetches it; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time: all is leased or needed sooner, or the object is larger than the budget.
            TimeoutError: another process was still fetching it.
        """
        digest = digest_of(key)
        try:
            return self._open(key, digest, nbytes, fetch, etag, timeout_s)
        finally:
            with contextlib.suppress(ValueError):  # was not announced
                self._coming.remove(digest)  # not before it is leased: nobody else would keep its file meanwhile

    def expect(self, keys: Iterable[str]) -> None:
        """Announces what this process will open, in that order, in place of what it announced before.

        `open` crosses a key off, in whatever order. This process evicts first what it does not expect, least recently used first,
        then what it needs last; what it needs before the file that asks for room stays.

        Args:
            keys: as they will be given to `open`; one that will be opened twice stands there twice.
        """
        self._coming = [digest_of(key) for key in keys]

    def statistics(self) -> LocalCacheStatistics:
        """Counts of this process, and the folder now."""
        return LocalCacheStatistics(self._num_hits, self._num_fetched, self._nbytes_fetched, self._folder.statistics())

    def close(self) -> None:
        """Ends this process's leases and its announcement. The next use begins anew."""
        self._coming = []
        self._folder.close()

    def _open(self, key: str, digest: str, nbytes: int, fetch: Fetch, etag: str, timeout_s: float | None) -> Lease:
        name = _name(key, digest, etag)
        order = functools.partial(self._order, digest)
        while True:
            found = self._folder.obtain(name, nbytes, timeout_s=timeout_s, order=order)
            if isinstance(found, Reservation):
                return self._fetched(found, name, nbytes, fetch)
            status = os.stat(found.path)
            if status.st_size == nbytes:
                os.utime(found.path, ns=(time.time_ns(), found.files[0].published_ns))  # the time of its last use
                self._num_hits += 1
                return found
            path, length = found.path, status.st_size
            found.release()
            if not self._folder.discard(name):
                raise StoreError(
                    f"{path} has {length} bytes where {key} has {nbytes}, and others are reading it: somebody has changed the "
                    f"file, or the length belongs to another version than the etag {etag!r}"
                )

    def _order(self, digest: str, candidates: Iterable[Kept]) -> Iterator[Kept]:
        """Which files may go for one that is needed, the first to go first. Under the folder's lock."""
        needed = {each: number for number, each in reversed(list(enumerate(self._coming)))}  # the first use of each
        files = list(candidates)
        newest = {kept.name[:DIGEST_DIGITS]: kept.name for kept in files}  # of several versions of an object the last
        expected: list[tuple[int, Kept]] = []
        others: list[tuple[int, Kept]] = []
        for kept in files:
            number = needed.get(kept.name[:DIGEST_DIGITS])
            if number is not None and newest[kept.name[:DIGEST_DIGITS]] == kept.name:
                expected.append((number, kept))
            else:
                with contextlib.suppress(FileNotFoundError):
                    others.append((os.stat(f"{self.path}/{kept.name}").st_atime_ns, kept))
        yield from (kept for _, kept in sorted(others))
        yield from (kept for number, kept in sorted(expected, reverse=True) if number > needed.get(digest, -1))

    def _fetched(self, reservation: Reservation, name: str, nbytes: int, fetch: Fetch) -> Lease:
        with reservation:
            fetch(reservation.fd)
            faults.hit("after_fetch")
            lease = reservation.publish_leased(name)
        self._num_fetched += 1
        self._nbytes_fetched += nbytes
        for kept in self._folder.files():
            if kept.name != name and kept.name.startswith(name[:DIGEST_DIGITS] + "-"):
                self._folder.discard(kept.name)
        return lease

    def _begin(self) -> None:
        self.path, self.capacity_bytes = self._folder.path, self._folder.capacity_bytes
        self._coming = []  # digests of what this process will open
        self._num_hits = self._num_fetched = self._nbytes_fetched = 0
        begun.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<Cache {self.path} of {self.capacity_bytes} bytes>"


def _name(key: str, digest: str, etag: str) -> str:
    """Of an object's file: its key, its version, and for people and readers the end of the key."""
    version = hashlib.blake2b(f"{key}\0{etag}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    hint = "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in key.rsplit("/", 1)[-1])
    return f"{digest}-{version}-{hint[-100:]}"
