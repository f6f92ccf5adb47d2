"""Program: the stages of a RemoteDataset, and what is known about its items before any sample is read.

A *unit* is the samples from which one item is made (schedule/units.py). After `shuffle`, the number of items is known, but not
their order. After `select`, `unbatched` and `then`, neither is known.

The stages Batching, Slicing and Piping do not exist in `shmload.pipeline`, because a pipeline promises more: its Collate makes
tensors in shared memory, Take and Skip know the position of every item, and a generator over a whole pass could not resume from a
block.

`repetitions` and `limit` are numbers, not stages like a pipeline's Repeat and Take, because they count the items of all workers of
a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from shmload.schedule.units import Units
from shmload.worker.failure import stop_iteration_error
from shmload.worker.item_stages import BufferedShuffle
from shmload.worker.stage_engine import DROP, PASS_END, Each, Expanding, Handler, StageContext, group_stages, run_stages


class SampleOrigin(NamedTuple):
    """The sample from which an item was made.

    Attributes:
        is_batch: the sample is the first one of a batch.
    """

    url: Any
    key: Any
    is_batch: bool = False


class SampleContext(StageContext):
    """The context that the stages of a pass share: the sample that is being processed, for errors.

    Attributes:
        origin: the sample; None if it is unknown, as for items made by the user's generator.
    """

    origin: SampleOrigin | None = None

    def failed(self, error: Exception, stage: str, handler: Handler | None = None) -> Any:
        if isinstance(error, StopIteration):  # raised as it is, it would silently end the pass
            of_sample = "" if self.origin is None else f" at sample {self.origin.key!r}"
            error = stop_iteration_error(error, f"the function of {stage}{of_sample}")
        error = _located(error, stage, self.origin)
        if handler is None:
            raise error
        return DROP if handler(error) else PASS_END

    def placed(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items, and set `origin` to each item's own key and URL before it is yielded, or to None if it has none."""
        for item in items:
            is_named = isinstance(item, Mapping) and "__key__" in item and "__url__" in item
            self.origin = SampleOrigin(item["__url__"], item["__key__"]) if is_named else None
            yield item


def _located(error: Exception, stage: str, origin: SampleOrigin | None) -> Exception:
    """Return the error of a stage after adding the sample to it: to its message if that is its only argument, else in a note."""
    if origin is None:
        return error
    if str(origin.url) in str(error) and repr(origin.key) in str(error):
        return error
    where = f"{origin.url}: {'the batch that begins with sample' if origin.is_batch else 'sample'} {origin.key!r}"
    before = error.args
    if len(before) == 1 and before[0] == str(error):
        text = before[0] if before[0].startswith(f"{stage}:") else f"{stage}: {before[0]}"
        error.args = (f"{where}: {text}",)
        if str(error) == error.args[0]:
            return error
        error.args = before
    error.add_note(f"shmload: {stage}, of {where}")
    return error


@dataclass(frozen=True)
class Batching(Expanding):
    """Batches of `size` items, made by a function of the list of items; None yields the list."""

    size: int
    collation_fn: Callable[[list[Any]], Any] | None
    partial: bool

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        while held := list(islice(items, 1)):
            origin: SampleOrigin | None = context.origin
            held += islice(items, self.size - 1)
            if len(held) < self.size and not self.partial:
                continue
            context.origin = None if origin is None else origin._replace(is_batch=True)
            try:
                made = held if self.collation_fn is None else self.collation_fn(held)
            except Exception as error:
                made = context.failed(error, name)
            yield made


@dataclass(frozen=True)
class Slicing(Expanding):
    """A slice of each worker's items. Used if the position of items in the whole pass is unknown before they are read."""

    start: int
    stop: int | None
    step: int

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        return islice(items, self.start, self.stop, self.step)


@dataclass(frozen=True)
class Piping(Expanding):
    """A user's function of the iterator of items. It may make one item of several, so `origin` is read from the items it yields."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        assert isinstance(context, SampleContext)
        return context.placed(self.function(items, *self.args, **self.kwargs))


_NO_LEVELS = Units()


@dataclass(frozen=True)
class Program:
    """The stages of a RemoteDataset, and what is known about its items. Immutable.

    Attributes:
        stages: pairs of name and stage.
        units: which samples make up the items, as far as that is known.
        known: "units" if the k-th item is the k-th unit; "number" if there are as many items as units; else "nothing".
        unknown: the stage after which less is known.
        repetitions: number of epochs in a pass; None for no end.
        limit: number of items of a pass; None for all.
        length: the value of len(), if it is given.
    """

    stages: tuple[tuple[str, Each | Expanding], ...] = ()
    units: Units = _NO_LEVELS
    known: Literal["units", "number", "nothing"] = "units"
    unknown: str = ""
    repetitions: int | None = 1
    limit: int | None = None
    length: int | None = None

    def then(self, name: str, stage: Each | Expanding) -> Program:
        """Return the program with one more stage."""
        return replace(self, stages=(*self.stages, (name, stage)))

    def ended_by(self, name: str) -> Program:
        """Return the program after a stage that makes the number of items unknown."""
        return self if self.known == "nothing" else replace(self, known="nothing", unknown=name)

    def count(self, num_samples: int) -> int:
        """Return the number of items of a pass over `num_samples` samples.

        Raises:
            TypeError: it is unknown.
        """
        if self.length is not None:
            return self.length
        if self.limit is not None:
            return self.limit
        if self.repetitions is None:
            raise TypeError("a dataset with repeat() has no end, so it has no len(): give repeat a number, or call with_epoch(n)")
        if self.known == "nothing":
            raise TypeError(
                f"the number of items after {self.unknown} is not known before they are read: set it by with_length(n), or limit "
                "a pass by with_epoch(n)"
            )
        return self.repetitions * self.units.count(num_samples)

    def run(self, samples: Iterator[Any], seed: int) -> Iterator[Any]:
        """Yield the items that the stages make of samples.

        Args:
            samples: the samples of a worker's units.
            seed: seed of the stages' random numbers in this worker and epoch.
        """
        seeded = (
            (name, replace(stage, seed=seed + number) if isinstance(stage, BufferedShuffle) else stage)
            for number, (name, stage) in enumerate(self.stages)
        )
        context = SampleContext()
        return run_stages(context.placed(samples), group_stages(seeded), context)
