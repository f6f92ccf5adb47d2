"""Stages that make more or fewer items of what they are given, and still a position that any number of ranks goes on from.

Behind a Filter nobody knows where item 1,000 is before the others have been read. So the row below is cut into blocks of `block`
items, and what the stages make of a block depends on that block alone: they begin anew with each. A place is (block, how many of
its items have been had), and going on from it reads one block again at the most.

    row          0 1 2 3 | 4 5 6 7 | 8 9          blocks of 4
    Filter(odd)    1   3 |   5   7 |   9
    Batch(2)       1 - 3     5 - 7     9          batches run across the blocks
    place        (0, 0)    (1, 0)    (2, 0)

Workers expand blocks ahead, in order. Every rank expands all of them, as only who has counted the items before knows which are
whose; put what is dear behind what leaves items out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shmload._core.gather import number_runs
from shmload.batch.ragged import ragged_of
from shmload.modes.default_collate import collated
from shmload.pipeline.block_columns import Block, columns_of
from shmload.pipeline.sources import Keys, Row, set_whole
from shmload.schedule.state_codec import UsersOwn, sealed
from shmload.worker.failure import Failure, no_end
from shmload.worker.sample_rng import sample_rng
from shmload.worker.stage_engine import Each, called, noted

T = TypeVar("T")
IN_WORKER = "in a worker of this pipeline"
BLOCK = 256  # items of the row below that are expanded together


class FailedItem(NamedTuple):
    """Stands among items where one could not be made, so that the others come."""

    failure: Failure


class Expanding:
    """A stage of a block's items."""

    @property
    def kind(self) -> str:
        """Which stage it is, for the pipeline's identity: without its functions."""
        return type(self).__name__

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        """What it makes of them, in order.

        Args:
            name: of the stage, for people.
        """
        raise NotImplementedError


