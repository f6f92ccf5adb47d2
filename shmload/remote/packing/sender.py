"""Sends finished shards while the next ones are packed, by a few threads; room for a few shards is all it takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from shmload import faults
from shmload.remote.packing.generation import Generation
from shmload.remote.packing.shard_file import Record, ShardFile
from shmload.storage.store import Store

NUM_THREADS = 2


class Sender:
    """Puts shards into a store: each, then its index, then the note that both are whole.

    Args:
        sent: called with each record, in this thread, when its shard is whole.
    """

    def __init__(self, store: Store, generation: Generation, sent: Callable[[Record], None]) -> None:
        self._store, self._generation, self._sent = store, generation, sent
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Record]] = set()

    def make_room(self) -> None:
        """Waits until no more shards are on their way than there are threads; the next is being written meanwhile.

        Raises:
            Exception: what went wrong with one that was sent.
        """
        self._settle(NUM_THREADS)

    def send(self, shard: ShardFile) -> None:
        """Takes a shard that has all its samples."""
        record, index = shard.finish()
        self._generation.check()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, "shmload-send")
        self._under_way.add(self._pool.submit(self._put, shard, record, index))

    def finish(self) -> None:
        """Waits until all are sent, and ends the threads: workers should not be forked beside any.

        Raises:
            Exception: as `make_room`.
        """
        self._settle(0)
        self.close()

    def close(self) -> None:
        """Ends the threads; what they are at comes to its end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _settle(self, num_left: int) -> None:
        while len(self._under_way) > num_left:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for future in done:
                self._sent(future.result())

    def _put(self, shard: ShardFile, record: Record, index: bytes) -> Record:
        try:
            faults.hit("sending")
            written = self._store.put_file(record.shard.name, shard.path)
        finally:
            shard.close()
        self._generation.wrote(written)
        faults.hit("shard_sent")
        self._generation.wrote(self._store.put(record.shard.index.name, index))
        faults.hit("index_sent")
        self._generation.note(record)
        faults.hit("shard_noted")
        return record
