"""The shards of a dataset as this machine has them: in a folder with a budget, fetched before they are needed.

    reader      says which shards come next, takes those it needs, waits for what is under way
    prefetcher  a thread: fetches what comes next and nobody has begun to fetch

All processes that share the folder share its files: one of them fetches a shard, the others map it. What a process has announced it
holds by leases, so nobody evicts it; what it has passed it lets go. If the folder is full of what others hold, samples are read
one by one from the store: slower, never wrong, and never a wait for each other.

A folder for shards that no one has named: made for one dataset and its workers, gone when they are.

Its owner holds a lock on a file in it, which forked workers hold with it. When the last of them is dead, however it died, the lock
is free: the next owner that makes such a folder removes what it finds unlocked.

A thread that does what comes next before anyone waits for it.

It holds its owner by a weak reference only, and ends with it: a dataset that nobody has any more is gone, its folder too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.mapped_file import MappedFile
from shmload.errors import CacheFull, StoreError
from shmload.processes.file_lock import FileLock, locked
from shmload.remote.fetch import fetch_index, fetch_of, fetch_range, name_of
from shmload.remote.manifest import Shards
from shmload.storage.cache import Cache
from shmload.storage.file_lease import Lease
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.outage import Outage
from shmload.storage.room_wait import repeated
from shmload.storage.web_reader import WebReader

__all__ = ["Fetched", "LocalShards", "Prefetcher", "PrivateFolder"]

_PREFIX = "shmload-shards-"
_LOCK = ".owner"


class PrivateFolder:
    """A folder that ends with its owner.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        remove_abandoned(place)
        self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=place)
        # locked under another name first, because a folder whose lock is free is taken for a dead owner's
        lock = FileLock.open(f"{self.path}/{_LOCK}.new", os.O_CREAT, 0o600)
        lock.acquire()
        os.rename(f"{self.path}/{_LOCK}.new", f"{self.path}/{_LOCK}")
        self.owner: PrivateFolder | None = None  # that this one keeps
        self._finish: Any = weakref.finalize(self, _end, self.path, lock, os.getpid())

    @property
    def is_gone(self) -> bool:
        """Whether its owner, in whatever process, has ended it; one without a lock was made anew by someone who was at it then."""
        return not os.path.exists(f"{self.path}/{_LOCK}")

    def close(self) -> None:
        """Removes it, if this object has made it; and whosever it was, if it was ended and has been made anew."""
        if self._finish is not None:
            self._finish()
        if self.is_gone:
            shutil.rmtree(self.path, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._finish = self.owner = None
        self.path = state["path"]  # another process's: its end is not this one's affair


def remove_abandoned(place: Path) -> list[str]:
    """Removes this user's folders whose owners are dead; says which."""
    removed = []
    for folder in place.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it is being made, or its owner lives
            if (status := os.lstat(folder)).st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue  # anyone may make such a name there
            with contextlib.closing(FileLock.open(folder / _LOCK)) as lock:
                if lock.try_acquire():
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(str(folder))
    return removed


def _end(path: str, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy ends nothing
        with contextlib.suppress(OSError):
            os.rename(path, f"{path}.gone")  # a worker that is about to end finds no folder to put more into
        shutil.rmtree(f"{path}.gone", ignore_errors=True)
        lock.close()


Fetched = Literal["done", "again", "over"]


class Prefetcher:
    """Fetches shards in the order they were last wished for.

    Args:
        fetch: a method, (shard) -> "done": go on with the next; "again": call once more; "over": forget the rest.
    """

    def __init__(self, fetch: Callable[[int], Fetched]) -> None:
        self._wishes: SimpleQueue[list[int] | None] = SimpleQueue()
        arguments = (self._wishes, weakref.WeakMethod(fetch))
        self._thread = threading.Thread(target=_run, args=arguments, name="shmload-fetch", daemon=True)
        weakref.finalize(self, self._wishes.put, None)
        self._thread.start()

    def wish(self, shards: list[int]) -> None:
        """Forgets what it was wished before, unless that is under way, and fetches these."""
        self._wishes.put(shards)


def _run(wishes: SimpleQueue[list[int] | None], method: Any) -> None:
    while (shards := wishes.get()) is not None:
        for shard in shards:
            answer: Fetched = "again"
            while answer == "again" and wishes.empty():
                answer = _fetch(method, shard)
            if answer != "done":
                break


def _fetch(method: Any, shard: int) -> Fetched:
    """Calls the method, if its object is still there; nothing here holds that any longer than the call takes."""
    fetch = method()
    return "over" if fetch is None else fetch(shard)


log = logging.getLogger("shmload")

_process = os.getpid()  # asking each time takes 0.2 us, five times a sample


def _in_child() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_in_child)

_ROOM_S = 0.5  # of a prefetcher for room, before it looks whether the shard is still wanted
_AT_ONCE = 8  # indexes, ranges or small shards under way
_SMALL = 1 << 20  # bytes of a shard that is fetched beside others


class LocalShards:
    """Copies of shards within a budget. Picklable; each process has leases and a prefetcher of its own.

    Args:
        shards: of the dataset.
        folder: where copies are kept; None: in one of its own, which ends with it.
        capacity_bytes: what they may take together, whatever datasets and processes share the folder.
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
        self.cache = Cache(f"{place}/shards", capacity_bytes, durable=self._private is None)
        for store in self._stores():
            alike = f"{store.url}\0{store.retry_policy}"  # another dataset of the folder may be more patient
            store.outage = Outage(f"{self._indexes_folder}/{sha256(alike.encode()).hexdigest()[:40]}.outage")

    def _stores(self) -> list[Any]:
        """The stores whose objects fail together when they do not answer; a folder of this machine always does."""
        found = {id(store): store for store in (self.shards.home, *self.shards.values("store"))}
        return [store for store in found.values() if isinstance(store, WebReader | FilesystemStore)]

    def try_anew(self) -> None:
        """Forget that a store did not answer, because another pass begins."""
        for store in self._stores():
            if store.outage is not None:
                store.outage.try_anew()

    def _begin(self) -> None:
        self._pid = _process
        self._lock = threading.Lock()
        self._copies: dict[int, tuple[NDArray[np.uint8], Lease]] = {}  # shards that are here as long as they stand there
        self._indexes: dict[int, Any] = {}
        self._making: dict[int, threading.Lock] = {}  # of indexes
        self._wanted: list[int] = []  # in the order they are needed
        self._places: dict[int, int] = {}  # of each in it: a dataset of plain files may have a million
        self._prefetcher: Prefetcher | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.num_dropped = 0  # copies let go so far: whoever holds some looks whether it is another now

    def _here(self) -> None:
        """Begins anew in a forked child, as leases, locks and threads stay with the parent."""
        if self._pid != _process:
            self._begin()

    # ------------------------------------------------------------ indexes

    def counts(self) -> NDArray[np.int64]:
        """Samples of each shard."""
        if self._counts is None:
            said = self.shards.values("num_samples")
            missing = [number for number, count in enumerate(said) if count is None]
            if missing:
                self._index_all(missing)
            self._counts = np.array([self._indexes[n].num_samples if c is None else c for n, c in enumerate(said)])
        return self._counts

    def index(self, number: int) -> Any:
        """Where a shard's samples lie, as its layout has it."""
        self._here()
        found = self._indexes.get(number)
        if found is None:
            with self._making.setdefault(number, threading.Lock()):  # a reader and what reads ahead: one of them makes it
                found = self._indexes.get(number)
                if found is None:
                    found = self._indexes[number] = self._indexed(number)
            self._making.pop(number, None)
        return found

    def _indexed(self, number: int) -> Any:
        shard = self.shards.all[number]
        is_known = shard.has_index or os.path.exists(f"{self._indexes_folder}/{name_of(shard)}.index")
        is_needed = self.keeps_all or bool(shard.packing)  # all of the shard, whether it is indexed or not
        copy = self.copy(number) if shard.index is None and is_needed and not is_known else None
        return fetch_index(self.shards, shard, self._indexes_folder, copy)

    def _index_all(self, numbers: list[int]) -> None:
        """Indexes shards: one process of those that share the folder, while the others wait for what it leaves there."""
        with contextlib.ExitStack() as stack:
            if os.path.isdir(self._indexes_folder):  # closed: indexed by each for itself
                stack.enter_context(locked(f"{self._indexes_folder}/.lock"))
            list(stack.enter_context(ThreadPoolExecutor(min(len(numbers), _AT_ONCE), "shmload-index")).map(self.index, numbers))

    def extend(self, shards: Shards) -> None:
        """Takes in what was appended to the dataset.

        Args:
            shards: all of them, those that are known first.
        Raises:
            ShardCorrupt: they are others.
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
        """A shard's bytes, fetched if they are not here; None: there is no room for it, or it is not worth it."""
        self._here()
        held = self._copies.get(number)
        if held is not None:
            return held[0]
        if not self.keeps_all and number not in self._wanted:
            if not self.shards.all[number].packing:
                return None
            self._let_go(self._copies.keys() - set(self._wanted))  # it is expanded whole, in place of another of its kind
        try:  # whoever fetches it is alive, or it would be ours; room is not waited for: who has it may wait for this reader
            return repeated(lambda: self._obtain(number, 0), None, (TimeoutError,))
        except CacheFull:
            return None
        except (FileNotFoundError, StoreError):
            if self._private is None or not self._private.is_gone:
                raise
            return None  # its owner, another process, has ended it

    def copies(self, numbers: Sequence[int]) -> None:
        """Fetches the shards that `copy` would, several at once: small ones each cost a store's answer and little else."""
        self._here()
        missing = [number for number in dict.fromkeys(numbers) if number not in self._copies]
        if len(missing) > 1 and self._is_small(missing):
            list(self._threads().map(self.copy, missing))

    def _is_small(self, numbers: Sequence[int]) -> bool:
        return all(self.shards.sizes[number] <= _SMALL for number in numbers)

    def range(self, number: int, offset: int, nbytes: int) -> Buffer:
        """Some of a shard's bytes, from its copy if that is here, else from the store."""
        copy = self.copy(number)
        if copy is not None:
            return copy[offset : offset + nbytes].data
        return fetch_range(self.shards, self.shards.all[number], offset, nbytes)

    def ranges(self, wanted: Sequence[tuple[int, int, int]]) -> list[Buffer]:
        """As `range`, of (shard, offset, nbytes), with several under way at once."""
        self._here()
        return list(self._threads().map(lambda one: self.range(*one), wanted))

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_AT_ONCE, "shmload-range")
            return self._pool

    def announce_all(self) -> None:
        """Says that any shard may be needed next: where there is room for all, all are fetched."""
        self._here()
        if self.keeps_all and self._prefetcher is None:
            first = self._pid % len(self.shards.all)  # each process begins elsewhere
            everything = range(len(self.shards.all))
            self.announce([*everything[first:], *everything[:first]], len(everything))

    def announce(self, coming: Sequence[int], num_held: int) -> None:
        """Says which shards are needed, in their order, the same one perhaps several times.

        What was announced before and is not now is let go with `let_go_passed`.

        Args:
            coming: all that is known of the order: eviction goes by it.
            num_held: so many of the first are fetched and held, as far as there is room.
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
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self.fetch_ahead)
        self._prefetcher.wish(wanted)

    def let_go_passed(self) -> None:
        """Lets go of what was announced before and is not any more."""
        if not self.keeps_all:
            self._let_go(self._copies.keys() - set(self._wanted))

    def _let_go(self, numbers: set[int]) -> None:
        with self._lock:
            for number in numbers & self._copies.keys():
                del self._copies[number]
                self.num_dropped += 1

    def _obtain(self, number: int, timeout_s: float) -> NDArray[np.uint8]:
        """A shard's bytes; fetches them unless someone else does.

        Raises:
            TimeoutError: someone else still does.
            CacheFull: there is no room for it.
        """
        shard = self.shards.all[number]
        fetch, cache, private = fetch_of(self.shards, shard), self.cache, self._private
        if private is not None and private.is_gone:  # the cache would make it anew, and nobody would remove it
            raise FileNotFoundError(f"{private.path} has been removed")
        try:
            lease = cache.open(shard.url, shard.nbytes, fetch, etag=shard.version, timeout_s=timeout_s)
            with self._lock:
                data = np.frombuffer(memoryview(MappedFile(os.fsencode(lease.path))), np.uint8)
                return self._copies.setdefault(number, (data, lease))[0]
        finally:
            if private is not None and private.is_gone:  # closed meanwhile: what was made there since goes, too
                self._copies.pop(number, None)
                cache.close()
                private.close()

    def fetch_ahead(self, number: int) -> Fetched:
        """Fetches a shard that nobody fetches yet, and beside a small one those small ones that come next."""
        wanted, places = self._wanted, self._places
        at = places.get(number, len(wanted))
        beside = [each for each in wanted[at : at + _AT_ONCE] if each not in self._copies]
        if number not in beside or len(beside) < 2 or not self._is_small(beside):
            return self._fetch_ahead(number, _ROOM_S)
        pool = self._threads()
        begun: list[Future[Fetched]] = []
        with contextlib.suppress(RuntimeError):  # closed meanwhile: its threads take nothing any more
            begun.extend(pool.submit(self._fetch_ahead, each, 0) for each in beside)  # readers need these threads, too
        answers = {each.result() for each in begun}  # what was begun is waited for, as one alone is
        return "over" if len(begun) < len(beside) or "over" in answers else self._fetch_ahead(number, _ROOM_S)

    def _fetch_ahead(self, number: int, room_s: float) -> Fetched:
        if number in self._copies:
            return "done"
        is_second = False
        try:
            try:
                self._obtain(number, 0)
            except CacheFull:  # until what is in the way has been passed
                if not room_s:
                    raise
                is_second = True
                self._obtain(number, room_s)
            if self._prefetcher is None:  # closed meanwhile
                return "over"
            self.index(number)
        except (TimeoutError, CacheFull):
            return "again" if is_second else "done"  # someone else fetches it
        except Exception as error:  # the reader meets it, too, and raises it where it is heard
            log.debug("%s is not fetched ahead: %s", self.shards.all[number].url, error)
            return "over" if isinstance(error, StoreError) else "done"
        return "done"

    def another(self) -> LocalShards:
        """Another over the same folder, with leases and announcements of its own. It keeps a folder that nobody has named."""
        made: LocalShards = pickle.loads(pickle.dumps(self))
        if made._private is not None:
            made._private.owner = self._private
        return made

    def close(self) -> None:
        """Lets all go, and removes a folder of its own."""
        self._here()
        with self._lock:
            self._wanted, self._prefetcher = [], None
            self._copies.clear()
        if self._pool is not None:  # a fork would meet its threads
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
        if self._private is not None and not os.path.isdir(self._private.path):  # it is on another machine
            self._private = PrivateFolder()
            self._use(self._private.path, self.cache.capacity_bytes)
        self._begin()
