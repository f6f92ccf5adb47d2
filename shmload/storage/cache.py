"""Copies of a store's objects on a local disk, within a budget, shared by all processes of a machine.

A file's name is made of the object's key and its version (etag), so a changed object is another file and a copy cannot be stale.
One process fetches a file; the others that want it wait, and one of them takes over at once if the first fails or dies.

The best file to evict is the one whose next use is farthest in the future (Belady, 1966). A loader knows its future, because its
schedule is a formula: each process announces what it will open, and evicts accordingly. Files that it has not announced go first,
least recently used first; then files that it needs later than the file for which room is made, the latest first. Files that it
needs sooner stay, and the request waits. Ranks and workers of one dataset read the same shards at the same time, so each process
uses its own announcement only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

from shmload import faults
from shmload.errors import StoreError
from shmload.storage.budgeted_folder import BudgetedFolder, FolderStatistics
from shmload.storage.file_lease import Lease
from shmload.storage.fork_reset import reset_after_fork
from shmload.storage.ledger import PublishedFile
from shmload.storage.reservation import Reservation

__all__ = ["Cache", "LocalCacheStatistics"]

_SPARE = 128  # the part of the budget that is evicted together, so that a file of a full cache costs the same in any number
DIGEST_DIGITS = 16  # hexadecimal digits of a file's name that identify its key


def digest_of(key: str) -> str:
    """Return the first part of a file's name: 64 bits of the key's hash."""
    return hashlib.blake2b(os.fsencode(key), digest_size=DIGEST_DIGITS // 2).hexdigest()


Fetch = Callable[[int], None]
"""Writes all of an object into a file, given its descriptor. pwrite takes a third of the CPU of a mapping."""


@dataclass(frozen=True, slots=True)
class LocalCacheStatistics:
    """One process's use of a cache, and the state of the cache's folder.

    Attributes:
        num_hits: number of objects that were there, or that another process was fetching.
        num_fetched: number of objects that this process fetched.
        nbytes_fetched: bytes of the objects that this process fetched.
        folder: state of the folder, which all processes share.
    """

    num_hits: int
    num_fetched: int
    nbytes_fetched: int
    folder: FolderStatistics


class Cache:
    """Copies of remote objects within a budget of disk space. Any number of ranks and workers of a machine may use one folder.

    It can be pickled and used after a fork or spawn; each process announces its own needs. A killed process leaves no partial
    file that others can see: the next process that needs room removes what it was writing.

    Args:
        folder: path of a folder on a local disk; created if missing.
        capacity_bytes: maximum of the files' total length; all users of the folder must give the same.
        durable: whether to sync a file to the disk before it becomes visible, so that no power failure truncates it. Without it,
            bytes may be missing after a power failure, although the length is right.
        recreates: whether a folder that was removed since is created again at its next use. False raises FileNotFoundError.
    Attributes:
        path: path of the folder.
        capacity_bytes: the budget.
    Raises:
        ValueError: the budget is less than 1, or living processes use the folder with another one.
        StoreError: the folder's file system has no locks.
    Cost: 25 us for a lease of a file that is there.
    Thread/process safety: all methods may be called from any thread and process.
    Example:
        >>> import tempfile
        >>> cache = Cache(tempfile.mkdtemp(), 10_000)
        >>> def fetch(fd):
        ...     os.pwrite(fd, b"payload", 0)
        >>> with cache.open("s3://bucket/part-0.tar", 7, fetch, etag="v1") as lease:
        ...     os.pread(lease.fd, 100, 0)
        b'payload'
    """

    def __init__(
        self, folder: str | os.PathLike[str], capacity_bytes: int, *, durable: bool = True, recreates: bool = True
    ) -> None:
        spare = int(capacity_bytes) // _SPARE
        self._folder = BudgetedFolder(folder, capacity_bytes, durable=durable, recreates=recreates, spare_nbytes=spare)
        self._begin()

    def open(self, key: str, nbytes: int, fetch: Fetch, *, etag: str, timeout_s: float | None = 600.0) -> Lease:
        """Lease an object's file, and fetch it first if it is not there.

        Args:
            key: URL of the object or another name of it that includes the store, without credentials; the same for all users of it.
            nbytes: length of the object, which is checked.
            fetch: called with the descriptor of a file of that length if the object must be fetched; must write all of it. An
                exception from it is raised here, and the next process tries.
            etag: version of the object. Files of other versions of the key are not used, and are removed once unused.
            timeout_s: seconds to wait for room or for another process that fetches the object; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time, because everything is leased or needed sooner, or the object is larger than the
                budget.
            TimeoutError: another process was still fetching the object.
        """
        digest = digest_of(key)
        try:
            return self._open(key, digest, nbytes, fetch, etag, timeout_s)
        finally:
            with contextlib.suppress(ValueError):  # the key was not announced
                self._coming.remove(digest)  # only after it is leased, because the announcement keeps its file until then

    def expect(self, keys: Iterable[str]) -> None:
        """Announce the objects that this process will open, in order. This replaces an earlier announcement.

        `open` removes a key from the announcement, in any order. This process first evicts files that it has not announced, least
        recently used first, then those that it needs last. Files that it needs before the one that asks for room stay.

        Args:
            keys: keys as they will be given to `open`; repeat a key that will be opened twice.
        """
        self._coming = [digest_of(key) for key in keys]

    def statistics(self) -> LocalCacheStatistics:
        """Return the counts of this process and the current state of the folder."""
        return LocalCacheStatistics(self._num_hits, self._num_fetched, self._nbytes_fetched, self._folder.statistics())

    def close(self) -> None:
        """End this process's leases and its announcement. The cache opens again at its next use."""
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
                with self._counting:
                    self._num_hits += 1
                return found
            path, length = found.path, status.st_size
            found.release()
            if not self._folder.discard(name):
                raise StoreError(
                    f"{path} has {length} bytes, but {key} has {nbytes}, and other processes are reading the file: it was changed, "
                    f"or the length belongs to another version than the etag {etag!r}"
                )

    def _order(self, digest: str, candidates: Iterable[PublishedFile]) -> Iterator[PublishedFile]:
        """Yield the files that may be evicted for the one with this digest, in order. Requires the folder's lock."""
        needed = {each: number for number, each in reversed(list(enumerate(self._coming)))}  # the first use of each
        files = list(candidates)
        newest = {kept.name[:DIGEST_DIGITS]: kept.name for kept in files}  # the last of several versions of an object
        expected: list[tuple[int, PublishedFile]] = []
        others: list[tuple[int, PublishedFile]] = []
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
        with self._counting:
            self._num_fetched += 1
            self._nbytes_fetched += nbytes
        for other in self._folder.names_like(name):  # of other versions
            if other != name:
                self._folder.discard(other)
        return lease

    def _begin(self) -> None:
        self.path, self.capacity_bytes = self._folder.path, self._folder.capacity_bytes
        self._coming = []  # digests of the keys that this process will open
        self._num_hits = self._num_fetched = self._nbytes_fetched = 0
        self._counting = Lock()  # held while one of them is increased
        reset_after_fork(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<Cache {self.path} of {self.capacity_bytes} bytes>"


def _name(key: str, digest: str, etag: str) -> str:
    """Return the name of an object's file: its key, its version, and the end of the key as a hint for people and readers."""
    version = hashlib.blake2b(f"{key}\0{etag}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    hint = "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in key.rsplit("/", 1)[-1])
    return f"{digest}-{version}-{hint[-100:]}"
