"""Stages of single items and whole batches: Map, DistributedBatchedMap, Partition, Collate and BatchMap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from shmload.batch.ragged import ragged_of
from shmload.pipeline.stage_arguments import MAX_WORKERS, check_flag, check_function, set_whole
from shmload.schedule.any_schedule import Uneven
from shmload.worker.decoding_protocol import is_decoder


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
        check_function("Map(fn)", self.fn)


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
            check_function("DistributedBatchedMap(mapping_fn)", self.mapping_fn)
        set_whole(self, "DistributedBatchedMap(n_workers)", "n_workers", 1, MAX_WORKERS)
        check_flag("DistributedBatchedMap(in_order)", self.in_order)
        if self.buffer_size is not None:
            set_whole(self, "DistributedBatchedMap(buffer_size)", "buffer_size", 1, 1 << 31)
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and 0 < self.timeout < math.inf):
            raise ValueError(f"DistributedBatchedMap(timeout) is a number of seconds above 0 or None; got {self.timeout!r}")


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
        check_function("BatchMap(fn)", self.fn)
