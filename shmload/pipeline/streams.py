"""Stream: items of an iterable, which only comes one after the other; the trainer reads it, workers do the rest.

    iterable ──the trainer reads `block_size` items──▶ a block of them ──a worker, by the stages──▶ what comes of them

A block is a sample that a ShmLoader's sampler orders, so workers, crash replay and back-pressure are the loader's, and the iterable
is read as far ahead as blocks are ordered. A place is (block, offset) as behind every stage that makes more or fewer items. A
resume reads the iterable up to there again, or has it go on by itself, if it can: by `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shmload.errors import SampleTimeout, StateMismatch, WorkerDied
from shmload.loader import ShmLoader
from shmload.pipeline.block_columns import Block
from shmload.pipeline.blocks import Expansion, FailedItem, saved, set_position
from shmload.pipeline.methods import Fluent
from shmload.pipeline.sources import MAX_WORKERS, SEED, Enumerate, Row, Skip, Take, set_whole
from shmload.schedule.checks import MAX_UINT64
from shmload.schedule.state_codec import opened
from shmload.shm import travel
from shmload.worker.failure import Failure
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import sample_info, sample_of

if TYPE_CHECKING:
    from shmload.pipeline.stages import PoolOptions, StreamSchedule

ENDED = ""  # in place of the own state of an iterable that has come to its end, which may be that of its next pass's start
UNKNOWN = 1 << 52  # blocks of an epoch, as far as anybody knows


@dataclass(frozen=True, eq=False)
class Stream(Fluent):
    """The items of an iterable, in the order in which it gives them: what has no length, or no index.

    The trainer reads it, each rank all of it; what stages make of its items is made in workers. An epoch is one pass over it. It
    should give the same items each time, but for what `set_epoch(epoch)` changes, which is called before each pass if it is there.

    Args:
        iterable: iterated anew for each epoch; or a function that makes an iterator. An iterator has one epoch.
        resume: "state": by the iterable's own state, which is part of the pipeline's then, if it, or its iterator, has
            `state_dict()` and `load_state_dict()`; "count": what came before is read again. Take that for an iterable whose own
            state is not exact, such as a shuffled one of Hugging Face's, which forgets what is in its buffer.
        seed: 0 to 2**64 - 1; of what `shmload.sample_rng()` and the global generators draw in a block of items.
        n_workers: worker processes that it asks for, beside those of DistributedBatchedMap.
    Raises:
        ValueError, TypeError: it is no iterable, or has an index: then Items reads it at any place.
    Example:
        >>> from shmload.pipeline import Stream
        >>> list(Stream(lambda: iter("a bc d".split())).filter(lambda word: len(word) < 2).batch(2))
        [['a', 'd']]
    """

    iterable: Any
    _: KW_ONLY
    resume: Literal["state", "count"] = "state"
    seed: int = SEED
    n_workers: int = 0
    steps: tuple[Take | Skip | Enumerate, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if not (callable(self.iterable) or hasattr(self.iterable, "__iter__")):
            raise TypeError(
                f"Stream needs an iterable, or a function that makes an iterator; got a {type(self.iterable).__name__}. What has a "
                "length and an index is Items"
            )
        if self.resume not in ("state", "count"):
            raise ValueError(f'Stream(resume) is "state" or "count"; got {self.resume!r}')
        set_whole(self, "Stream(seed)", "seed", 0, MAX_UINT64)
        set_whole(self, "Stream(n_workers)", "n_workers", 0, MAX_WORKERS)

    def with_step(self, step: Any) -> Stream:
        """Some of its items, or numbered ones, as a `step` says.

        Raises:
            ValueError: a stage that needs to know where items stand.
        """
        if not isinstance(step, Take | Skip | Enumerate):
            remedy = ": give it a buffer_size" if type(step).__name__ == "Shuffle" else ""
            raise ValueError(f"the items of a Stream have no places to go by{remedy}")
        stepped = replace(self)
        object.__setattr__(stepped, "steps", (*self.steps, step))
        return stepped

    @property
    def is_spent_once_read(self) -> bool:
        """Whether it is an iterator, which cannot be begun again."""
        return not isinstance(self.iterable, type) and hasattr(self.iterable, "__next__")


class StreamRow(Row):
    """The blocks of a stream, for the schedule: nobody knows how many they are."""

    def __init__(self, stream: Stream, expansion: Expansion, size: int) -> None:
        steps = "".join(f", {step}" for step in stream.steps)
        super().__init__(UNKNOWN, f"{expansion.kinds} of blocks of {size} of a Stream{steps}", repeating=False, seed=stream.seed)
        self.stream, self.expansion, self.size = stream, expansion, size


class _ItemNames:
    """What the items of a stream are called."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def key(self, position: int) -> int:
        return position

    def name(self, key: int) -> str:
        return f"item {key} of epoch {self._epoch} of the Stream"


