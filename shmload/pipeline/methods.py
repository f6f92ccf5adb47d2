"""Pipelines as methods: `Items(files).map(read, workers=2).filter(is_good).batch(32)` is the list of these stages.

    for batch in Items(files).map(read, workers=2).batch(32): ...                one epoch
    with Items(files).map(read, workers=2).batch(32).conveyer() as batches:      with a position: state(), load_state()

Zip, Chain and Interleave are here because methods make them, and they have these methods themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shmload.batch.ragged import AS_TORCH_OR_LIST
from shmload.pipeline.async_map import AsyncMap
from shmload.pipeline.buckets import Bucket
from shmload.pipeline.caching import Cache
from shmload.pipeline.combined_sequences import Chained, Interleaved, Zipped
from shmload.pipeline.conveyer import Conveyer
from shmload.pipeline.explain import Explanation
from shmload.pipeline.item_sequence import ItemSequence, Mapped
from shmload.pipeline.member_plans import plans_of
from shmload.pipeline.packing import Pack
from shmload.pipeline.position_stages import Enumerate, Repeat, Shuffle, Skip, Take, Window
from shmload.pipeline.scan import Scan
from shmload.pipeline.stage_names import as_methods
from shmload.pipeline.stages import BatchMap, Collate, DistributedBatchedMap, Map, Partition
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.permutation import MAX_N
from shmload.worker.item_stages import Filter, FlatMap
from shmload.worker.stage_arguments import set_whole

_OF_CONVEYER = frozenset(
    {"state", "load_state", "set_state", "state_dict", "load_state_dict", "begin_next_epoch", "is_ended", "stats", "valid", "close"}
)
_OF_WORKERS = frozenset({"buffer_size", "timeout", "in_order"})


class Fluent:
    """Base of sources and pipelines: each method returns a pipeline with one more stage, and leaves this one unchanged.

    Iterating it delivers one epoch, from its start, in this process and the workers that its stages request. Each iteration is the
    next epoch, in another order if something shuffles; with a source that repeats, each is the same and has no end.
    """

    @property
    def stages(self) -> tuple[Any, ...]:
        """Return the stages, for a Conveyer."""
        return (self,)

    def _then(self, stage: Any) -> Pipeline:
        return Pipeline((*self.stages, stage))

    def conveyer(self, **options: Any) -> Conveyer:
        """Return the Conveyer of these stages.

        Args:
            options: as for Conveyer.
        """
        return Conveyer(self.stages, **options)

    def explain(self, *, items: int = 256, seconds: float = 1.0) -> Explanation:
        """Explain what each stage costs, where it runs, and what the bottleneck is: see `Conveyer.explain`.

        Args:
            items: number of items to make; at least one batch is made.
            seconds: stop after this time, even with fewer items.
        """
        with self.conveyer() as pipeline:
            return pipeline.explain(items=items, seconds=seconds)

    def __iter__(self) -> Iterator[Any]:
        epoch = vars(self).get("_next_epoch", 0)
        object.__setattr__(self, "_next_epoch", epoch + 1)  # sources are frozen
        with self.conveyer() as pipeline:
            if epoch and not pipeline.engine.is_endless:
                pipeline.engine.restart(epoch)
            yield from pipeline

    def __len__(self) -> int:
        """Return the number of batches, or items, of this rank in one epoch; see `Conveyer`."""
        with self.conveyer() as pipeline:
            return len(pipeline)

    def __bool__(self) -> bool:
        """Return True: a pipeline without items is not nothing, and the number of items may not be known."""
        return True

    def __repr__(self) -> str:
        return as_methods(self.stages)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, which for a method of a Conveyer says how to get one."""
        why = ""
        if name in _OF_CONVEYER:
            why = (
                f": each iteration begins anew, so only a Conveyer has a position. Give `with pipeline.conveyer() as batches:`, "
                f"iterate `batches`, and call `batches.{name}`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}", name=name, obj=self)

    def map(self, fn: Callable[[Any], Any], *, workers: int = 0, **options: Any) -> Pipeline:
        """Add `Map(fn)`, or with workers `DistributedBatchedMap(fn, workers, **options)`. After `batch`, `fn` gets whole batches.

        Raises:
            TypeError: there are options for workers, but no workers; or unknown options.
        """
        if unknown := sorted(options.keys() - _OF_WORKERS):
            valid = ", ".join(sorted(_OF_WORKERS))
            raise TypeError(f"map() has no argument {unknown[0]!r}: it takes workers=, a number of processes, and with it {valid}")
        if options and not workers:
            raise TypeError(f"map({', '.join(options)}) needs workers: also give their number, as in map(fn, workers=2)")
        return self._then(DistributedBatchedMap(fn, workers, **options) if workers else Map(fn))

    def filter(self, fn: Callable[[Any], Any]) -> Pipeline:
        """Add `Filter(fn)`."""
        return self._then(Filter(fn))

    def flat_map(self, fn: Callable[[Any], Iterable[Any]]) -> Pipeline:
        """Add `FlatMap(fn)`."""
        return self._then(FlatMap(fn))

    def async_map(self, fn: Callable[[Any], Any], in_flight: int = 16) -> Pipeline:
        """Add `AsyncMap(fn, in_flight)`."""
        return self._then(AsyncMap(fn, in_flight))

    def scan(self, fn: Callable[[Any, Any], tuple[Any, Any]], initial: Any = None) -> Pipeline:
        """Add `Scan(fn, initial)`."""
        return self._then(Scan(fn, initial))

    def take(self, n: int) -> Pipeline:
        """Add `Take(n)`."""
        return self._then(Take(n))

    def skip(self, n: int) -> Pipeline:
        """Add `Skip(n)`."""
        return self._then(Skip(n))

    def repeat(self, times: int | None = None) -> Pipeline:
        """Add `Repeat(times)`."""
        return self._then(Repeat(times))

    def enumerate(self, start: int = 0) -> Pipeline:
        """Add `Enumerate(start)`."""
        return self._then(Enumerate(start))

    def window(self, size: int, step: int = 1) -> Pipeline:
        """Add `Window(size, step)`."""
        return self._then(Window(size, step))

    def shuffle(self, seed: int | None = None, *, buffer_size: int | None = None) -> Pipeline:
        """Add `Shuffle(seed, buffer_size=...)`."""
        return self._then(Shuffle(seed, buffer_size=buffer_size))

    def pack(self, window: int, **options: Any) -> Pipeline:
        """Add `Pack(window, **options)`."""
        return self._then(Pack(window, **options))

    def zip(self, *others: Any) -> Pipeline:
        """Return `Zip(self, *others)` as a pipeline."""
        return Pipeline((Zip(self, *others),))

    def chain(self, *others: Any) -> Pipeline:
        """Return `Chain(self, *others)` as a pipeline."""
        stages = self.stages
        before = stages[0].members if len(stages) == 1 and type(stages[0]) is Chain else (self,)  # chains of chains are one
        return Pipeline((Chain(*before, *others),))

    def interleave(self, *others: Any, block_length: int = 1) -> Pipeline:
        """Return `Interleave(self, *others, block_length=block_length)` as a pipeline."""
        return Pipeline((Interleave(self, *others, block_length=block_length),))

    def bucket(
        self, length: Callable[[Any], int], boundaries: Sequence[int], batch_size: int | None = None, **options: Any
    ) -> Pipeline:
        """Add `Bucket(length, boundaries, batch_size, **options)`."""
        return self._then(Bucket(length, boundaries, batch_size, **options))

    def cache(self, folder: Any = None, *, version: str = "") -> Pipeline:
        """Add `Cache(folder, version)`."""
        return self._then(Cache(folder, version))

    def map_batches(self, fn: Callable[[Any], Any]) -> Pipeline:
        """Add `BatchMap(fn)`, after `batch`."""
        return self._then(BatchMap(fn))

    def partition(self, rank: int, n_ranks: int, *, uneven: Uneven = "pad") -> Pipeline:
        """Add `Partition(rank, n_ranks, uneven=uneven)`."""
        return self._then(Partition(rank, n_ranks, uneven=uneven))

    def batch(
        self, batch_size: int, return_partial_batch: bool = True, *, ragged: Any = AS_TORCH_OR_LIST, **unknown: Any
    ) -> Pipeline:
        """Add `Collate(batch_size, return_partial_batch, ragged=ragged)`.

        Args:
            batch_size, return_partial_batch, ragged: see `Collate`.
            unknown: refused; the error for `drop_last` says what to give in its place.
        Raises:
            TypeError: there are other arguments.
        """
        if "drop_last" in unknown:
            raise TypeError(f"batch() has no argument 'drop_last': give return_partial_batch={not unknown['drop_last']}")
        if unknown:
            raise TypeError(f"batch() has no argument {min(unknown)!r}: it takes batch_size, return_partial_batch and ragged")
        return self._then(Collate(batch_size, return_partial_batch, ragged=ragged))


