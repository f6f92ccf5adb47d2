"""ShardSender: upload finished shards in a few threads while the next ones are packed.

No more shards than threads are on their way, so a spool with room for a few shards is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from shmload import faults
from shmload.remote.packing.generation import Generation
from shmload.remote.packing.shard_file import ShardFile
from shmload.remote.packing.shard_record import ShardRecord
from shmload.storage.store import Store

NUM_THREADS = 2


class ShardSender:
    """Uploads shards in threads: each shard, then its index, then the note that both are complete.

    Args:
        store: the dataset's folder.
        generation: the generation that the shards belong to.
        sent: called in the thread of `wait` with each record, when its shard is complete.
        level: zstd level for compressing shards; None does not compress.
    """

    def __init__(self, store: Store, generation: Generation, sent: Callable[[ShardRecord], None], level: int | None = None) -> None:
        self._store, self._generation, self._sent, self._level = store, generation, sent, level
        self._pool = ThreadPoolExecutor(NUM_THREADS, "shmload-send")
        self._under_way: set[Future[ShardRecord]] = set()

    def send(self, shard: ShardFile) -> None:
        """Send a shard that has all its samples."""
        record, index = shard.finish()
        self._generation.check()
        self._under_way.add(self._pool.submit(self._put, shard, record, index))

    def wait(self, num_left: int) -> None:
        """Wait until at most `num_left` shards are still being sent.

        Raises:
            Exception: sending a shard failed.
        """
        while len(self._under_way) > num_left:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for future in done:
                self._sent(future.result())

    def close(self) -> None:
        """Stop the threads after their current uploads."""
        self._pool.shutdown(cancel_futures=True)

    def _put(self, shard: ShardFile, record: ShardRecord, index: bytes) -> ShardRecord:
        try:
            if self._level is not None:
                record = replace(record, shard=replace(record.shard, packed=shard.compress(self._level)))
            faults.hit("sending")
            sent = self._store.put_file(record.shard.name, shard.path)
        finally:
            shard.close()
        faults.hit("shard_sent")
        index_sent = self._store.put(record.shard.index.name, index)
        record = replace(record, versions=(sent.etag, index_sent.etag))
        faults.hit("index_sent")
        self._generation.note(record)
        faults.hit("shard_noted")
        return record
