"""A cache of decoded blocks (row groups, chunks), least recently used first out, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any


class BlockCache:
    """Blocks by key, of one process.

    What is too large for the cache is decoded and used, and not kept. A block that was put out lives on as long as someone reads
    it.

    Args:
        capacity_bytes: of all blocks that are kept.
    Thread/process safety: one thread decodes at a time, since few of these libraries let several; reading takes no lock.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = RLock()
        self.nbytes = 0
        self.num_decoded = 0

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int]]) -> Any:
        """A block.

        Args:
            decode: makes it: (block, bytes it takes).
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
        """The blocks that are kept."""
        with self._lock:
            return {key: block for key, (block, _) in self._blocks.items()}
