"""Stages of single items and whole batches: Map, DistributedBatchedMap, Partition, Collate and BatchMap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from shmload.batch.ragged import AS_TORCH_OR_LIST, ragged_of
from shmload.schedule.any_schedule import Uneven
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.stage_arguments import MAX_WORKERS, check_flag, check_function, set_whole


@dataclass(frozen=True)
class Map:
    """A stage that applies a function to each item, or after Collate to each batch, in the trainer.

    Before Collate, the function runs where items are loaded: in the workers of any DistributedBatchedMap of the pipeline, or in the
    trainer if there is none.

    Args:
        fn: item -> item, or batch -> batch.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("Map(fn)", self.fn)


TIMEOUT_S = 60 * 60  # default limit for one item in a worker


@dataclass(frozen=True)
class DistributedBatchedMap:
    """A stage that applies a function to each item in worker processes, ahead of time and in order.

    Args:
        mapping_fn: item -> value. Random numbers from `shmload.sample_rng()`, or from the global generators of random, numpy and
            torch, are keyed by the item. An object with `schema` and `read_into(item, out)` decodes directly into the batch, if it
            is the last stage before Collate (docs/own_format.md).
        n_workers: number of processes for this rank. Several such stages share one pool, which has the sum of their processes.
        buffer_size: number of items loaded ahead; at least two batches per worker, which is also the default.
        timeout: seconds that one item may take; then its worker is killed, and the error says what it was doing. None for no limit.
        in_order: if False, deliver items as they are finished, in blocks of the Conveyer's `block_size`, so that a slow item does
            not delay others. The items are the same, and a resume delivers exactly the rest. Only for a single rank.
    Raises:
        ValueError, TypeError: an argument is invalid.
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
    """A stage that gives each rank its own part of the items; the parts are disjoint and cover all of them.

    Ranks take turns, batch by batch with a Collate and item by item without one, so after equal steps all have advanced equally.
    Put it before Collate, and after Take, Shuffle and other stages that choose items. A rank does not load what it does not
    deliver, unless a stage makes more or fewer items.

    Args:
        rank: rank of this process, from 0.
        n_ranks: number of processes that share the items.
        uneven: how the last step divides fewer items than a whole round, if the pipeline does not repeat: "pad" gives ranks without
            an item of their own one from the start of the epoch (`valid` is the number of real rows), "drop" leaves the rest out,
            "exact" gives the first ranks more.
    Raises:
        ValueError: `rank` is not less than `n_ranks`, or `uneven` is another word.
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
    """A stage that makes batches.

    Arrays and numbers are stacked as tensors in shared memory; strings, and values that cannot be stacked, become lists.

    Args:
        batch_size: number of items of one rank's batch.
        return_partial_batch: if False, leave out a shorter last batch. Batches of a repeating pipeline continue across the ends of
            epochs.
        ragged: how to deliver fields whose shapes differ from item to item: "list", "pad", "jagged", "nested", or by field
            (docs/batches.md).
    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    batch_size: int
    return_partial_batch: bool = True
    _: KW_ONLY
    ragged: Any = AS_TORCH_OR_LIST

    def __post_init__(self) -> None:
        set_whole(self, "Collate(batch_size)", "batch_size", 1, 1 << 31)
        check_flag("Collate(return_partial_batch)", self.return_partial_batch)
        ragged_of(self.ragged, None, is_torch_mode=False)


@dataclass(frozen=True)
class BatchMap:
    """A stage that applies a function to each batch in the process that makes it: a worker, if there are any.

    It follows Collate, before any Map. Blocks of items have no batches made by workers, so it cannot be combined with a Stream, a
    Scan, or a stage that makes more or fewer items.

    Random numbers from `shmload.sample_rng()`, or from the global generators, are keyed by the batch.

    Args:
        fn: batch -> batch; it receives the batch that Collate made, in private memory.
    Raises:
        TypeError: `fn` cannot be called.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        check_function("BatchMap(fn)", self.fn)
