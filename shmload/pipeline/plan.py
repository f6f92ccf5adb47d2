"""The grammar of pipelines, and what one comes to: where keys come from, what is done with an item, what with a batch.

pipeline  =  source  { Map | DistributedBatchedMap | Partition }  [ Collate  { Map } ]
source    =  Range | Permutation | Join of pipelines without Collate and Partition
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shmload.pipeline.program import InPlaceProgram, ItemProgram, RowProgram
from shmload.pipeline.stages import Collate, DistributedBatchedMap, Map, Partition, Source
from shmload.pipeline.stream import Keys

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
        functions, batch_functions: of items before Collate, of batches behind it.
        names, batch_names: what their stages are called, for people.
    """

    source: Keys
    functions: tuple[Any, ...]
    names: tuple[str, ...]
    batch_functions: tuple[Callable[[Any], Any], ...]
    batch_names: tuple[str, ...]
    partition: Partition
    collate: Collate | None
    pool: PoolOptions

    @property
    def program(self) -> RowProgram:
        """The dataset that is read."""
        if self.collate is None:
            return (ItemProgram if self.pool.num_workers else RowProgram)(self.source, self.functions, self.names)
        *before, last = self.functions or (None,)
        if hasattr(last, "read_into"):
            return InPlaceProgram(self.source, before, self.names, last)
        return RowProgram(self.source, self.functions, self.names)

    @property
    def uneven(self) -> Any:
        """What the last step of a pipeline that does not repeat does."""
        is_whole = self.collate is not None and not self.collate.return_partial_batch
        return "drop" if is_whole else self.partition.uneven


def compose(stages: Sequence[Any]) -> Plan:
    """Compiles stages in their order.

    Raises:
        TypeError, ValueError: they make no pipeline; says which stage and why.
    """
    if not stages:
        raise ValueError("a pipeline begins with a Range, a Permutation or a Join; got no stages")
    source, *rest = stages
    if not _is_source(source):
        raise TypeError(f"a pipeline begins with a Range, a Permutation or a Join; stage 0 is {_name(source)}")
    joined: list[PoolOptions] = []
    if hasattr(source, "as_source"):
        source = source.as_source()
        joined = source.pools
    functions: list[Any] = []
    batch_functions: list[Callable[[Any], Any]] = []
    names: list[str] = []
    batch_names: list[str] = []
    partition: Partition | None = None
    collate: Collate | None = None
    pools: list[DistributedBatchedMap] = []
    for number, stage in enumerate(rest, 1):
        where = f"stage {number}, {_name(stage)},"
        if _is_source(stage):
            raise ValueError(f"{where} gives items of its own, so it can only be the first")
        is_decoded = functions and hasattr(functions[-1], "read_into") and collate is None
        if is_decoded and isinstance(stage, Map | DistributedBatchedMap):
            raise ValueError(
                f"{where} follows one that decodes into the batch (read_into): that must be the last before Collate"
            )
        if isinstance(stage, Map | DistributedBatchedMap):
            (names if collate is None else batch_names).append(where.removesuffix(","))
        if isinstance(stage, Map):
            (functions if collate is None else batch_functions).append(stage.fn)
        elif isinstance(stage, DistributedBatchedMap | Partition | Collate) and collate is not None:
            raise ValueError(f"{where} stands behind Collate, where only Map may: {_why_not_behind(stage)}")
        elif isinstance(stage, DistributedBatchedMap):
            functions.append(stage.mapping_fn)
            pools.append(stage)
        elif isinstance(stage, Partition):
            if partition is not None:
                raise ValueError(f"{where} is the second of its kind: items are shared out among ranks once")
            partition = stage
        elif isinstance(stage, Collate):
            collate = stage
        else:
            raise TypeError(f"{where} is no stage: a function becomes one as Map(function)")
    if functions and collate is None and not callable(functions[-1]):
        raise ValueError(
            "a mapping_fn with read_into decodes into a batch's row: add Collate, or give a plain function"
        )
    return Plan(
        source,
        tuple(functions),
        tuple(names),
        tuple(batch_functions),
        tuple(batch_names),
        partition or Partition(0, 1),
        collate,
        PoolOptions.of(pools, joined),
    )


def check_travels(stages: Sequence[Any], start_method: str, where: str = "") -> None:
    """Returns if workers that are not forked can be sent what they run.

    Raises:
        ValueError: a stage does not pickle; says which.
    """
    for number, stage in enumerate(stages):
        if isinstance(stage, Collate):
            return  # what follows runs in the trainer
        for member, pipeline in enumerate(stage.members if hasattr(stage, "as_source") else ()):
            inner = getattr(pipeline, "stages", [pipeline])  # a Join in a Join is its own only stage
            check_travels(inner, start_method, f" of member {member}{where}")
        if isinstance(stage, Map | DistributedBatchedMap):
            try:
                pickle.dumps(stage)
            except Exception as error:
                raise ValueError(
                    f"stage {number}{where}, {_name(stage)}, must be picklable, because workers are started by {start_method!r}: "
                    f"{error}. Use a function of a module, not a lambda or a local one, or multiprocessing_context='fork'"
                ) from error


def _is_source(stage: Any) -> bool:
    return isinstance(stage, Source) or hasattr(stage, "as_source")


def _why_not_behind(stage: Any) -> str:
    if isinstance(stage, Partition):
        return "whole batches are dealt to the ranks already; put it before Collate"
    if isinstance(stage, DistributedBatchedMap):
        return "workers make whole batches; put it before Collate"
    return "a batch is no item"


def _name(stage: Any) -> str:
    return f"a {type(stage).__name__}"
