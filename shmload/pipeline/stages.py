"""What pipelines are composed of, and what a composition comes to.

    reconcile        one state for a job whose ranks saved theirs at different steps
    ItemStream       which items a rank is given at a step: the pipeline's form of shmload's schedule
    ItemErrors       what becomes of items that fail: each has its own outcome, also where several were fetched together
    RowProgram       what a worker does with one item: the pipeline's functions, as a dataset of the loader's
    Map, Collate...  the stages, plain values: what they mean together is the plan's
    compose          the grammar (docs/pipelines.md): stages in a row ──▶ a Plan

A source is one row of keys, epoch after epoch. A step goes by its first position (schedule/stream_positions.py), which is also what
a state holds: the items that all ranks have had are those before it. If the source repeats, positions count on across the ends of
epochs, and for the loader that reads it all of it is one epoch; else they begin anew with each.

Names and arguments of stages are those of the Conveyer library (https://github.com/neonbjb/conveyer); integers beyond the first are
given by name, and what it has no word for (`uneven`, `ragged`) is ShmLoader's. Stages of places have `over` (sources.py), and stand
before those that make more or fewer items (blocks.py) and before a Partition.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.trainer import Order
from shmload.batch.ragged import ragged_of
from shmload.engine.bad_samples import BadSamples, NextIndex, OnError
from shmload.errors import SampleTimeout, StateMismatch, WorkerDied
from shmload.modes.default_collate import collated
from shmload.pipeline.blocks import (
    BLOCK,
    IN_WORKER,
    Batches,
    BlockRow,
    Bucket,
    BufferedShuffle,
    Expanding,
    Expansion,
    FailedItem,
    Scan,
    columned,
)
from shmload.pipeline.sources import MAX_WORKERS, Keys, Mapped, Shuffle, check_flag, set_whole
from shmload.pipeline.streams import Stream, StreamRow
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.keyed_batches import BatchSchedule, KeyedBatches
from shmload.schedule.state_checksum import CHECK, check_checksum
from shmload.schedule.stream_positions import stream_end, stream_positions
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.failure import Failure, no_end
from shmload.worker.stage_engine import Each, noted, through

log = logging.getLogger("shmload")


_OF_PLACE = ("epoch", "position", "counters", "children", CHECK)  # of a state, what differs from place to place


def reconcile(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state to load on every rank, out of one from each of them.

    It is that of the rank which had come the least far: nothing is lost, and what other ranks have had beyond it comes again, which
    a warning counts. After equal steps all states are alike, and any of them will do.

    Args:
        states: of a Conveyer or a Join, in any order.
    Raises:
        StateMismatch: they are not of one pipeline; says what differs.
    """
    if not states:
        raise StateMismatch("reconcile needs the state of each rank; got none")
    first = _identity(states[0])
    for number, state in enumerate(states):
        if _identity(state) != first:
            raise StateMismatch(
                f"states 0 and {number} are of different pipelines: {first} and {_identity(state)}. Give the states of the ranks "
                "of one job"
            )
    for state in states:
        check_checksum(state)
    by_progress = sorted(states, key=_progress)
    least, most = _progress(by_progress[0]), _progress(by_progress[-1])
    if least != most:
        log.warning(
            "ranks had saved between %s and %s: all go on at the first, and what lies between comes again on the ranks that have "
            "had it",
            _told(least),
            _told(most),
        )
    return dict(by_progress[0])


def _identity(state: Any) -> Any:
    """What must be alike."""
    try:
        _progress(state)
        if state["mode"] == "join":
            return _marks(state["members"])
        return {name: value for name, value in state.items() if name not in _OF_PLACE}
    except (TypeError, ValueError, LookupError, AttributeError):
        raise StateMismatch(f"reconcile takes states of a Conveyer or a Join as state() returns them; got {state!r:.200}") from None


def _marks(entries: list[Any]) -> list[Any]:
    """Of a Join's entries, or a member's, what says whose they are: their text, at every depth."""
    return [_marks(entry) if isinstance(entry, list) else entry for entry in entries if isinstance(entry, list | str)]


