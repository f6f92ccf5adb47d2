"""What the readers of a cache will need, in their order, and so what is best evicted.

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
import hashlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shmload.storage.descriptors import close_kept, is_locked, open_kept
from shmload.storage.folder import BudgetedFolder
from shmload.storage.ledger import HIDDEN, Kept

_HEADER = struct.Struct("<8sQ")  # magic, how many keys from the next one on are guarded
_MAGIC = b"SHMLNEE1"
DIGEST_DIGITS = 16  # of a file's name: which key it is


def digest_of(key: str) -> str:
    """The first part of a file's name: 64 bits of the key."""
    return hashlib.blake2b(os.fsencode(key), digest_size=DIGEST_DIGITS // 2).hexdigest()


class Needs:
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
            distances = dict(
                zip(reversed(coming), range(len(coming) - 1, -1, -1), strict=True)
            )  # the first use of each
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
