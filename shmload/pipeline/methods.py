"""Pipelines as methods: `Items(files).map(read, workers=2).filter(is_good).batch(32)` is the list of these stages.

for batch in Items(files).map(read, workers=2).batch(32): ...          an epoch
with Items(files).map(read, workers=2).batch(32).conveyer() as batches:      with its position: state(), load_state()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmload.pipeline.conveyer import Conveyer
    from shmload.pipeline.explain import Explanation
    from shmload.schedule.any_schedule import Uneven


def _stage(name: str, *arguments: Any, **options: Any) -> Any:
    from shmload import pipeline  # which is made of what this is a part of

    return getattr(pipeline, name)(*arguments, **options)


class Fluent:
    """What sources and pipelines have in common: each method gives a pipeline with one more stage, and leaves this one as it is.

    Iterating is one epoch of it, from the start, in this process and the workers that its stages ask for.
    """

    @property
    def stages(self) -> tuple[Any, ...]:
        """What a Conveyer is made of."""
        return (self,)

    def _then(self, stage: Any) -> Pipeline:
        return Pipeline((*self.stages, stage))

    def conveyer(self, **options: Any) -> Conveyer:
        """The Conveyer of these stages.

        Args:
            options: as of Conveyer.
        """
        made: Conveyer = _stage("Conveyer", self.stages, **options)
        return made

    def explain(self, *, items: int = 256, seconds: float = 1.0) -> Explanation:
        """What each stage takes, where it runs, and what bounds the pipeline: `Conveyer.explain`.

        Args:
            items: so many are made, or a batch at least.
            seconds: or as many as can be in this time.
        """
        with self.conveyer() as pipeline:
            return pipeline.explain(items=items, seconds=seconds)

    def __iter__(self) -> Iterator[Any]:
        with self.conveyer() as pipeline:
            yield from pipeline

    def map(self, fn: Callable[[Any], Any], *, workers: int = 0, **options: Any) -> Pipeline:
        """`Map(fn)`, or with workers `DistributedBatchedMap(fn, workers, **options)`; behind `batch` one of whole batches.

        Raises:
            TypeError: there are options, and no workers, which they are for.
        """
        if options and not workers:
            raise TypeError(f"map({', '.join(options)}) is for workers: give their number, workers=2")
        return self._then(_stage("DistributedBatchedMap", fn, workers, **options) if workers else _stage("Map", fn))

    def filter(self, fn: Callable[[Any], Any]) -> Pipeline:
        """`Filter(fn)`."""
        return self._then(_stage("Filter", fn))

    def flat_map(self, fn: Callable[[Any], Iterable[Any]]) -> Pipeline:
        """`FlatMap(fn)`."""
        return self._then(_stage("FlatMap", fn))

    def scan(self, fn: Callable[[Any, Any], tuple[Any, Any]], initial: Any = None) -> Pipeline:
        """`Scan(fn, initial)`."""
        return self._then(_stage("Scan", fn, initial))

    def take(self, n: int) -> Pipeline:
        """`Take(n)`."""
        return self._then(_stage("Take", n))

    def skip(self, n: int) -> Pipeline:
        """`Skip(n)`."""
        return self._then(_stage("Skip", n))

    def repeat(self, times: int | None = None) -> Pipeline:
        """`Repeat(times)`."""
        return self._then(_stage("Repeat", times))

    def enumerate(self, start: int = 0) -> Pipeline:
        """`Enumerate(start)`."""
        return self._then(_stage("Enumerate", start))

    def window(self, size: int, step: int = 1) -> Pipeline:
        """`Window(size, step)`."""
        return self._then(_stage("Window", size, step))

    def shuffle(self, seed: int | None = None, *, buffer_size: int | None = None) -> Pipeline:
        """`Shuffle(seed, buffer_size=...)`."""
        return self._then(_stage("Shuffle", seed, buffer_size=buffer_size))

    def pack(self, window: int, **options: Any) -> Pipeline:
        """`Pack(window, **options)`."""
        return self._then(_stage("Pack", window, **options))

    def zip(self, *others: Any) -> Pipeline:
        """`Zip(self, *others)`."""
        return Pipeline((_stage("Zip", self, *others),))

    def chain(self, *others: Any) -> Pipeline:
        """`Chain(self, *others)`."""
        return Pipeline((_stage("Chain", self, *others),))

    def interleave(self, *others: Any, block_length: int = 1) -> Pipeline:
        """`Interleave(self, *others, block_length=block_length)`."""
        return Pipeline((_stage("Interleave", self, *others, block_length=block_length),))

    def bucket(
        self, length: Callable[[Any], int], boundaries: Sequence[int], batch_size: int | None = None, **options: Any
    ) -> Pipeline:
        """`Bucket(length, boundaries, batch_size, **options)`."""
        return self._then(_stage("Bucket", length, boundaries, batch_size, **options))

    def cache(self, folder: Any = None, *, version: str = "") -> Pipeline:
        """`Cache(folder, version)`."""
        return self._then(_stage("Cache", folder, version))

    def map_batches(self, fn: Callable[[Any], Any]) -> Pipeline:
        """`BatchMap(fn)`, behind `batch`."""
        return self._then(_stage("BatchMap", fn))

    def partition(self, rank: int, n_ranks: int, *, uneven: Uneven = "pad") -> Pipeline:
        """`Partition(rank, n_ranks, uneven=uneven)`."""
        return self._then(_stage("Partition", rank, n_ranks, uneven=uneven))

    def batch(self, batch_size: int, return_partial_batch: bool = True, *, ragged: Any = "list") -> Pipeline:
        """`Collate(batch_size, return_partial_batch, ragged=ragged)`."""
        return self._then(_stage("Collate", batch_size, return_partial_batch, ragged=ragged))


class Pipeline(Fluent):
    """Stages in a row.

    Args:
        stages: as of Conveyer, which says what makes no pipeline.
    """

    def __init__(self, stages: Iterable[Any]) -> None:
        self._stages = tuple(stages)

    @property
    def stages(self) -> tuple[Any, ...]:
        return self._stages

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(map(repr, self._stages))})"