def _progress(state: Mapping[str, Any]) -> tuple[int, ...]:
    """(epoch, position), of a Join in draws; then what has been had of the block at the position, or of each member."""
    if state["mode"] != "join":
        return int(state["epoch"]), int(state["position"]), *map(int, state.get("counters", ()))
    _, epoch, *members = state["members"]
    return epoch, sum(count for count, _ in members)


def _told(progress: tuple[int, ...]) -> str:
    epoch, position, *counters = progress
    return f"position {position} of epoch {epoch}" + (f", counters {counters}" if counters else "")


class ItemStream(KeyedBatches):
    """The steps of one pipeline.

    Args:
        batch_size: items of a rank's batch; None: items come singly, and are only fetched together.
    """

    n, identity = 0, ""

    def __init__(self, source: Keys, batch_size: int | None) -> None:
        self.source, self.batch_size = source, batch_size
        self.n, self.identity = source.n, f"pipeline({source.identity})"
        self.rounds = 1  # of single items that are fetched together, from the next step that is ordered on
        self.rounds_at: dict[int, int] = {}  # of the steps that were ordered and not delivered, if more than one
        self.epoch = 0  # of a source that does not repeat: the one that is delivered

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> StreamSchedule:
        """Which of its items each rank is given."""
        return StreamSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Of one rank alone, as an ordinary batch sampler."""
        return -(-self.n // (self.batch_size or 1))

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        size = self.batch_size or 1
        return self.source.keys_at(number * size, min((number + 1) * size, self.n))


@dataclass(frozen=True)
class StreamSchedule(BatchSchedule):
    """Pure map (position, rank) -> keys."""

    order: Any  # a Stream

    @cached_property
    def stride(self) -> int:
        """Items of one step over all ranks."""
        return int(self.order.batch_size or 1) * self.world_size

    @property
    def rows_per_rank(self) -> int | None:
        size: int | None = self.order.batch_size
        return size

    @cached_property
    def is_endless(self) -> bool:
        return bool(self.order.source.repeating)

    @property
    def stream(self) -> dict[str, Any]:
        """For the header of an audit: what its keys and positions mean."""
        return {"members": self.order.source.members, "is_endless": self.is_endless}

    def number(self, step: int) -> int:
        """For a record of steps: their positions, which mean the same for every number of ranks."""
        return step

    def behind(self, step: int) -> int:
        """The step that follows one."""
        rounds: int = self.order.rounds_at.get(step, 1)
        return step + self.stride * rounds

    def end_of(self, epoch: int, rank: int) -> int:
        if not self.is_endless and epoch != self.order.epoch:
            return 0  # nothing is ordered ahead of a pipeline that may have come to its end
        return stream_end(None if self.is_endless else self.n, rank, uneven=self.uneven, stride=self.stride)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        if self.order.rounds > 1:
            self.order.rounds_at[step] = self.order.rounds
        else:
            self.order.rounds_at.pop(step, None)
        return self._keys(epoch, self.positions(step, rank))

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        source, size = self.order.source, self.order.batch_size
        left = most if self.is_endless else (self.n - step) // self.stride
        count, first = max(min(max(most, 1), left), 0), self._at(epoch, step)
        if self.world_size == 1:  # the steps lie end to end
            keys: NDArray[np.int64] = source.keys_at(first, first + count * size)
            return keys.reshape(count, size)
        out = np.empty((count, size), np.int64)
        for number, row in enumerate(out):
            start = first + number * self.stride + rank * size
            row[:] = source.keys_at(start, start + size)
        return out

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Of a rank's items at a step; at n and beyond, in a pipeline that does not repeat, stands padding."""
        return stream_positions(
            step,
            rank,
            n=None if self.is_endless else self.n,
            uneven=self.uneven,
            world_size=self.world_size,
            batch_size=self.order.batch_size,
            num_rounds=self.order.rounds_at.get(step, 1),
        )

    def position(self, step: int) -> int:
        """Items that all ranks have had before a step."""
        return step if self.is_endless else min(step, self.n)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        positions = self.positions(step, rank)
        return len(positions) if self.is_endless else int((positions < self.n).sum())

    def counters(self, epoch: int, step: int) -> Any:
        """What a resume needs besides its position: of a Join, what each member has had."""
        return self.order.source.counters_at(self._at(epoch, self.position(step))) or None

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The key so many places behind that of a row."""
        return int(self._keys(epoch, self.positions(step, rank)[row : row + 1] + distance)[0])

    def _at(self, epoch: int, position: int) -> int:
        """The position as the source counts."""
        return position if self.is_endless else epoch * self.n + position

    def _keys(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return np.empty(0, np.int64)
        source: Keys = self.order.source
        if not self.is_endless:
            positions = positions % self.n + epoch * self.n
        first, last = int(positions.min()), int(positions.max())
        if last - first < 64 * len(positions):
            return source.keys_at(first, last + 1)[positions - first]
        return np.concatenate([source.keys_at(at, at + 1) for at in positions.tolist()])  # padding, far from the rest


Outcome = tuple[Any, BaseException | None]


class NamedErrors(BadSamples):
    """What a loader does about bad samples; those that took too long or ended their worker are called by their items' names.

    Args:
        name: key -> the item, for people.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: NextIndex | None, name: Callable[[int], str]) -> None:
        super().__init__(on_error, max_bad, next_index)
        self._name = name

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        return super().replaced(order, bad, lambda: self.named(order, bad, error()))

    def named(self, order: Order, bad: Sequence[int], error: BaseException) -> BaseException:
        """The error with its items' names, if it lacks them: what functions raise has them."""
        if isinstance(error, SampleTimeout | WorkerDied):
            names = ", ".join(self._name(int(order.indices[row])) for row in bad)
            error.add_note(f"shmload: {names}; sample_timeout_s is the timeout of DistributedBatchedMap")
        return error


