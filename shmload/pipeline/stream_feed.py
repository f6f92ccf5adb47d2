"""The feed of a Stream: the trainer reads it block by block and sends the blocks to workers."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from shmload.errors import StateMismatch
from shmload.pipeline.block_columns import Block
from shmload.pipeline.block_context import BlockContext
from shmload.pipeline.position_stages import Enumerate, Skip, Take
from shmload.pipeline.scan import saved
from shmload.pipeline.stream_sequence import UNKNOWN, StreamItems, StreamSequence
from shmload.schedule.state_codec import opened
from shmload.shm import pickling
from shmload.worker.failure import Failure
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import sample_info, sample_of
from shmload.worker.stage_engine import FailedItem, StageContext

ENDED = ""  # replaces the state of an exhausted iterable, which may equal that of the start of its next pass


class _ItemNames:
    """Names the items of a stream, for error messages."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def key(self, position: int) -> int:
        return position

    def name(self, key: int) -> str:
        return f"item {key} of epoch {self._epoch} of the Stream"


class BlockKey(NamedTuple):
    """An ordered block. If the worker cannot read its items itself, it contains them, or their pickle."""

    epoch: int
    block: int
    items: list[Any] | bytes | None

    def __index__(self) -> int:
        return self.block  # the index of the sample that a loader reads by this key

    def __repr__(self) -> str:
        return f"<block {self.block}>"  # in errors


class StreamProgram:
    """A dataset whose keys are blocks. It returns the block's number, and the result of the stages."""

    def __init__(self, sequence: StreamSequence) -> None:
        self._expansion, self._size, self._seed = sequence.expansion, sequence.size, sequence.seed

    def __len__(self) -> int:
        return UNKNOWN

    @cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators(self._expansion)

    def __getitem__(self, key: BlockKey) -> tuple[int, Block]:
        epoch, block, sent = key
        items: Any = pickle.loads(sent) if isinstance(sent, bytes) else sent  # pickled by the trainer
        with sample_of(self._seed, epoch, block, sample_info().worker, own=self._own):
            context = BlockContext(_ItemNames(epoch))
            return block, self._expansion(_placed(items, block * self._size, context), context)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}


def _placed(items: list[Any], first: int, context: StageContext) -> Iterator[Any]:
    for context.origin, item in enumerate(items, first):
        yield item


class Feed:
    """Reads a stream block by block, from any place.

    Args:
        stream: the stream to read.
        size: number of items of a block.
        is_sent: whether items are pickled, for workers.
    Attributes:
        own: block -> the iterable's own state before it, as text, if it has one.
    """

    def __init__(self, stream: StreamItems, size: int, *, is_sent: bool) -> None:
        self._stream, self.size, self._is_sent = stream, size, is_sent
        self.epoch = self.block = 0  # where the next pass begins
        self.own: dict[int, str] = {}
        self._is_spent = False
        self.pristine = ""  # the iterable's own state before its first pass

    def __iter__(self) -> Iterator[BlockKey]:
        return _FeedPass(self)

    def key(self, epoch: int, block: int, items: list[Any]) -> BlockKey:
        """Return the key of a block with these items."""
        return BlockKey(epoch, block, _sent(items, epoch, block * self.size) if self._is_sent else items)

    def begun(self, epoch: int, block: int) -> tuple[Iterator[Any], Callable[[], Any] | None]:
        """Return the items from a block on, and a function that returns the iterable's own state, if it has one."""
        source = self._stream.iterable
        if self._stream.is_spent_once_read and (self._is_spent or epoch):
            raise ValueError(
                "the Stream's iterator can be read only once, and was: give Stream an iterable, or a function that makes iterators"
            )
        self._is_spent = True
        is_class = isinstance(source, type)  # a class has the methods of its instances
        set_epoch = None if is_class else getattr(source, "set_epoch", None)
        resumes_by_state = self._stream.resume == "state"
        if resumes_by_state and not is_class and _is_stateful(source) and not self.pristine:
            self.pristine = saved(source.state_dict(), "the state of the Stream's iterable")
        if set_epoch is not None:
            set_epoch(epoch)
        iterator = _iterator_of(source)
        ways = () if not resumes_by_state else (iterator,) if is_class else (iterator, source)
        holder: Any = next((one for one in ways if _is_stateful(one)), None)
        text = self.own.get(block)
        if holder is not None and text == ENDED:
            return iter(()), None
        if holder is None and text is not None:
            raise StateMismatch(
                "the state contains a state of the Stream's iterable, which this iterable cannot load: build the Stream as it "
                "was at saving"
            )
        if holder is source and holder is not None:  # an earlier pass may have moved it
            source.load_state_dict(opened(text or self.pristine, is_trusted=False))
            if text is None and set_epoch is not None:
                set_epoch(epoch)  # again, because the state may contain the epoch
            iterator = _iterator_of(source)
        elif text is not None:
            holder.load_state_dict(opened(text, is_trusted=False))
        first = block * self.size
        return self._stepped(iterator, first, has_moved=text is not None), None if holder is None else holder.state_dict

    def _stepped(self, iterator: Iterator[Any], first: int, *, has_moved: bool) -> Iterator[Any]:
        """Yield the items after the stream's steps, beginning with number `first` of them."""
        steps = self._stream.steps
        num_skipped, stop = 0, sys.maxsize  # stop: the position in the iterable after the last item
        for step in steps:
            if isinstance(step, Skip):
                num_skipped += step.n
            elif isinstance(step, Take):
                stop = min(stop, num_skipped + step.n)
        begin = min(first + num_skipped, stop)
        at = begin if has_moved and first else 0
        return _Stepped(iterator, steps, at, begin, stop)


