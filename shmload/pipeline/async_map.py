"""AsyncMap: apply a coroutine function to each item, with several items waiting at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from shmload.worker.sample_rng import begin_part
from shmload.worker.stage_arguments import set_whole
from shmload.worker.stage_engine import Expanding, FailedItem, StageContext


@dataclass(frozen=True)
class AsyncMap(Expanding):
    """A stage that applies a coroutine function, such as a request, to each item. Several items wait at a time; order is kept.

    It runs in the process that expands blocks. The thread keeps its event loop, so `fn` can reuse a client for the next item.
    `sample_rng()` returns a generator of the item's own. What `fn` draws from random, numpy and torch after its first `await`
    depends on the order in which requests are answered.

    Args:
        fn: item -> a coroutine that returns an item.
        in_flight: number of items of one block that wait at a time, in each worker.
    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    fn: Callable[[Any], Any]
    in_flight: int = 16

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"AsyncMap(fn) is a coroutine function of one item; got {self.fn!r}")
        set_whole(self, "AsyncMap(in_flight)", "in_flight", 1, 1 << 20)

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        context.num_async_maps += 1  # now, in the order of the stages, and not when the first item is asked for
        return self._mapped(items, name, context, context.num_async_maps)

    def _mapped(self, items: Iterator[Any], name: str, context: StageContext, number: int) -> Iterator[Any]:
        given = [(item, context.origin) for item in items]
        for made, (_, origin) in zip(_run(self._all(given, name, context, number)), given, strict=True):
            context.origin = origin
            yield made

    async def _all(self, given: Sequence[tuple[Any, int]], name: str, context: StageContext, number: int) -> list[Any]:
        """Return the results of all items.

        Args:
            given: the items, each with its origin.
            name: name of the stage, for messages.
            context: the context that all stages share.
            number: number of this stage among the AsyncMaps, so that each draws its own random numbers.
        """
        room = asyncio.Semaphore(self.in_flight)

        def failed(error: Exception, origin: int) -> Any:
            context.origin = origin
            return context.failed(error, name)

        async def one(item_number: int, item: Any, origin: int) -> Any:
            if isinstance(item, FailedItem):
                return item
            begin_part((number, item_number))
            async with room:
                try:
                    return await self.fn(item)
                except Exception as error:
                    return failed(error, origin)
                except asyncio.CancelledError:  # of what the function waits for; not an Exception, so it would end the worker
                    return failed(RuntimeError(f"what the function of {name} waited for was cancelled"), origin)

        return list(await asyncio.gather(*(one(item_number, *item) for item_number, item in enumerate(given))))


class _OwnLoop:
    """An event loop that belongs to this thread and process."""

    def __init__(self) -> None:
        self.loop, self.pid = asyncio.new_event_loop(), os.getpid()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and self.pid == os.getpid():  # after a fork it still belongs to the parent
            self.loop.close()


class _Idle(threading.local):
    """The idle loops of a thread."""

    def __init__(self) -> None:
        self.loops: list[_OwnLoop] = []


_idle = _Idle()
_swap_task = getattr(asyncio.tasks, "_swap_current_task", lambda loop, task: None)  # since 3.12, and needed since 3.14
T = TypeVar("T")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of this thread. A loop that is already running, as in a notebook, is suspended until it ends."""
    own = _idle.loops.pop() if _idle.loops and _idle.loops[-1].pid == os.getpid() else _OwnLoop()
    outer = asyncio._get_running_loop()
    task = None if outer is None else _swap_task(outer, None)
    asyncio._set_running_loop(None)
    made = own.loop.create_task(work)
    try:
        return own.loop.run_until_complete(made)
    except BaseException:  # after a ^C, pending requests would continue and raise during the next block
        made.cancel()
        with suppress(BaseException):
            own.loop.run_until_complete(made)
        raise
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            _swap_task(outer, task)
        _idle.loops.append(own)