class ItemErrors(NamedErrors):
    """Leaves such items out of what is fetched together, and keeps their errors."""

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__("skip", None, None, name)
        self.of_step: dict[int, dict[int, BaseException]] = {}  # step -> row -> error

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        for row in bad:
            first_row = row if order.origins is None else order.origins[row][0]
            self.of_step.setdefault(order.step, {})[first_row] = self.named(order, [row], error())
        return super().replaced(order, bad, error)


def items_of(
    schedule: StreamSchedule, rank: int, step: int, items: list[Any], errors: Mapping[int, BaseException], lost: Exception | None
) -> Iterator[Outcome]:
    """The outcomes of a step's items, in order.

    Args:
        items: what came.
        errors: by row, of those that were left out.
        lost: why nothing came.
    """
    found = iter(items)
    for row in range(len(schedule.positions(step, rank))):
        item = None if row in errors else next(found, None)
        if isinstance(item, FailedItem):
            yield None, item.failure.exception()
        else:
            yield item, errors.get(row, lost)
    schedule.order.rounds_at.pop(step, None)


class RowProgram:
    """A dataset: key -> the item behind the pipeline's functions. What they raise has a note that names the item.

    Args:
        stages: the functions.
    """

    def __init__(self, source: Keys, stages: Sequence[Each]) -> None:
        self._source, self._stages = source, {stage.name: stage for stage in stages}  # by name: an error of pickling shows it

    def __len__(self) -> int:
        return self._source.n

    def __getitem__(self, key: int) -> Any:
        stage = None
        try:
            item = self._source.item(key)
            for stage in self._stages.values():  # what `through` does, without a call more for each item
                item = stage.function(item)
        except Exception as error:
            error = self._noted(error, stage, key)
            raise error
        return item

    def _noted(self, error: Exception, stage: Each | None, key: int) -> Exception:
        """An exception with a note of whose it is: a stage's, or the source's."""
        name = self._source.name(key)
        if stage is not None:
            return noted(error, stage, f", of {name}")
        if isinstance(error, StopIteration):  # of somebody's dataset: it would end the items
            error = no_end(error, "reading the source")
        error.add_note(f"shmload: {name}")
        return error


