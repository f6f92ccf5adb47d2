"""Conveyer: a composed pipeline.

    stages ──compose──▶ a Plan ──engine_of──▶ an engine: batches, or items one by one

The engine reads and delivers the items, and keeps the position. `RunningPipeline` has the methods that a Join has, too. The
Conveyer adds copies, costs and statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shmload.pipeline.block_sequence import BLOCK
from shmload.pipeline.compose import compose
from shmload.pipeline.engines import engine_of
from shmload.pipeline.explain import Explanation, explained
from shmload.pipeline.pipeline_engine import PipelineEngine
from shmload.pipeline.running_pipeline import RunningPipeline
from shmload.pipeline.stage_names import as_methods, places_of
from shmload.schedule.permutation import MAX_N
from shmload.worker.stage_arguments import set_whole

OF_BATCHES = frozenset({"max_bad", "on_error"})
OPTIONS = OF_BATCHES | {"audit", "backend", "max_restarts", "multiprocessing_context", "pin_memory", "ring_bytes", "worker_init_fn"}


class Conveyer(RunningPipeline):
    """A pipeline of stages: `pipeline()` returns the next batch, or the next item if nothing collates.

    Equal stages deliver equal batches, on any number of workers and ranks, from any position. Iteration continues from the current
    position: without end if the source repeats, otherwise to the end of its epoch. Iterating again begins the next epoch. Arrays
    and tensors are in shared memory, and stay valid as long as anything refers to them.

    Args:
        stages: a source, then stages of items, then Collate or Bucket if you want batches, and functions of whole batches; or a
            pipeline made by methods. docs/pipelines.md has the grammar.
        block_size: number of items expanded together, if a stage makes more or fewer items (Filter, FlatMap, Pack, ...). It is
            part of the pipeline's identity, and the most that a resume reads again.
        options: some of ShmLoader's arguments: audit, backend, max_bad, max_restarts, multiprocessing_context, on_error,
            pin_memory, ring_bytes, worker_init_fn.

    Attributes:
        is_endless: whether the source repeats.
        has_equal_ranks: whether every rank receives as much as any other.

    Raises:
        TypeError, ValueError: the stages do not make a pipeline, or the options are unknown.
    Example:
        >>> from shmload.pipeline import Collate, Conveyer, Map, Permutation
        >>> stages = [Permutation(10, seed=7), Map(lambda i: {"i": i}), Collate(5)]
        >>> with Conveyer(stages) as pipeline:
        ...     batches = [pipeline()["i"], pipeline()["i"]]
        >>> sorted(int(i) for batch in batches for i in batch)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    engine: PipelineEngine

    def __init__(self, stages: Sequence[Any], *, block_size: int = BLOCK, **options: Any) -> None:
        self.stages = _stages_of(stages)
        self.block_size, self.options = block_size, options
        set_whole(self, "Conveyer(block_size)", "block_size", 1, MAX_N)
        self.plan = plan = compose(self.stages, self.block_size)
        self._check_options()
        self.is_endless = plan.source.repeating
        self.has_equal_ranks = self.is_endless or plan.partition.n_ranks == 1 or plan.uneven != "exact"
        super().__init__(engine_of(plan, options, places_of(self.stages, plan)))

    def _check_options(self) -> None:
        names = self.options.keys()
        if unknown := sorted(names - OPTIONS):
            raise TypeError(f"Conveyer takes of ShmLoader's arguments {', '.join(sorted(OPTIONS))}; got {', '.join(unknown)}")
        backend = self.options.get("backend", "process")
        if self.plan.pool.num_workers == 0 and backend not in ("process", "auto"):
            raise ValueError(
                f"backend={backend!r} needs a stage with workers, such as map(fn, workers=2) or DistributedBatchedMap(fn, 2): "
                "without one, the trainer makes the items"
            )
        if self.plan.collate is None and (misplaced := sorted(names & OF_BATCHES)):
            raise ValueError(
                f"{', '.join(misplaced)} is for batches: a single item that fails raises at its turn, and the next call "
                "continues after it; catch that, or add Collate"
            )
        if self.plan.is_expanding and (misplaced := sorted(names & {*OF_BATCHES, "audit"})):
            raise ValueError(
                f"{', '.join(misplaced)}: workers make blocks of items here, and not the batches that this is for: leave it out "
                "after a stage that makes more or fewer items"
            )

    def __repr__(self) -> str:
        return f"Conveyer({as_methods(self.stages)})"

    @property
    def valid(self) -> int | None:
        """Return the number of rows of the last batch that are not padding; 1 or 0 for a single item, None before the first one."""
        return self.engine.valid

    def __getstate__(self) -> dict[str, Any]:
        """Return the stages and the position. A copy has no workers and no fetched items."""
        options = {**self.options, "block_size": self.block_size}
        return {"stages": self.stages, "options": options, "place": self.engine.place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], **state["options"])  # type: ignore[misc]
        if state["place"] != self.engine.place:
            self.engine.go(state["place"])

    # ------------------------------------------------------------ costs and workers

    def explain(self, *, items: int = 256, seconds: float = 1.0) -> Explanation:
        """Explain what each stage costs, where it runs, and what the bottleneck is.

        Some items are made in this process, from the current position, without workers. If the pipeline runs, its waits are
        counted as well. The position and the global random generators stay unchanged. The stages' functions are called, with all
        their side effects.

        Args:
            items: number of items to make; at least one batch is made.
            seconds: stop after this time, even with fewer items. One item is always finished, however long it takes.
        Returns:
            figures of this process and moment; `str()` of it is a table.
        Raises:
            ValueError: `items` or `seconds` is not positive.
        """
        if not (items > 0 and seconds > 0):
            raise ValueError(f"explain needs items and seconds above 0; got items={items}, seconds={seconds}")
        return explained(self.stages, self.block_size, self.engine, self.stats(), items=items, seconds=seconds)

    def stats(self) -> dict[str, Any]:
        """Return ShmLoader's stats() of the loader that runs the pipeline; empty before the first item."""
        return self.engine.stats()


def _stages_of(given: Any) -> list[Any]:
    """Return the stages of a list, or of a pipeline made by methods.

    Raises:
        TypeError: it is neither of these.
    """
    if isinstance(given, Conveyer) or not isinstance(given, Iterable):  # iterating a Conveyer would read its items, without end
        raise TypeError(f"Conveyer takes a list of stages, or a pipeline as methods make it; got {type(given).__name__}")
    return list(getattr(given, "stages", given))
