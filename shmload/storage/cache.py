"""Copies of a store's objects on a local disk, within a budget, shared by all processes of a node.

A file's name is made of the object's key and its version (etag), so a changed object is another file, and what is found under a
name is what was asked for: nothing says otherwise anywhere, and nothing can be stale. A file is fetched by one process; the others
that want it wait, and one of them takes over at once when it fails or dies.

What the readers of a cache will need, in their order, and so what is best evicted.

    <folder>/.shmload/needs/<pid>-<word>    one file a reader: its keys' digests in the order of need, 0 where it has been read

Its reader holds a flock on it, so an announcement counts as long as the process lives. The best file to evict is the one whose next
use lies farthest in the future (Belady, 1966); nobody knows the future but a loader, whose schedule is a formula. A distance is a
number of files that a reader will open before; readers of one job go at one pace, so their distances compare.

Order: first what no reader has announced, least recently used first; then what is needed after the file that room is asked for, the
latest first. What is needed sooner stays, and the request waits. A request that nobody has announced is taken for urgent, but it
cannot displace what a reader needs within the horizon that it guards.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.crc32c import crc32c
from shmload.errors import StoreError
from shmload.storage.folder import BudgetedFolder, FolderStatistics, Lease, Reservation
from shmload.storage.ledger import FRESH, HIDDEN, SETTLES_AFTER_S, Kept, close_kept, is_locked, open_kept, settle

__all__ = ["Cache", "CacheStatistics", "FileFetch"]

_HEADER = struct.Struct("<8sQ")  # magic, how many keys from the next one on are guarded
_MAGIC = b"SHMLNEE1"
DIGEST_DIGITS = 16  # of a file's name: which key it is


def digest_of(key: str) -> str:
    """The first part of a file's name: 64 bits of the key."""
    return hashlib.blake2b(os.fsencode(key), digest_size=DIGEST_DIGITS // 2).hexdigest()


class Lookahead:
    """This reader's announcement, and what those of all readers say. Begins anew in a forked child."""

    def __init__(self, folder: BudgetedFolder) -> None:
        self._folder = folder
        self._home = f"{folder.path}/{HIDDEN}/needs"
        self._fd = -1
        self._pid = 0
        self._digests: list[int] = []
        self._next = 0  # the first key that has not been read

    def expect(self, keys: Sequence[str], ahead: int) -> None:
        """Announces, in place of what was announced before."""
        digests = [int(digest_of(key), 16) for key in keys]
        with self._folder.alone():
            if self._pid != os.getpid():
                self._begin()
            self._digests, self._next = digests, 0
            os.ftruncate(self._fd, _HEADER.size)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, ahead) + np.array(digests, "<u8").tobytes(), 0)
        self._folder.wake()

    def take(self, digest: str) -> None:
        """Crosses a key off, where it is needed first."""
        place = self._place(digest)
        if place is None:
            return
        self._digests[place] = 0
        os.pwrite(self._fd, bytes(8), _HEADER.size + 8 * place)
        while self._next < len(self._digests) and not self._digests[self._next]:
            self._next += 1
        self._folder.wake()

    def distance(self, digest: str) -> int | None:
        """How many others this reader needs before a key. None: it was not announced."""
        place = self._place(digest)
        return None if place is None else sum(map(bool, self._digests[self._next : place]))

    def _place(self, digest: str) -> int | None:
        if self._pid != os.getpid():
            return None
        try:
            return self._digests.index(int(digest, 16), self._next)
        except ValueError:
            return None

    def order(self, distance: int | None, candidates: Iterable[Kept]) -> Iterator[Kept]:
        """Which of the files may go for one that is needed at a distance, the first to go first. Under the folder's lock."""
        needed, guarded = self._needed()
        expected: list[tuple[int, Kept]] = []
        others: list[tuple[int, Kept]] = []
        files = list(candidates)
        newest = {_digest(kept): kept.name for kept in files}  # of several versions of an object the last
        for kept in files:
            digest = _digest(kept)
            if digest in needed and newest[digest] == kept.name:
                expected.append((needed[digest], kept))
            else:
                others.append((self._last_use(kept), kept))
        yield from (kept for _, kept in sorted(others))
        for theirs, kept in sorted(expected, reverse=True):
            if theirs > distance if distance is not None else _digest(kept) not in guarded:
                yield kept

    def close(self) -> None:
        """Takes the announcement back."""
        if self._pid == os.getpid():
            os.unlink(self._path)
            close_kept(self._fd)
        self._pid, self._digests, self._next = 0, [], 0

    def _begin(self) -> None:
        os.makedirs(self._home, exist_ok=True)
        self._path = f"{self._home}/{os.getpid()}-{secrets.token_hex(4)}"
        self._fd = open_kept(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._pid = os.getpid()

    def _needed(self) -> tuple[dict[int, int], set[int]]:
        """How far ahead each announced key is needed next, by whoever needs it first, and which are guarded."""
        needed: dict[int, int] = {}
        guarded: set[int] = set()
        for ahead, digests in self._announced():
            (left,) = np.nonzero(digests)
            if not len(left):
                continue
            coming = digests[left[0] :].tolist()
            guarded.update(coming[:ahead])
            distances = dict(zip(reversed(coming), range(len(coming) - 1, -1, -1), strict=True))  # the first use of each
            for digest, distance in distances.items():
                if digest and distance < needed.get(digest, distance + 1):
                    needed[digest] = distance
        return needed, guarded

    def _announced(self) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint64]]]]:
        try:
            names = os.listdir(self._home)
        except FileNotFoundError:  # nobody has announced anything yet
            return
        for name in names:
            path = f"{self._home}/{name}"
            try:
                if not is_locked(path):
                    os.unlink(path)
                    continue
                with open(path, "rb", buffering=0) as file:
                    data = file.readall()
            except FileNotFoundError:  # its reader has just taken it back
                continue
            if len(data) >= _HEADER.size:
                _, ahead = _HEADER.unpack_from(data)
                yield ahead, np.frombuffer(data, "<u8", (len(data) - _HEADER.size) // 8, _HEADER.size)

    def _last_use(self, kept: Kept) -> int:
        try:
            return os.stat(f"{self._folder.path}/{kept.name}").st_atime_ns
        except FileNotFoundError:
            return 0


def _digest(kept: Kept) -> int:
    """Of the key of a file; of a file that is none of the cache's, nobody's."""
    try:
        return int(kept.name[:DIGEST_DIGITS], 16)
    except ValueError:
        return 0


Fetch = Callable[[memoryview], int | None]
"""Writes an object's bytes into memory of its length; gives how many it wrote, None for all. Keeps no view of the memory."""


@dataclass(frozen=True, slots=True)
class FileFetch:
    """A fetch that is given the file's descriptor instead, and writes all of it by pwrite: a third of a mapping's cost.

    Args:
        write: called with the descriptor.
    """

    write: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
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

    Picklable; a forked or spawned process goes on with what it is given, and announces its own needs. What is killed leaves nothing
    half done that anybody sees, and nothing behind: the next process that needs room removes what it was writing.

    Args:
        folder: on a local disk; made if it is not there.
        capacity_bytes: what the files may add up to; all users of the folder give the same.
        durable: no file is ever seen that a power failure has cut: what it may have cut is fetched again. Without it a file's bytes
            may then be missing, though its length is right.
    Raises:
        ValueError: no budget, or living processes use the folder with another one.
        StoreError: the folder's file system has no locks.
    Cost: 25 us for a lease of a file that is there.
    Thread/process safety: all methods, from any thread and process.
    Example:
        >>> import tempfile
        >>> cache = Cache(tempfile.mkdtemp(), 10_000)
        >>> def fetch(out):
        ...     out[:] = b"payload"
        >>> with cache.open("s3://bucket/part-0.tar", 7, fetch, etag="v1") as lease:
        ...     os.pread(lease.fd, 100, 0)
        b'payload'
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int, *, durable: bool = True) -> None:
        self._folder = BudgetedFolder(folder, capacity_bytes, durable=durable)
        self._begin()

    @property
    def path(self) -> str:
        """The folder."""
        return self._folder.path

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        return self._folder.capacity_bytes

    def open(
        self,
        key: str,
        nbytes: int,
        fetch: Fetch | FileFetch,
        *,
        etag: str,
        checksum: str | None = None,
        timeout_s: float | None = 600.0,
    ) -> Lease:
        """A lease of an object's file, which is fetched first if it is not there.

        Args:
            key: where the object is, its store's address included and no credentials: the same for all who mean the same object.
            nbytes: its length, which is checked.
            fetch: called with writable memory of that length, if the object must be fetched. It writes all of it, gives how many
                bytes it wrote or None for all, and keeps no view of it. What it raises is raised here, and the next one tries.
            etag: its version. Files of other versions of the key are not taken, and removed where nobody reads them.
            checksum: of its bytes, checked after a fetch: "crc32c:" or "sha256:" and hexadecimal digits, or another of hashlib's.
            timeout_s: seconds to wait for room or for another process that fetches it; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time: all is leased or needed sooner, or the object is larger than the budget.
            TimeoutError: another process was still fetching it.
            StoreError: fetch brought other bytes than it should.
        """
        digest = digest_of(key)
        try:
            return self._open(key, digest, nbytes, fetch, etag, checksum, timeout_s)
        finally:
            self._lookahead.take(digest)  # not before it is leased: nobody else would keep its file meanwhile

    def prefetch(
        self,
        key: str,
        nbytes: int,
        fetch: Fetch | FileFetch,
        *,
        etag: str,
        checksum: str | None = None,
        timeout_s: float | None = 600.0,
    ) -> None:
        """Brings an object in, if it is not there, and leases nothing: its announced need is what keeps it (`expect`).

        Args:
            key: as for `open`, which crosses it off the announcement; this does not.
            nbytes: its length.
            fetch: as for `open`.
            etag: its version.
            checksum: of its bytes.
            timeout_s: seconds to wait for room or for another process that fetches it; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time: all is leased or needed sooner, or the object is larger than the budget.
            TimeoutError: another process was still fetching it.
            StoreError: fetch brought other bytes than it should.
        """
        self._open(key, digest_of(key), nbytes, fetch, etag, checksum, timeout_s).release()

    def expect(self, keys: Iterable[str], *, ahead: int = 8) -> None:
        """Announces what this process will open, in that order, in place of what it announced before.

        `open` crosses a key off, in whatever order. Eviction goes by the announcements of all living processes: first what nobody
        expects, least recently used first, then what is needed last; what is needed before the file that asks for room stays.

        Args:
            keys: as they will be given to `open`; one that will be opened twice stands there twice.
            ahead: so many of the next ones are not even evicted for a file that nobody announced.
        Raises:
            ValueError: `ahead` is negative.
        """
        if ahead < 0:
            raise ValueError(f"ahead is a number of keys, 0 or more; got {ahead}")
        self._lookahead.expect(list(keys), ahead)

    def statistics(self) -> CacheStatistics:
        """Counts of this process, and the folder now."""
        return CacheStatistics(self._num_hits, self._num_fetched, self._nbytes_fetched, self._folder.statistics())

    def close(self) -> None:
        """Ends this process's leases and its announcement. The next use begins anew."""
        self._lookahead.close()
        self._folder.close()

    def _open(
        self, key: str, digest: str, nbytes: int, fetch: Fetch | FileFetch, etag: str, checksum: str | None, timeout_s: float | None
    ) -> Lease:
        name = _name(key, digest, etag)
        order = functools.partial(self._lookahead.order, self._lookahead.distance(digest))
        while True:
            found = self._folder.obtain(name, nbytes, timeout_s=timeout_s, order=order)
            if isinstance(found, Reservation):
                return self._fetched(found, name, key, nbytes, fetch, checksum)
            status = os.stat(found.path)
            if status.st_size == nbytes:
                now_ns, published_ns = time.time_ns(), found.files[0].published_ns
                os.utime(found.path, ns=(now_ns, published_ns))  # the time of its last use
                if status.st_mode & FRESH and now_ns - published_ns > SETTLES_AFTER_S * 1e9:
                    settle(found.path)  # its publisher has ended before
                self._num_hits += 1
                return found
            path, length = found.path, status.st_size
            found.release()
            if not self._folder.discard(name):
                raise StoreError(
                    f"{path} has {length} bytes where {key} has {nbytes}, and others are reading it: somebody has changed the "
                    f"file, or the length belongs to another version than the etag {etag!r}"
                )

    def _fetched(
        self, reservation: Reservation, name: str, key: str, nbytes: int, fetch: Fetch | FileFetch, checksum: str | None
    ) -> Lease:
        with reservation:
            if isinstance(fetch, FileFetch):
                fetch.write(reservation.fd)
                faults.hit("after_fetch")
                if checksum is not None:
                    with reservation.map() as memory:
                        _check(memory, key, checksum)
            elif nbytes:
                memory = reservation.map()
                view = memoryview(memory)
                written = fetch(view)
                faults.hit("after_fetch")
                if written is not None and written != nbytes:
                    raise StoreError(f"{written} bytes of {key} came where it has {nbytes}: it was cut off, or has changed")
                if checksum is not None:
                    _check(memory, key, checksum)
                try:
                    view.release()
                    memory.close()
                except BufferError:
                    raise StoreError(
                        f"fetch of {key} has kept a view of the memory it was given, through which the file could still change: "
                        f"let go of all of them before it returns"
                    ) from None
            lease = reservation.publish_leased(name)
        self._num_fetched += 1
        self._nbytes_fetched += nbytes
        for kept in self._folder.files():
            if kept.name != name and kept.name.startswith(name[: len(digest_of(""))] + "-"):
                self._folder.discard(kept.name)
        return lease

    def _begin(self) -> None:
        self._lookahead = Lookahead(self._folder)
        self._num_hits = self._num_fetched = self._nbytes_fetched = 0

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


def _check(memory: mmap.mmap, key: str, checksum: str) -> None:
    method, _, expected = checksum.partition(":")
    if method == "crc32c":
        found = f"{crc32c(memory):08x}"
    elif method in hashlib.algorithms_available and expected:
        found = hashlib.new(method, memory).hexdigest()
    else:
        raise ValueError(f"a checksum is a method's name, ':' and hexadecimal digits, as in 'crc32c:1a2b3c4d'; got {checksum!r}")
    if found != expected.lower():
        raise StoreError(f"the bytes of {key} have the {method} {found}, not {expected}: they are damaged, or another version's")