class InPlaceProgram(RowProgram):
    """One whose last function decodes straight into the row it is given."""

    def __init__(self, source: Keys, stages: Sequence[Each]) -> None:
        super().__init__(source, stages[:-1])
        self._last = stages[-1].name
        decoder: Any = stages[-1].function
        self._decoder = decoder
        self.schema = decoder.schema
        self.batch_type = getattr(decoder, "batch_type", None)

    def read_into(self, key: int, out: Any) -> None:
        """Decodes an item into a row."""
        last = Each(self._last, lambda item: self._decoder.read_into(item, out))
        through((last,), self[key], self._source.name, key)


class ItemProgram(RowProgram):
    """One whose items are made by workers and come singly: an item's exception is its own."""

    def __getitem__(self, key: int) -> Any:
        try:
            return super().__getitem__(key)
        except Exception as error:
            return FailedItem(Failure.of(error, IN_WORKER, ""))


@dataclass(frozen=True)
class Partition:
    """Each rank's own part of the items: disjoint, and together all of them.

    Ranks take turns, batch by batch behind a Collate and item by item without one, so that all have come equally far after equal
    steps. It may stand anywhere before Collate: what a rank does not deliver it does not load.

    Args:
        rank: of this process, from 0.
        n_ranks: how many processes share the items.
        uneven: what the last step of a pipeline that does not repeat does with less than a whole round: "pad" gives ranks without
            one of their own something from the epoch's start (`valid` says how many rows are real), "drop" leaves the rest out,
            "exact" lets the first ranks have more. A repeating pipeline has no last step.
    Raises:
        ValueError: `rank` is no rank of `n_ranks`, or `uneven` none of these words.
    """

    rank: int
    n_ranks: int
    _: KW_ONLY
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        set_whole(self, "Partition(n_ranks)", "n_ranks", 1, 1 << 31)
        set_whole(self, "Partition(rank)", "rank", 0, self.n_ranks - 1)
        if self.uneven not in ("pad", "drop", "exact"):
            raise ValueError(f'Partition(uneven) is "pad", "drop" or "exact"; got {self.uneven!r}')


@dataclass(frozen=True)
class Map:
    """A function of each item; behind Collate, of each batch, in the trainer.

    Before Collate it runs where items are loaded: in the workers of a DistributedBatchedMap, wherever in the pipeline that
    stands, or in the trainer if there is none.

    Args:
        fn: item -> item, or batch -> batch.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _check_function("Map(fn)", self.fn)


@dataclass(frozen=True)
class BatchMap:
    """A function of each batch, where batches are made: in the workers, if there are any. It follows Collate; Maps come behind it.

    What it draws at random is the batch's own: from `shmload.sample_rng()`, or from the global generators.

    Args:
        fn: batch -> batch; what Collate made, in memory that is its own.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _check_function("BatchMap(fn)", self.fn)


class BatchProgram:
    """Makes a batch of items, and applies functions to it."""

    def __init__(self, ragged: Any, stages: Sequence[Each]) -> None:
        self._ragged, self._stages = ragged_of(ragged, None, is_torch_mode=False), {stage.name: stage for stage in stages}

    def __call__(self, items: list[Any]) -> Any:
        return through(self._stages.values(), collated(items, self._ragged))


TIMEOUT_S = 60 * 60  # that one item may take in a worker, unless a stage says otherwise


