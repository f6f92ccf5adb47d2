"""`Prefetcher`: a thread that fetches shards before they are needed.

It has only a weak reference to its owner and ends with it, so an unused dataset is released.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal

__all__ = ["Fetched", "Prefetcher"]

Fetched = Literal["done", "again", "over"]


class Prefetcher:
    """Fetches shards in a thread, in the order of the last `wish`.

    Args:
        fetch: a method that fetches a shard and returns "done" to continue with the next one, "again" to be called once more, or
            "over" to drop the rest.
    """

    def __init__(self, fetch: Callable[[int], Fetched]) -> None:
        self._wishes: SimpleQueue[list[int] | None] = SimpleQueue()
        arguments = (self._wishes, weakref.WeakMethod(fetch))
        self._thread = threading.Thread(target=_run, args=arguments, name="shmload-fetch", daemon=True)
        weakref.finalize(self, self._wishes.put, None)
        self._thread.start()

    def wish(self, shards: list[int]) -> None:
        """Replace the requested shards, except for the one being fetched."""
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
    """Call the method if its object still exists. No reference to the object is kept after the call."""
    fetch = method()
    return "over" if fetch is None else fetch(shard)
