"""AsyncMap: a coroutine function of each item, several of them waiting at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from shmload.pipeline.block_stages import Expanding
from shmload.pipeline.failed_items import FailedItem, failed, reading
from shmload.pipeline.stage_arguments import set_whole
from shmload.worker.stage_engine import called


@dataclass(frozen=True)
class AsyncMap(Expanding):
    """A coroutine function of each item, several of which wait at a time: for requests. Items keep their order.

    It runs where blocks are expanded, in an event loop that the thread keeps for it, so a client may be kept for the next item.

    Args:
        fn: item -> a coroutine that gives an item.
        in_flight: how many wait at a time, in each worker; those of one block.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    fn: Callable[[Any], Any]
    in_flight: int = 16

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"AsyncMap(fn) is a coroutine function of one item; got {self.fn!r}")
        set_whole(self, "AsyncMap(in_flight)", "in_flight", 1, 1 << 20)

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        given = [(item, reading.position) for item in items]
        yield from _run(self._all(given, name))

    async def _all(self, given: Sequence[tuple[Any, int]], name: str) -> list[Any]:
        room = asyncio.Semaphore(self.in_flight)

        async def one(item: Any, position: int) -> Any:
            if isinstance(item, FailedItem):
                return item
            async with room:
                try:
                    return await called(self.fn, item, name)
                except Exception as error:
                    return failed(error, name, position)
                except asyncio.CancelledError:  # of what the function waits for; no Exception, it would end the worker
                    return failed(RuntimeError(f"what the function of {name} waited for was cancelled"), name, position)

        return list(await asyncio.gather(*(one(item, position) for item, position in given)))


class _OwnLoop:
    """An event loop of this thread, in this process."""

    def __init__(self) -> None:
        self.loop, self.pid = asyncio.new_event_loop(), os.getpid()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and self.pid == os.getpid():  # a forked child's is its parent's
            self.loop.close()


class _Idle(threading.local):
    """The thread's loops that nothing runs in."""

    def __init__(self) -> None:
        self.loops: list[_OwnLoop] = []


_idle = _Idle()
_swap_task = getattr(asyncio.tasks, "_swap_current_task", lambda loop, task: None)  # since 3.12, and needed since 3.14
T = TypeVar("T")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives, in a loop of this thread. One that runs already, as a notebook's does, stands still meanwhile."""
    own = _idle.loops.pop() if _idle.loops and _idle.loops[-1].pid == os.getpid() else _OwnLoop()
    outer = asyncio._get_running_loop()
    task = None if outer is None else _swap_task(outer, None)
    asyncio._set_running_loop(None)
    made = own.loop.create_task(work)
    try:
        return own.loop.run_until_complete(made)
    except BaseException:  # a ^C: what it has left would go on, and raise it again, in the next block's time
        made.cancel()
        with suppress(BaseException):
            own.loop.run_until_complete(made)
        raise
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            _swap_task(outer, task)
        _idle.loops.append(own)