@dataclass(frozen=True)
class DistributedBatchedMap:
    """A function of each item, run by worker processes ahead of need, in order.

    Args:
        mapping_fn: item -> value. What it draws at random is the item's own: from `shmload.sample_rng()`, or from the global
            generators of random, numpy and torch, which are seeded for each item. An object with `schema` and `read_into(item,
            out)` instead decodes straight into the batch, if it is the last before Collate (docs/own_format.md).
        n_workers: processes, for this rank. Several of these stages share one worker pool of all their processes.
        buffer_size: items loaded ahead; two batches of each worker always are. None: just these.
        timeout: seconds one item may take; then its worker is ended, and the error says where it was. None: for ever.
        in_order: False: items come as they are done, by blocks of the Conveyer's `block_size`, for uneven work: one that takes
            long holds up nobody. What they are is the same, a resume has exactly the rest. Of one rank only.
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    mapping_fn: Any
    n_workers: int
    buffer_size: int | None = None
    timeout: float | None = TIMEOUT_S
    _: KW_ONLY
    in_order: bool = True

    def __post_init__(self) -> None:
        if not is_decoder(self.mapping_fn):
            _check_function("DistributedBatchedMap(mapping_fn)", self.mapping_fn)
        set_whole(self, "DistributedBatchedMap(n_workers)", "n_workers", 1, MAX_WORKERS)
        check_flag("DistributedBatchedMap(in_order)", self.in_order)
        if self.buffer_size is not None:
            set_whole(self, "DistributedBatchedMap(buffer_size)", "buffer_size", 1, 1 << 31)
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and 0 < self.timeout < math.inf):
            raise ValueError(f"DistributedBatchedMap(timeout) is a number of seconds above 0 or None; got {self.timeout!r}")


@dataclass(frozen=True)
class Collate:
    """So many items as one batch: arrays and numbers stacked as tensors, in the slot, strings and what cannot be stacked as lists.

    Args:
        batch_size: items of one rank's batch.
        return_partial_batch: False leaves out a last batch that is shorter. A repeating pipeline has none: its batches go on
            across the ends of epochs.
        ragged: how fields come whose shapes differ from item to item: "list", "pad", "jagged", "nested", or by field
            (docs/samples.md).
    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    batch_size: int
    return_partial_batch: bool = True
    _: KW_ONLY
    ragged: Any = "list"

    def __post_init__(self) -> None:
        set_whole(self, "Collate(batch_size)", "batch_size", 1, 1 << 31)
        check_flag("Collate(return_partial_batch)", self.return_partial_batch)
        ragged_of(self.ragged, None, is_torch_mode=False)


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} is a function of one item; got {value!r}")


PREFETCHED = 2  # batches that each worker has ordered ahead, at the least