class Pipeline(Fluent):
    """A list of stages.

    Args:
        stages: as for Conveyer, which checks them.
    """

    def __init__(self, stages: Iterable[Any]) -> None:
        self._stages = tuple(stages)

    @property
    def stages(self) -> tuple[Any, ...]:
        return self._stages


class Combined(Fluent):
    """Several pipelines as one source of single items, which reads each member at any position."""

    def __init__(self, *members: Any) -> None:
        name = type(self).__name__
        if not members:
            raise ValueError(f"{name} needs at least one member; got none")
        self.members = members

    def _made(self, sequences: list[ItemSequence]) -> ItemSequence:
        """Return the sequence made of the members' sequences."""
        raise NotImplementedError

    def as_source(self) -> ItemSequence:
        """Return the combined sequence, for the first stage of a pipeline, with the workers that the members request.

        Raises:
            TypeError, ValueError: a member is not a pipeline of single items.
        """
        name = type(self).__name__
        for number, member in enumerate(self.members):
            if not isinstance(member, Conveyer | Fluent | list | tuple):
                raise TypeError(
                    f"member {number} of the {name} is a Conveyer, a source or a list of stages; got {type(member).__name__}"
                )
        plans = plans_of(self.members, name)
        sequences: list[ItemSequence] = [
            Mapped(plan.source, [replace(stage, name=f"{stage.name} of member {number}") for stage in plan.item_stages])
            for number, plan in enumerate(plans)
        ]
        source = self._made(sequences)
        source.pools = [plan.pool for plan in plans]
        return source