class BlockKey(NamedTuple):
    """A block that is ordered; its items, if a worker cannot read them itself, or the pickle of these."""

    epoch: int
    block: int
    items: list[Any] | bytes | None

    def __repr__(self) -> str:
        return f"<block {self.block}>"  # in errors


class StreamProgram:
    """A dataset whose keys are blocks themselves: it gives the block's number, and what comes of it."""

    def __init__(self, row: StreamRow) -> None:
        self._expansion, self._size, self._seed = row.expansion, row.size, row.seed

    def __len__(self) -> int:
        return UNKNOWN

    @cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators(self._expansion)

    def __getitem__(self, key: BlockKey) -> tuple[int, Block]:
        epoch, block, sent = key
        items: Any = pickle.loads(sent) if isinstance(sent, bytes) else sent  # by the trainer
        with sample_of(self._seed, epoch, block, sample_info().worker, own=self._own):
            return block, self._expansion(_placed(items, block * self._size), _ItemNames(epoch))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}


def _placed(items: list[Any], first: int) -> Iterator[Any]:
    for position, item in enumerate(items, first):
        set_position(position)
        yield item


class Feed:
    """Reads a stream, block by block, from a place on: the loader's sampler.

    Args:
        is_sent: whether items go to workers, as a pickle.
    Attributes:
        own: the iterable's own state before a block, if it has any, as text.
    """

    def __init__(self, stream: Stream, size: int, *, is_sent: bool) -> None:
        self._stream, self._size, self._is_sent = stream, size, is_sent
        self.epoch = self.block = 0  # where the next pass begins
        self.own: dict[int, str] = {}
        self._is_spent = False
        self.pristine = ""  # an iterable's own state before its first pass

    def __iter__(self) -> Iterator[BlockKey]:
        for epoch, block, items in self._read():
            yield BlockKey(epoch, block, _sent(items, epoch, block * self._size) if self._is_sent else items)

    def _read(self) -> Iterator[tuple[int, int, list[Any]]]:
        epoch, block = self.epoch, self.block
        try:
            items, state_of = self._begun(epoch, block)
        except Exception as error:
            yield epoch, block, [_failed(error, epoch, block * self._size)]
            return
        begun = block
        while True:
            if state_of is not None and block > begun:  # what has not begun to read may show where its last pass ended
                self.own[block] = saved(state_of(), "the state of the Stream's iterable")
            chunk: list[Any] = []
            try:
                for item in islice(items, self._size):
                    chunk.append(item)  # noqa: PERF402  # what came before an error is given, too
            except Exception as error:
                yield epoch, block, [*chunk, _failed(error, epoch, block * self._size + len(chunk))]
                return
            if chunk:
                yield epoch, block, chunk
                block += 1
            if len(chunk) < self._size:
                if state_of is not None:
                    self.own[block] = ENDED
                return

    def _begun(self, epoch: int, block: int) -> tuple[Iterator[Any], Callable[[], Any] | None]:
        """The items from a block on, and what says where the iterable stands."""
        source = self._stream.iterable
        if self._stream.is_spent_once_read and (self._is_spent or epoch):
            raise ValueError(
                "the Stream's iterator can be read only once, and was: give Stream an iterable, or a function that makes iterators"
            )
        self._is_spent = True
        is_class = isinstance(source, type)  # which has what its instances have
        if hasattr(source, "set_epoch") and not is_class:
            source.set_epoch(epoch)
        iterator = _iterator_of(source)
        ways = () if self._stream.resume != "state" else (iterator,) if is_class else (iterator, source)
        holder: Any = next((one for one in ways if _is_stateful(one)), None)
        text = self.own.get(block)
        if holder is not None and text == ENDED:
            return iter(()), None
        if holder is None and text is not None:
            raise StateMismatch("the state has one of the Stream's iterable in it, which this one does not go on by")
        if holder is source and holder is not None:  # it may stand where an earlier pass has left it
            self.pristine = self.pristine or saved(source.state_dict(), "the state of the Stream's iterable")
            source.load_state_dict(opened(text or self.pristine, is_trusted=False))
            iterator = _iterator_of(source)
        elif text is not None:
            holder.load_state_dict(opened(text, is_trusted=False))
        first = block * self._size
        return self._stepped(iterator, first, has_moved=text is not None), None if holder is None else holder.state_dict

    def _stepped(self, iterator: Iterator[Any], first: int, *, has_moved: bool) -> Iterator[Any]:
        """The items behind the stream's steps, from number `first` of these on."""
        steps = self._stream.steps
        num_skipped = sum(step.n for step in steps if isinstance(step, Skip))
        at = first + num_skipped if has_moved and first else 0
        for number, item in enumerate(iterator, at):
            for step in steps:
                if isinstance(step, Skip):
                    number -= step.n
                    if number < 0:
                        break
                elif isinstance(step, Enumerate):
                    item = step.start + number, item
                elif number >= step.n:
                    return
            else:
                if number >= first:
                    yield item


