"""A thread that does what comes next before anyone waits for it.

It holds its owner by a weak reference only, and ends with it: a dataset that nobody has any more is gone, its folder too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

__all__ = ["Fetched", "Prefetcher"]

Fetched = Literal["done", "again", "over"]


class Prefetcher:
    """Fetches shards in the order they were last wished for.

    Args:
        fetch: a method, (shard) -> "done": go on with the next; "again": call once more; "over": forget the rest.
    """

    def __init__(self, fetch: Callable[[int], Fetched]) -> None:
        self._wishes = _Wishes()
        arguments = (self._wishes, weakref.WeakMethod(fetch))
        self._thread = threading.Thread(target=_run, args=arguments, name="shmload-fetch", daemon=True)
        weakref.finalize(self, self._wishes.set, None)
        self._thread.start()

    def wish(self, shards: list[int]) -> None:
        """Forgets what it was wished before, unless that is under way, and fetches these."""
        self._wishes.set(shards)


class _Wishes:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._shards: list[int] | None = []

    def set(self, shards: list[int] | None) -> None:
        with self._changed:
            self._shards = shards
            self._number += 1
            self._changed.notify()

    def after(self, number: int) -> tuple[int, list[int] | None]:
        """The newest wishes, once they are other ones than those of this number; None: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number)
            return self._number, self._shards

    def are_still(self, number: int) -> bool:
        return self._number == number


def _run(wishes: _Wishes, method: Any) -> None:
    number = 0
    while True:
        number, shards = wishes.after(number)
        if shards is None:
            return
        for shard in shards:
            answer: Fetched = "again"
            while answer == "again" and wishes.are_still(number):
                answer = _fetch(method, shard)
            if answer != "done":
                break


def _fetch(method: Any, shard: int) -> Fetched:
    """Calls the method, if its object is still there; nothing here holds that any longer than the call takes."""
    fetch = method()
    return "over" if fetch is None else fetch(shard)