class Zip(Combined):
    """A source of tuples of its members' items, epoch by epoch, up to the end of the shortest.

    Args:
        members: Conveyers, sources or lists of stages, of single items. A repeating member is not restarted by an epoch of the Zip.
    Raises:
        TypeError, ValueError: a member is not a pipeline of single items.
    Example:
        >>> from shmload.pipeline import Conveyer, Items, Range, Zip
        >>> with Conveyer([Zip(Items("abc"), Range(10))]) as pairs:
        ...     list(pairs)
        [('a', 0), ('b', 1), ('c', 2)]
    """

    def _made(self, sequences: list[ItemSequence]) -> ItemSequence:
        return Zipped(sequences)


class Chain(Combined):
    """A source that concatenates the epochs of its members.

    Args:
        members: see Zip; only the last may repeat.
    Raises:
        TypeError, ValueError: a member is not a pipeline of single items.
    """

    def _made(self, sequences: list[ItemSequence]) -> ItemSequence:
        return Chained(sequences)


class Interleave(Combined):
    """A source that takes items of each member in turn, up to the end of the longest. See Join for weights.

    Args:
        members: see Zip; either all of them repeat, or none does.
        block_length: items of each member at a time.
    Raises:
        TypeError, ValueError: a member is not a pipeline of single items.
    """

    def __init__(self, *members: Any, block_length: int = 1) -> None:
        super().__init__(*members)
        self.block_length = block_length
        set_whole(self, "Interleave(block_length)", "block_length", 1, MAX_N)

    def _made(self, sequences: list[ItemSequence]) -> ItemSequence:
        return Interleaved(sequences, self.block_length)