@dataclass(frozen=True)
class PoolOptions:
    """The workers that a pipeline's stages ask for, together."""

    num_workers: int = 0
    buffer_size: int | None = None
    timeout_s: float | None = None

    @classmethod
    def of(cls, stages: Sequence[DistributedBatchedMap], joined: Sequence[PoolOptions]) -> PoolOptions:
        """The worker pool for some stages, behind members of a Join: an item goes through one of these, and all stages."""
        joined = [pool for pool in joined if pool.num_workers]
        sizes = [one.buffer_size for one in stages] + [one.buffer_size for one in joined]
        known = [size for size in sizes if size is not None]
        times = [stage.timeout for stage in stages]
        if joined:
            longest = [pool.timeout_s for pool in joined]
            times.append(None if None in longest else max(time for time in longest if time is not None))
        return cls(
            num_workers=sum(stage.n_workers for stage in stages) + sum(pool.num_workers for pool in joined),
            buffer_size=sum(known) if known else None,
            timeout_s=None if None in times or not times else sum(time for time in times if time is not None),
        )

    def prefetch_factor(self, rows: int) -> int:
        """Batches of so many items that each worker has ordered ahead."""
        return max(PREFETCHED, -(-(self.buffer_size or 0) // (rows * self.num_workers)))


@dataclass(frozen=True)
class Plan:
    """A pipeline, compiled.

    Attributes:
        item_stages, batch_stages: the functions of items before Collate, of batches behind it.
    """

    source: Keys
    item_stages: list[Each]
    batch_stages: list[Each]
    partition: Partition
    collate: Collate | None
    pool: PoolOptions
    made_batches: list[Each]  # functions of batches where these are made
    tail: list[tuple[str, Any]]  # behind a Scan, in the trainer: it, and functions of an item
    is_in_order: bool = True

    @property
    def collate_fn(self) -> Any:
        """The loader's."""
        if self.collate is None:
            return list
        return BatchProgram(self.collate.ragged, self.made_batches) if self.made_batches else None

    @property
    def is_expanding(self) -> bool:
        """Whether its source's items are blocks of what comes."""
        return isinstance(self.source, BlockRow | StreamRow)

    @property
    def program(self) -> RowProgram:
        """The dataset that is read."""
        kind = RowProgram
        if self.collate is not None and not self.item_stages and not self.made_batches:
            from shmload.pipeline.in_place import Choice, ChosenProgram  # which is made of what is here

            if Choice.of(self.source) is not None:
                return ChosenProgram(self.source)
        is_decoded = self.item_stages and is_decoder(self.item_stages[-1].function)
        if self.collate is not None and is_decoded and not self.made_batches:
            kind = InPlaceProgram
        elif self.collate is None and self.pool.num_workers:
            kind = ItemProgram
        return kind(self.source, self.item_stages)

    @property
    def uneven(self) -> Any:
        """What the last step of a pipeline that does not repeat does."""
        is_whole = self.collate is not None and not self.collate.return_partial_batch
        return "drop" if is_whole else self.partition.uneven


def compose(stages: Sequence[Any], block_size: int = BLOCK) -> Plan:
    """Compiles stages in their order.

    Args:
        block_size: items that are expanded together, where stages make more or fewer of them.
    Raises:
        TypeError, ValueError: they make no pipeline; says which stage and why.
    """
    if not stages:
        raise ValueError(f"a pipeline begins with {_SOURCES}; got no stages")
    source, *rest = stages
    stream = source if isinstance(source, Stream) else None
    if stream is None and not _is_source(source):
        raise TypeError(f"a pipeline begins with {_SOURCES}; stage 0 is {_name(source)}")
    joined: list[PoolOptions] = []
    if hasattr(source, "as_source"):
        source = source.as_source()
        joined = list(source.pools)
    if source.n_workers:
        joined.append(PoolOptions(source.n_workers, None, TIMEOUT_S))
    of_items: list[Each] = []
    of_batches: list[Each] = []
    of_made: list[Each] = []
    partition: Partition | None = None
    collate: Collate | None = None
    is_bucketed = False
    expanding: list[tuple[str, Any]] = []  # from the first stage on that makes more or fewer items
    tail: list[tuple[str, Any]] = []
    pools: list[DistributedBatchedMap] = []
    for number, stage in enumerate(rest, 1):
        where, name = f"stage {number}, {_name(stage)},", f"stage {number} ({_name(stage)})"
        if _is_source(stage):
            raise ValueError(f"{where} gives items of its own, so it can only be the first")
        is_decoded = of_items and is_decoder(of_items[-1].function) and collate is None
        if is_decoded and (isinstance(stage, Map | DistributedBatchedMap | Scan | Expanding) or hasattr(stage, "over")):
            raise ValueError(f"{where} follows one that decodes into the batch (read_into): that must be the last before Collate")
        if isinstance(stage, Shuffle) and stage.buffer_size is not None:
            stage = BufferedShuffle(stage.buffer_size)
        if isinstance(stage, Map):
            if tail and collate is None:
                tail.append((name, Each(name, stage.fn)))
            elif (expanding or stream) and collate is None:
                expanding.append((name, Each(name, stage.fn)))
            else:
                (of_items if collate is None else of_batches).append(Each(name, stage.fn))
        elif tail and collate is None and not isinstance(stage, Scan | Partition | Collate):
            raise ValueError(
                f"{where} stands behind {tail[0][0]}, where only Scan, Map, Partition and Collate may: put it before that"
            )
        elif isinstance(stage, Scan) and collate is None:
            tail.append((name, stage))
        elif isinstance(stage, Expanding) and collate is None:
            if not expanding:
                source, of_items = Mapped(source, of_items) if of_items else source, []
            expanding.append((name, stage))
            if isinstance(stage, Bucket):
                collate, is_bucketed = Collate(1, ragged=stage.ragged), True
        elif hasattr(stage, "over") and collate is None and stream is not None and not expanding:
            stream = _over(stage, where, stream)
        elif hasattr(stage, "over") and collate is None:
            if expanding:
                raise ValueError(
                    f"{where} needs to know where each item stands, which is not known behind {expanding[0][0]}: put it before that"
                )
            if partition is not None:
                raise ValueError(f"{where} stands behind Partition: which items there are is settled before ranks share them")
            source, of_items = _over(stage, where, Mapped(source, of_items) if of_items else source), []
        elif collate is not None and (hasattr(stage, "over") or isinstance(stage, Expanding) or type(stage) in _NOT_BEHIND):
            raise ValueError(f"{where} stands behind Collate, where only Map may: {_NOT_BEHIND.get(type(stage), _NO_PLACES)}")
        elif isinstance(stage, DistributedBatchedMap):
            if (expanding or stream) and not callable(stage.mapping_fn):
                behind = expanding[0][0] if expanding else "a Stream"
                raise ValueError(f"{where} decodes into a batch's row (read_into), which is not known behind {behind}")
            each = Each(name, stage.mapping_fn)
            if expanding or stream:
                expanding.append((name, each))
            else:
                of_items.append(each)
            pools.append(stage)
        elif isinstance(stage, Partition):
            if partition is not None:
                raise ValueError(f"{where} is the second of its kind: items are shared out among ranks once")
            partition = stage
        elif isinstance(stage, Collate):
            collate = stage
        elif isinstance(stage, BatchMap):
            by_blocks = expanding or tail or stream
            if collate is None or of_batches or by_blocks:
                raise ValueError(f"{where} {_NO_WHOLE_BATCHES if by_blocks else _NO_BATCHES}")
            of_made.append(Each(name, stage.fn))
        else:
            raise TypeError(f"{where} is no stage: a function becomes one as Map(function)")
    if of_made and of_items and not callable(of_items[-1].function):
        raise ValueError(
            f"{of_made[0].name} follows items that are decoded into the batch's row (read_into): use Map, in the trainer"
        )
    if of_items and collate is None and not callable(of_items[-1].function):
        raise ValueError("a mapping_fn with read_into decodes into a batch's row: add Collate, or give a plain function")
    is_unordered = not all(stage.in_order for stage in pools)
    if is_unordered and (of_made or (of_items and not callable(of_items[-1].function))):
        raise ValueError("with in_order=False workers make blocks of items: leave out BatchMap, and a mapping_fn with read_into")
    if expanding or tail or stream or is_unordered:
        if of_items:  # no stage before made more or fewer items
            expanding, of_items = [(each.name, each) for each in of_items], []
        expansion = Expansion(expanding, None if tail else _finish_of(collate, is_bucketed), [stage for _, stage in tail])
        source = BlockRow(source, expansion, block_size) if stream is None else StreamRow(stream, expansion, block_size)
    pool = PoolOptions.of(pools, joined)
    return Plan(source, of_items, of_batches, partition or Partition(0, 1), collate, pool, of_made, tail, not is_unordered)


def _finish_of(collate: Collate | None, is_bucketed: bool) -> Any:
    """The form in which a block's items travel: what most of a batch's making lies in the workers by."""
    if collate is None:
        return None
    if is_bucketed:
        return Batches(collate.ragged)
    return columned if collate.ragged == "list" else None


def _over(stage: Any, where: str, source: Any) -> Any:
    """What a stage of places makes of a row."""
    try:
        made = source.with_step(stage) if isinstance(source, Stream) else stage.over(source)
    except ValueError as error:
        raise ValueError(f"{where} does not go with what it is given: {error}") from None
    return made


def _is_source(stage: Any) -> bool:
    return isinstance(stage, Keys) or hasattr(stage, "as_source")


_SOURCES = "a Range, a Permutation, Items, a Generate, a Stream, a Zip, a Chain, an Interleave or a Join"
_NO_BATCHES = "is a function of batches where they are made: it follows Collate, before any Map of whole batches"
_NO_WHOLE_BATCHES = (
    "needs batches that workers make whole, which run across blocks behind a stage that makes more or fewer items: use Map"
)
_NO_PLACES = "batches have no places of items; put it before Collate"

_NOT_BEHIND = {
    Partition: "whole batches are dealt to the ranks already; put it before Collate",
    DistributedBatchedMap: "workers make whole batches; put it before Collate",
    Collate: "a batch is no item",
}


def _name(stage: Any) -> str:
    return f"a {type(stage).__name__}"