def _answered(fn: Callable[[Any], Any], items: Iterator[Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Each item with what a function says of it; what stands for one that failed comes alone."""
    for item in items:
        if type(item) is FailedItem:
            yield item, None
            continue
        try:
            answer = fn(item)
        except Exception as error:
            yield failed(error, name), None
        else:
            yield item, answer


@dataclass(frozen=True)
class Filter(Expanding):
    """Only the items of which a function says True.

    Args:
        fn: item -> whether it stays.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Filter(fn) is a function of one item; got {self.fn!r}")

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        for item, stays in _answered(self.fn, items, name):
            if stays or type(item) is FailedItem:
                yield item


@dataclass(frozen=True)
class FlatMap(Expanding):
    """The items that a function makes of each, none or many.

    Args:
        fn: item -> an iterable of items, which ends.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"FlatMap(fn) is a function of one item; got {self.fn!r}")

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        for item, made in _answered(lambda item: iter(self.fn(item)), items, name):
            if type(item) is FailedItem:
                yield item
                continue
            while True:
                try:
                    value = next(made)
                except StopIteration:
                    break
                except Exception as error:
                    yield failed(error, name)
                    break
                yield value


@dataclass(frozen=True)
class BufferedShuffle(Expanding):
    """See Shuffle."""

    size: int

    @property
    def kind(self) -> str:
        return f"Shuffle(buffer_size={self.size})"

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        rng, held = sample_rng(), []
        for item in items:
            held.append(item)
            if len(held) > self.size:
                yield self._drawn(held, rng)
        while held:
            yield self._drawn(held, rng)

    @staticmethod
    def _drawn(held: list[Any], rng: np.random.Generator) -> Any:
        place = int(rng.integers(len(held)))
        held[place], held[-1] = held[-1], held[place]
        return held.pop()


@dataclass(frozen=True)
class Pack(Expanding):
    """Sequences of tokens, put together into windows of one length: dicts of `tokens`, `segment_ids` and `position_ids`.

    Each sequence lies whole in one window; one that is longer than a window is cut. `segment_ids` number a window's sequences from
    1, 0 is padding; `position_ids` begin at 0 in each.

    Args:
        window: tokens of each window, at least 1.
        pad: what fills a window up.
        strategy: "greedy" goes on with the window begun last, or begins another; "best_fit" takes the one that has the least room
            for the sequence, of all of its block's.
    Raises:
        ValueError: an argument is none of these.
    Source: H. Ding et al., Fewer truncations improve language modeling, ICML 2024 (best fit).
    """

    window: int
    _: KW_ONLY
    pad: int = 0
    strategy: str = "greedy"

    def __post_init__(self) -> None:
        set_whole(self, "Pack(window)", "window", 1, 1 << 31)
        set_whole(self, "Pack(pad)", "pad", -(1 << 63), (1 << 63) - 1)
        if self.strategy not in ("greedy", "best_fit"):
            raise ValueError(f'Pack(strategy) is "greedy" or "best_fit"; got {self.strategy!r}')

    @property
    def kind(self) -> str:
        return repr(self)

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        windows: list[_PackedWindow] = []
        is_greedy = self.strategy == "greedy"
        for item, parts in _answered(self._parts, items, name):
            if type(item) is FailedItem:
                yield item
                continue
            for part in parts:
                window = self._fitting(windows, len(part))
                if window is None:
                    if is_greedy and windows:
                        yield windows.pop().columns()
                    window = _PackedWindow(self.window, self.pad)
                    windows.append(window)
                window.put(part)
        yield from (window.columns() for window in windows)

    def _parts(self, item: Any) -> list[np.ndarray[Any, Any]]:
        tokens = np.asarray(item)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"Pack needs sequences of integers; got an array of {tokens.dtype}, shape {tokens.shape}")
        if 0 < len(tokens) <= self.window:
            return [tokens]
        return [tokens[first : first + self.window] for first in range(0, len(tokens), self.window)]

    def _fitting(self, windows: Sequence[_PackedWindow], length: int) -> _PackedWindow | None:
        """The window that a sequence goes to; None: another one."""
        if len(windows) < 2:
            return windows[0] if windows and windows[0].room >= length else None
        return min((window for window in windows if window.room >= length), key=lambda window: window.room, default=None)


class _PackedWindow:
    """One window as it fills up.

    Attributes:
        room: tokens that it still takes.
    """

    __slots__ = ("_columns", "_lengths", "_tokens", "room")

    def __init__(self, length: int, pad: int) -> None:
        self._columns = np.zeros((3, length), np.int64)
        self._tokens = self._columns[0]
        if pad:
            self._tokens[:] = pad
        self._lengths: list[int] = []  # of its sequences
        self.room = length

    def put(self, part: np.ndarray[Any, Any]) -> None:
        """Takes a sequence in, by a copy."""
        length, start = len(part), len(self._tokens) - self.room
        self._tokens[start : start + length] = part
        self._lengths.append(length)
        self.room -= length

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """What comes of it, once it takes no more."""
        tokens, segments, positions = self._columns
        number_runs(self._lengths, segments, positions)
        return {"tokens": tokens, "segment_ids": segments, "position_ids": positions}


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
        given = [(item, _reading.position) for item in items]
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


@dataclass(frozen=True)
class Scan:
    """A function that carries a state from item to item, which is part of the position: a running mean, what was seen before.

    It runs in the trainer, over the items of all ranks in their order, so every rank's state is the same; what follows it runs
    there, too. An epoch begins with `initial`.

    Args:
        fn: (state, item) -> (state, item). Where it raises, that item is lost and the state stays.
        initial: numbers, text, bytes, arrays, tensors or containers of them, as states are saved.
    Raises:
        TypeError: `fn` cannot be called, or `initial` cannot be saved.
    """

    fn: Callable[[Any, Any], tuple[Any, Any]]
    initial: Any = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Scan(fn) is a function of a state and an item; got {self.fn!r}")
        saved(self.initial, "Scan(initial)")

    def __call__(self, state: Any, item: Any) -> tuple[Any, Any]:
        """The next state, and what becomes of the item."""
        made = self.fn(state, item)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(f"the function of a Scan gives (state, item); it gave {made!r:.200}")
        return made


def saved(state: Any, whose: str) -> str:
    """A state of the user's, as text of a pipeline's state.

    Raises:
        TypeError: only pickle could write it.
    """
    text = sealed(UsersOwn(state))
    if '{"$pickle": ' in text:
        raise TypeError(
            f"{whose} is saved with the pipeline's state, and holds what only pickle can write: give it numbers, text, bytes, "
            "arrays, tensors and containers of them"
        )
    return text


class LikeItems(NamedTuple):
    """Items that are one batch."""

    items: list[Any]


class MadeBatch(NamedTuple):
    """The batch of such items."""

    size: int
    batch: Any


@dataclass(frozen=True)
class Bucket(Expanding):
    """Batches of items of like length, so that little is padded. It takes the place of Collate.

    An item goes to the bucket of the first boundary that is not below its length, or to the last; a bucket that is full is a
    batch. What is left in the buckets at a block's end are smaller batches: a pipeline's `block_size` should be many of them.

    Args:
        length: item -> its length.
        boundaries: ascending.
        batch_size: items of a batch.
        max_tokens: in place of `batch_size`: the most that a batch's items may have together, each counted as its longest. An
            item that alone has more is a batch of its own.
        ragged: as of Collate.
    Raises:
        ValueError, TypeError: arguments that make no sense, or do not go together.
    """

    length: Callable[[Any], int]
    boundaries: Sequence[int]
    batch_size: int | None = None
    _: KW_ONLY
    max_tokens: int | None = None
    ragged: Any = "list"

    def __post_init__(self) -> None:
        if not callable(self.length):
            raise TypeError(f"Bucket(length) is a function of one item; got {self.length!r}")
        try:
            object.__setattr__(self, "boundaries", tuple(map(int, self.boundaries)))
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"Bucket(boundaries) are whole numbers; got {self.boundaries!r}") from None
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"Bucket(boundaries) ascend; got {self.boundaries}")
        ragged_of(self.ragged, None, is_torch_mode=False)
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError("Bucket needs batch_size or max_tokens, one of them")
        name = "max_tokens" if self.batch_size is None else "batch_size"
        set_whole(self, f"Bucket({name})", name, 1, 1 << 31)

    @property
    def kind(self) -> str:
        return f"Bucket({self.boundaries}, batch_size={self.batch_size}, max_tokens={self.max_tokens})"

    def run(self, items: Iterator[Any], name: str) -> Iterator[Any]:
        measure, boundaries = self.length, self.boundaries
        held: list[list[Any]] = [[] for _ in range(len(boundaries) + 1)]
        longest = [0] * len(held)
        for item in items:
            if type(item) is FailedItem:
                yield item
                continue
            try:
                length = int(measure(item))
            except Exception as error:
                yield failed(error, name)
                continue
            at = bisect_left(boundaries, length)
            like, most = held[at], max(longest[at], length)
            if like and self.max_tokens is not None and most * (len(like) + 1) > self.max_tokens:
                yield LikeItems(like)
                like, most = [], length
                held[at] = like
            like.append(item)
            longest[at] = most
            if len(like) == self.batch_size:
                yield LikeItems(like)
                held[at], longest[at] = [], 0
        yield from (LikeItems(left) for left in held if left)


class _Reading(threading.local):
    """Which row this thread expands, and the position that it has read last."""

    row: Any  # what has key() and name()
    position = 0

    def name(self, _: int = 0) -> str:
        """The item that was read last, for people."""
        name: str = self.row.name(self.row.key(self.position))
        return name


_reading = _Reading()


def set_position(position: int) -> None:
    """Says which item is read next, of the row that is expanded."""
    _reading.position = position


def failed(error: Exception, stage: str, position: int | None = None) -> FailedItem:
    """What stands for an item that a stage has failed with.

    Args:
        position: of the item that it comes of. None: of the one that was read last.
    """
    row = _reading.row
    name = _reading.name() if position is None else row.name(row.key(position))
    if isinstance(error, StopIteration):  # it would end the items
        error = no_end(error, f"the function of {stage}" if stage else "reading the source")
    error.add_note(f"shmload: {stage}, of {name}" if stage else f"shmload: {name}")
    return FailedItem(Failure.of(error, IN_WORKER, ""))


def columned(items: list[Any]) -> Block:
    """The items as columns, if they can be."""
    return columns_of(items) or items


@dataclass(frozen=True)
class Batches:
    """The batches of items that are to be one.

    Attributes:
        ragged: how they are collated, as of Collate.
    """

    ragged: Any

    def __call__(self, items: list[Any]) -> list[Any]:
        rule = ragged_of(self.ragged, None, is_torch_mode=False)
        return [self._batch(item, rule) if type(item) is LikeItems else item for item in items]

    @staticmethod
    def _batch(like: LikeItems, rule: Any) -> Any:
        try:
            return MadeBatch(len(like.items), collated(like.items, rule))
        except Exception as error:
            return failed(error, "collating a batch of Bucket")


class Expansion:
    """What stages make of a block's items, in the form in which it travels to the trainer.

    Args:
        stages: (name, stage): functions of an item, and Expanding ones.
        finish: items -> that form.
        behind: stages that the trainer runs on what comes of it.
    """

    def __init__(
        self, stages: Sequence[tuple[str, Any]], finish: Callable[[list[Any]], Block] | None = None, behind: Sequence[Any] = ()
    ) -> None:
        self._runs: list[tuple[str, Any]] = []  # neighbouring functions run together
        for name, stage in stages:
            if isinstance(stage, Expanding):
                self._runs.append((name, stage))
            elif self._runs and isinstance(self._runs[-1][1], list):
                self._runs[-1][1].append(stage)
            else:
                self._runs.append(("", [stage]))
        self._finish = finish
        kinds = [stage.kind for _, stage in stages if isinstance(stage, Expanding)]
        self.kinds = ", ".join([*kinds, *("Scan" for stage in behind if isinstance(stage, Scan))]) or "items"

    def __call__(self, items: Iterator[Any], row: Any) -> Block:
        """The block's items.

        Args:
            row: whose they are.
        """
        _reading.row = row
        for name, stage in self._runs:
            items = stage.run(items, name) if isinstance(stage, Expanding) else _mapped(stage, items)
        made = list(items)
        return made if self._finish is None else self._finish(made)


class BlockRow(Row):
    """A row of blocks: item b is what stages make of the b-th block of the row below.

    Args:
        size: items of the row below in a block; the last of an epoch may have fewer.
    """

    def __init__(self, below: Keys, expansion: Expansion, size: int) -> None:
        super().__init__(
            -(-below.n // size),
            f"{expansion.kinds} of blocks of {size} of {below.identity}",
            repeating=below.repeating,
            seed=below.seed,
        )
        self.below, self.size, self._expansion = below, size, expansion

    def item(self, key: int) -> Block:
        start = key * self.size
        stop = start + self.size
        if not self.repeating:
            epoch, block = divmod(key, self.n)
            start = epoch * self.below.n + block * self.size
            stop = min(start + self.size, (epoch + 1) * self.below.n)
        return self._expansion(self._read(start, stop), self.below)

    def name(self, key: int) -> str:
        epoch, block = (0, key) if self.repeating else divmod(key, self.n)
        return f"block {block} of epoch {epoch}, of {self.size} items"

    def _read(self, start: int, stop: int) -> Iterator[Any]:
        reading, at = _reading, self.below.at
        for position in range(start, stop):
            reading.position = position
            try:
                item = at(position)
            except Exception as error:
                item = failed(error, "")
            yield item


def _mapped(stages: list[Each], items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) is not FailedItem:
            stage = stages[0]
            try:
                for stage in stages:
                    item = stage.function(item)
            except Exception as error:
                item = FailedItem(Failure.of(noted(error, stage, f", of {_reading.name()}"), IN_WORKER, ""))
        yield item