def _iterator_of(source: Any) -> Iterator[Any]:
    if hasattr(source, "__iter__") and not isinstance(source, type):
        return iter(source)
    made: Iterator[Any] = source()
    if not hasattr(made, "__iter__"):
        raise TypeError(f"the function of the Stream makes an iterator; it gave a {type(made).__name__}")
    return made


def _is_stateful(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _sent(items: list[Any], epoch: int, first: int) -> bytes:
    """Items as workers are given them, from number `first` on; one that cannot be pickled has failed, and the others come."""
    with suppress(Exception):
        return travel.dumps(items)
    found: list[Any] = []
    for number, item in enumerate(items, first):
        try:
            travel.dumps(item)
        except Exception as error:
            refused = TypeError(
                f"a {type(item).__qualname__} of the Stream cannot be pickled, and only pickle brings it to workers: "
                f"{type(error).__name__}: {error}"
            )
            item = _failed(refused, epoch, number)
        found.append(item)
    return travel.dumps(found)


def _failed(error: Exception, epoch: int, number: int) -> FailedItem:
    error.add_note(f"shmload: {_ItemNames(epoch).name(number)}")
    return FailedItem(Failure.of(error, "reading the Stream", ""))


class FedBlocks:
    """Blocks that the trainer hands to the workers: what a Conveyer of blocks is where it can read them at any place.

    Attributes:
        place: the block that comes next, if they come in their order.
        number: of the block that came last.
    """

    def __init__(self, row: Any, pool: PoolOptions, options: Mapping[str, Any], schedule: StreamSchedule) -> None:
        self.schedule = schedule
        self.row, self._pool, self._options = row, pool, dict(options)
        self.feed = self._made_feed()
        self._loader: ShmLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self.place = self.number = 0
        self._about: Sequence[tuple[str, str]] = ()

    def _made_feed(self) -> Any:
        return Feed(self.row.stream, self.row.size, is_sent=self._pool.num_workers > 0)

    def __call__(self) -> Block:
        """The next block.

        Raises:
            StopIteration: the epoch is over.
        """
        if self._loader is None:
            self._loader = self._made()
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            block: Block
            self.number, block = next(self._iterator)
            return block
        except (SampleTimeout, WorkerDied) as error:
            error.add_note(f"shmload: a block has {self.row.size} items; sample_timeout_s is the timeout of DistributedBatchedMap")
            raise
        finally:
            self.place += 1

    def _made(self) -> ShmLoader[Any]:
        return self._loader_of(StreamProgram(self.row), self.feed, seed=self.row.seed)

    def _loader_of(self, program: Any, feed: Any, **ways: Any) -> ShmLoader[Any]:
        pool = self._pool
        if pool.num_workers:
            ways |= {"prefetch_factor": pool.prefetch_factor(self.row.size), "sample_timeout_s": pool.timeout_s}
        workers: dict[str, Any] = {"num_workers": pool.num_workers, "collate_fn": _as_it_is}
        loader: ShmLoader[Any] = ShmLoader(program, sampler=feed, batch_size=None, **workers, **{**ways, **self._options})
        loader._builder.about = self._about
        return loader

    def go(self, epoch: int, block: int, own: str | None = None, *, has_moved: bool = False) -> None:
        """Goes on there.

        Args:
            own: the iterable's state there.
        """
        self._iterator, self.place = None, block
        self.feed.epoch, self.feed.block = epoch, block
        self.feed.own = {} if own is None else {block: own}

    def state_at(self, block: int) -> str | None:
        """The iterable's own state before a block."""
        own: str | None = self.feed.own.get(block)
        return own

    def forget(self, block: int) -> None:
        """Drops what only a resume before that block would need."""
        for number in [number for number in self.feed.own if number < block]:
            del self.feed.own[number]

    def first(self, epoch: int) -> Generator[Block]:
        """The epoch's blocks from its start, read here, apart from those that are under way.

        Raises:
            ValueError: the iterator cannot be read again.
        """
        if self.row.stream.is_spent_once_read:
            raise ValueError(
                "the last step is filled up with the epoch's first items, and the Stream's iterator cannot be read again: give "
                'Partition uneven="drop" or "exact", or Stream an iterable'
            )
        others = FedBlocks(self.row, replace(self._pool, num_workers=0), {}, self.schedule)
        others.go(epoch, 0)
        others.feed.pristine = self.feed.pristine
        try:
            while True:
                try:
                    yield others()
                except StopIteration:
                    return
        finally:
            others.close()

    def show_as(self, about: Sequence[tuple[str, str]]) -> None:
        """Says which stages it is shown as."""
        self._about = about

    def stats(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.stats()

    def close(self) -> None:
        self._iterator = None
        if self._loader is not None:
            self._loader.close()


def _as_it_is(block: Block) -> Block:
    return block