class _Stepped(Iterator[Any]):
    """The items of an iterator after a Stream's steps. Not a generator or islice, which an interrupt would end.

    Args:
        iterator: the iterator.
        steps: Skips, Takes and Enumerates.
        at: the number of its next item.
        begin, stop: the numbers of the first item to deliver, and after the last. Nothing is read after that, because in live data
            it may never come.
    """

    def __init__(self, iterator: Iterator[Any], steps: Sequence[Any], at: int, begin: int, stop: int) -> None:
        self._iterator, self._steps, self._at, self._begin, self._stop = iter(iterator), steps, at, begin, stop

    def __next__(self) -> Any:
        while self._at < self._begin:
            next(self._iterator)
            self._at += 1
        if self._at >= self._stop:
            raise StopIteration
        item, number = next(self._iterator), self._at
        self._at += 1
        for step in self._steps:
            if isinstance(step, Skip):
                number -= step.n
            elif isinstance(step, Enumerate):
                item = step.start + number, item
        return item


class _FeedPass(Iterator[BlockKey]):
    """One pass of a feed. An interrupt while an item is read loses nothing: the next call continues the block."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._epoch, self._block = feed, feed.epoch, feed.block
        self._first = feed.block
        self._items: Iterator[Any] | None = None
        self._state_of: Callable[[], Any] | None = None
        self._chunk: list[Any] | None = None  # items of the next block; None between blocks
        self._has_ended = False

    def __next__(self) -> BlockKey:
        feed = self._feed
        if self._has_ended:
            raise StopIteration
        if self._items is None:
            try:
                self._items, self._state_of = feed.begun(self._epoch, self._block)
            except Exception as error:
                return self._last([_failed(error, self._epoch, self._block * feed.size)])
        if self._chunk is None:
            self._save()
            self._chunk = []
        chunk = self._chunk
        while len(chunk) < feed.size:
            try:
                chunk.append(next(self._items))
            except StopIteration:
                break
            except Exception as error:  # items before an error are delivered, too
                return self._last([*chunk, _failed(error, self._epoch, self._block * feed.size + len(chunk))])
        if len(chunk) < feed.size:
            if self._state_of is not None:
                feed.own[self._block + bool(chunk)] = ENDED
            if not chunk:
                self._has_ended = True
                raise StopIteration
            return self._last(chunk)
        key = feed.key(self._epoch, self._block, chunk)
        self._block, self._chunk = self._block + 1, None
        return key

    def _save(self) -> None:
        """Keep the iterable's own state before the next block.

        Not before the first read, when it may be that of the end of its last pass.
        """
        if self._state_of is not None and self._block > self._first:
            self._feed.own[self._block] = saved(self._state_of(), "the state of the Stream's iterable")

    def _last(self, items: list[Any]) -> BlockKey:
        key = self._feed.key(self._epoch, self._block, items)
        self._has_ended = True
        return key


def _iterator_of(source: Any) -> Iterator[Any]:
    if hasattr(source, "__iter__") and not isinstance(source, type):
        return iter(source)
    made: Iterator[Any] = source()
    if not hasattr(made, "__iter__"):
        raise TypeError(f"the function of the Stream makes an iterator; it gave {type(made).__name__}")
    return made


def _is_stateful(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _sent(items: list[Any], epoch: int, first: int) -> bytes:
    """Pickle items for a worker. An item that cannot be pickled is replaced by its failure; the others are sent."""
    with suppress(Exception):
        return pickling.dumps(items)
    found: list[Any] = []
    for number, item in enumerate(items, first):
        try:
            pickling.dumps(item)
        except Exception as error:
            refused = TypeError(
                f"an item of the Stream, of type {type(item).__qualname__}, cannot be pickled, and only pickle brings it to "
                f"workers: {type(error).__name__}: {error}"
            )
            item = _failed(refused, epoch, number)
        found.append(item)
    return pickling.dumps(found)


def _failed(error: Exception, epoch: int, number: int) -> FailedItem:
    error.add_note(f"shmload: {_ItemNames(epoch).name(number)}")
    return FailedItem(Failure.of(error, "reading the Stream", ""))
