"""A cache of decoded blocks (row groups, chunks), limited in bytes. The least recently used blocks are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any


class BlockCache:
    """Decoded blocks by key, in one process.

    A block that is larger than the cache is decoded and used, but not kept. An evicted block lives as long as it is being read.

    Args:
        capacity_bytes: size limit of all blocks that are kept.
    Attributes:
        nbytes: size of the blocks that are kept.
        num_decoded: number of blocks decoded so far.
    Thread/process safety: `get` holds a lock, also while it decodes, because few of these libraries allow several threads. A block
        that it has returned is read without the lock.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = RLock()
        self.nbytes = 0
        self.num_decoded = 0

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int]]) -> Any:
        """Return a block, decoding it if it is not in the cache.

        Args:
            key: key of the block.
            decode: returns the block and its size in bytes.
        """
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found[0]
            block, nbytes = decode()
            self.num_decoded += 1
            if nbytes <= self.capacity_bytes:
                self._blocks[key] = block, nbytes
                self.nbytes += nbytes
                while self.nbytes > self.capacity_bytes:
                    self.nbytes -= self._blocks.popitem(last=False)[1][1]
            return block

    def held(self) -> dict[Hashable, Any]:
        """Return the blocks that are in the cache."""
        with self._lock:
            return {key: block for key, (block, _) in self._blocks.items()}
