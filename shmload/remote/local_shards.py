"""`LocalShards`: copies of a dataset's shards in a folder with a size limit, fetched before they are needed.

The reader announces which shards come next, takes the ones that it needs, and waits for those that are being fetched. The
`Prefetcher`, a thread of the same process, fetches announced shards that no process has begun to fetch.

All processes that share the folder share its files: one of them fetches a shard, the others map it. A process holds leases on the
shards that it has announced, so that they are not evicted, and releases those that it has passed. If other processes have leased
the whole folder, samples are read one by one from the store. That is slower, but always correct, and processes never wait for each
other to free space.

If the user gives no folder, shards are kept in a `PrivateFolder`, which is removed with the dataset and its workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.mapped_file import MappedFile
from shmload.errors import CacheFull, StoreError
from shmload.processes.file_lock import locked
from shmload.remote.fetch import fetch_index, fetch_of, fetch_range, name_of
from shmload.remote.prefetcher import Fetched, Prefetcher
from shmload.remote.private_folder import PrivateFolder
from shmload.remote.shards import Shards
from shmload.storage.cache import Cache
from shmload.storage.file_lease import Lease
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.outage import Outage
from shmload.storage.room_wait import wait_for_room
from shmload.storage.web_reader import WebReader

__all__ = ["LocalShards"]

log = logging.getLogger("shmload")

_process = os.getpid()  # os.getpid() takes 0.2 us, and would be called five times per sample


def _in_child() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_in_child)

_ROOM_S = 0.5  # a prefetcher waits this long for space before it checks again whether the shard is still wanted
_AT_ONCE = 8  # indexes, ranges or small shards that are fetched in parallel
_SMALL = 1 << 20  # largest size in bytes of a shard that is fetched in parallel with others


class LocalShards:
    """Copies of shards with a size limit. Picklable; each process has its own leases and prefetcher.

    Args:
        shards: the shards of the dataset.
        folder: folder for the copies. If None, a private folder, which is removed with this object.
        capacity_bytes: size limit of all copies in the folder, including those of other datasets and processes.
    Attributes:
        shards: the shards, to which `extend` adds.
        cache: the folder of the copies.
        keeps_all: whether the folder has room for all shards; false once its disk is found to have less, until `extend` is called.
        num_dropped: increases when copies are released or shards are added; a user of copies then asks for them again.
    """

    def __init__(self, shards: Shards, folder: str | os.PathLike[str] | None, capacity_bytes: int) -> None:
        self.shards = shards
        self._private = PrivateFolder() if folder is None else None
        place = self._private.path if self._private is not None else os.path.abspath(os.fspath(folder or ""))
        self._use(place, capacity_bytes)
        self.keeps_all = shards.nbytes <= capacity_bytes
        self._counts: NDArray[np.int64] | None = None
        self._begin()

    def _use(self, place: str, capacity_bytes: int) -> None:
        self._indexes_folder = f"{place}/indexes"
        os.makedirs(self._indexes_folder, exist_ok=True)
        self.cache = Cache(f"{place}/shards", capacity_bytes, durable=self._private is None, recreates=self._private is None)
        for store in self._stores():
            alike = f"{store.url}\0{store.retry_policy}"  # another dataset in the folder may have a more patient retry policy
            store.outage = Outage(f"{self._indexes_folder}/{sha256(alike.encode()).hexdigest()[:40]}.outage")

    def _stores(self) -> list[Any]:
        """Return the stores whose objects all fail if the store is down; local folders are never down."""
        found = {id(store): store for store in (self.shards.home, *self.shards.values("store"))}
        return [store for store in found.values() if isinstance(store, WebReader | FilesystemStore)]

    def try_again(self) -> None:
        """Try stores that did not answer once more, because a new pass begins."""
        for store in self._stores():
            if store.outage is not None:
                store.outage.try_again()

    def _begin(self) -> None:
        self._pid = _process
        self._lock = threading.Lock()
        self._copies: dict[int, tuple[NDArray[np.uint8], Lease]] = {}  # the shards that have copies here
        self._indexes: dict[int, Any] = {}
        self._making: dict[int, threading.Lock] = {}  # one lock per index that is being built
        self._wanted: list[int] = []  # in the order in which they are needed
        self._places: dict[int, int] = {}  # position of each in `_wanted`, which may have a million entries
        self._prefetcher: Prefetcher | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._full_until = 0.0  # time before which no further copy is tried, because there is no room
        # a forked child continues its parent's count, because the users of copies were forked, too
        self.num_dropped = getattr(self, "num_dropped", 0) + 1

    def _here(self) -> None:
        """Reset the state if this is a forked child, because leases, locks and threads belong to the parent."""
        if self._pid != _process:
            self._begin()

    def process(self) -> int:
        """Return the id of the process to which copies and announcements belong: this one."""
        self._here()
        return self._pid

    # ------------------------------------------------------------ indexes

    def counts(self) -> NDArray[np.int64]:
        """Return the number of samples of each shard."""
        if self._counts is None:
            said = self.shards.values("num_samples")
            missing = [number for number, count in enumerate(said) if count is None]
            if missing:
                self._index_all(missing)
            self._counts = np.array([self._indexes[n].num_samples if c is None else c for n, c in enumerate(said)])
        return self._counts

    def index(self, number: int) -> Any:
        """Return the index of a shard, whose type depends on the format."""
        self._here()
        found = self._indexes.get(number)
        if found is None:
            with self._making.setdefault(number, threading.Lock()):  # the reader and the prefetcher may need it at the same time
                found = self._indexes.get(number)
                if found is None:
                    found = self._indexes[number] = self._indexed(number)
            self._making.pop(number, None)
        return found

    def _indexed(self, number: int) -> Any:
        shard = self.shards.all[number]
        is_known = shard.has_index or os.path.exists(f"{self._indexes_folder}/{name_of(shard)}.index")
        is_needed = self.keeps_all or bool(shard.compression)  # the whole shard will be fetched in any case
        copy = self.copy(number) if shard.index is None and is_needed and not is_known else None
        return fetch_index(self.shards, shard, self._indexes_folder, copy)

    def _index_all(self, numbers: list[int]) -> None:
        """Get the indexes of shards. One of the processes that share the folder builds them; the others wait and load its files."""
        with contextlib.ExitStack() as stack:
            if os.path.isdir(self._indexes_folder):  # after close, each process indexes for itself
                stack.enter_context(locked(f"{self._indexes_folder}/.lock"))
            list(stack.enter_context(ThreadPoolExecutor(min(len(numbers), _AT_ONCE), "shmload-index")).map(self.index, numbers))

    def extend(self, shards: Shards) -> None:
        """Add the shards that were appended to the dataset. Known shards keep their numbers and copies.

        Args:
            shards: all shards, beginning with the known ones.
        Raises:
            ShardCorrupt: it does not begin with the known shards.
        """
        known = self.shards.all
        if [(each.key, each.crc32c) for each in shards.all[: len(known)]] != [(each.key, each.crc32c) for each in known]:
            raise self.shards.gone(known[0], StoreError("it does not begin with the shards that it had"))
        if len(shards.all) == len(known):
            return
        self._here()
        self.shards = replace(shards, all=(*known, *shards.all[len(known) :]))
        self.keeps_all = self.shards.nbytes <= self.cache.capacity_bytes
        self._counts = None
        with self._lock:
            self.num_dropped += 1

    # ------------------------------------------------------------ copies

    def copy(self, number: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a shard's copy, a map, after fetching it if necessary.

        Return None if there is no room, or if a copy is not worthwhile: the shard is neither announced nor compressed, and the
        folder cannot hold all shards.
        """
        self._here()
        held = self._copies.get(number)
        if held is not None:
            return held[0]
        if not self.keeps_all and number not in self._places:
            if not self.shards.all[number].compression:
                return None
            self._let_go(self._copies.keys() - set(self._wanted))  # it must be decompressed whole, and replaces another one
        if monotonic() < self._full_until and not self.shards.all[number].compression:
            return None
        try:
            try:
                return self._wait_for(number)
            except CacheFull:  # the prefetcher may have taken the room for shards that are needed later
                self._let_go(self._less_urgent(number))
                return self._wait_for(number)
        except CacheFull:
            self.keeps_all, self._full_until = False, monotonic() + _ROOM_S
            return None
        except (FileNotFoundError, StoreError, ValueError):
            if self._private is None or not self._private.is_gone:
                raise
            return None  # its owner, another process, has removed it, and another thread may have closed the cache since

    def _wait_for(self, number: int) -> NDArray[np.uint8]:
        """Wait for a process that is fetching a shard, but never for space, because its holder may wait for this reader."""
        return wait_for_room(lambda: self._obtain(number, 0), None, (TimeoutError,))

    def _less_urgent(self, number: int) -> set[int]:
        """Return the shards with copies that an announced shard may displace: those that were passed, or are needed later."""
        place = self._places.get(number)
        return set() if place is None else {each for each in list(self._copies) if not 0 <= self._places.get(each, -1) < place}

    def copies(self, numbers: Sequence[int]) -> None:
        """Fetch the shards that `copy` would fetch, small ones in parallel, because most of their cost is latency."""
        self._here()
        missing = [number for number in dict.fromkeys(numbers) if number not in self._copies]
        if len(missing) > 1 and self._is_small(missing):
            list(self._threads().map(self.copy, missing))

    def _is_small(self, numbers: Sequence[int]) -> bool:
        return all(self.shards.sizes[number] <= _SMALL for number in numbers)

    def range(self, number: int, offset: int, nbytes: int) -> Buffer:
        """Return `nbytes` bytes of a shard from `offset` on, from its copy if there is one (see `copy`), else from the store."""
        copy = self.copy(number)
        if copy is not None:
            return copy[offset : offset + nbytes].data
        return fetch_range(self.shards, self.shards.all[number], offset, nbytes)

    def ranges(self, wanted: Sequence[tuple[int, int, int]]) -> list[Buffer]:
        """Return the results of `range` for (shard, offset, nbytes), fetched in parallel."""
        self._here()
        return list(self._threads().map(lambda one: self.range(*one), wanted))

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_AT_ONCE, "shmload-range")
            return self._pool

    def announce_all(self) -> None:
        """Announce all shards, once, if there is room for all, because any of them may be needed next; else do nothing."""
        self._here()
        if self.keeps_all and self._prefetcher is None:
            first = self._pid % len(self.shards.all)  # each process begins with another shard
            everything = range(len(self.shards.all))
            self.announce([*everything[first:], *everything[:first]], len(everything))

    def announce(self, coming: Sequence[int], num_held: int) -> None:
        """Announce which shards will be needed, in order; a shard may occur several times.

        Shards that were announced before, and no longer are, are released by `let_go_passed`.

        Args:
            coming: the order as far as it is known; it determines the order of eviction.
            num_held: number of shards at the beginning to fetch and hold, as far as there is room.
        """
        self._here()
        if self._private is not None and self._private.is_gone:
            return
        shards = self.shards.all
        self.cache.expect([shards[number].url for number in coming])
        room, wanted = self.cache.capacity_bytes, []
        for number in dict.fromkeys(coming[:num_held]):
            room -= int(self.shards.sizes[number])
            if room < 0:
                break
            wanted.append(number)
        with self._lock:
            self._wanted, self._places = wanted, {each: place for place, each in enumerate(wanted)}
            prefetcher = self._prefetcher
            if prefetcher is None:
                prefetcher = self._prefetcher = Prefetcher(self.fetch_ahead)
        prefetcher.wish(wanted)

    def let_go_passed(self) -> None:
        """Release the shards that were announced before and no longer are."""
        if not self.keeps_all:
            self._let_go(self._copies.keys() - set(self._wanted))

    def _let_go(self, numbers: set[int]) -> None:
        with self._lock:
            for number in numbers & self._copies.keys():
                del self._copies[number]
                self.num_dropped += 1

    def _obtain(self, number: int, timeout_s: float) -> NDArray[np.uint8]:
        """Return a shard's bytes, and fetch them unless another process or thread does.

        Raises:
            TimeoutError: another process or thread is still fetching them.
            CacheFull: the shard does not fit.
        """
        shard = self.shards.all[number]
        fetch, cache, private = fetch_of(self.shards, shard), self.cache, self._private
        try:
            lease = cache.open(shard.url, shard.nbytes, fetch, etag=shard.version, timeout_s=timeout_s)
            with self._lock:
                data = np.frombuffer(memoryview(MappedFile(os.fsencode(lease.path))), np.uint8)
                return self._copies.setdefault(number, (data, lease))[0]
        finally:
            if private is not None and private.is_gone:  # closed in the meantime: release what was opened since
                self._copies.pop(number, None)
                cache.close()

    def fetch_ahead(self, number: int) -> Fetched:
        """Fetch a shard unless it is being fetched; if it is small, fetch small ones that come next in parallel.

        The prefetcher calls this in its thread; the result is as for `Prefetcher`.
        """
        wanted, places = self._wanted, self._places
        at = places.get(number, len(wanted))
        beside = [each for each in wanted[at : at + _AT_ONCE] if each not in self._copies]
        if number not in beside or len(beside) < 2 or not self._is_small(beside):
            return self._fetch_ahead(number, _ROOM_S)
        pool = self._threads()
        begun: list[Future[Fetched]] = []
        with contextlib.suppress(RuntimeError):  # closed in the meantime: its threads accept no more work
            # not waiting, because readers need these threads
            begun.extend(pool.submit(self._fetch_ahead, each, 0) for each in beside)
        answers = {each.result() for each in begun}  # wait for all of them, as for a single one
        return "over" if len(begun) < len(beside) or "over" in answers else self._fetch_ahead(number, _ROOM_S)

    def _fetch_ahead(self, number: int, room_s: float) -> Fetched:
        if number in self._copies:
            return "done"
        is_second = False
        try:
            try:
                self._obtain(number, 0)
            except CacheFull:  # wait until a shard that takes the space has been passed
                self.keeps_all = False
                if not room_s:
                    raise
                is_second = True
                self._obtain(number, room_s)
            if self._prefetcher is None:  # closed in the meantime
                return "over"
            self.index(number)
        except (TimeoutError, CacheFull):
            return "again" if is_second else "done"  # another process is fetching it
        except Exception as error:  # the reader will meet the same error and raise it to the user
            log.debug("%s is not fetched ahead: %s", self.shards.all[number].url, error)
            return "over" if isinstance(error, StoreError) else "done"
        return "done"

    def another(self) -> LocalShards:
        """Return another object for the same folder, with its own leases and announcements. It keeps a private folder alive."""
        made: LocalShards = pickle.loads(pickle.dumps(self))
        if made._private is not None:
            made._private.owner = self._private
        return made

    def close(self) -> None:
        """Release all copies, and remove a private folder."""
        self._here()
        with self._lock:
            self._wanted, self._prefetcher = [], None
            self._copies.clear()
        if self._pool is not None:  # a fork would copy the state of its threads
            self._pool.shutdown(wait=False)
            self._pool = None
        self.cache.close()
        if self._private is not None:
            self._private.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("shards", "cache", "keeps_all", "_private", "_indexes_folder", "_counts")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._private is not None and not os.path.isdir(self._private.path):  # unpickled on another machine
            self._private = PrivateFolder()
            self._use(self._private.path, self.cache.capacity_bytes)
        self._begin()
