"""Which samples are read next: pure functions of integers and arrays, and the base classes for orders of your own.

    schedule.py                   (seed, epoch, step, rank) -> indices: the plain or shuffled order, dealt to ranks
    keyed_order.py                orders that are formulas of a position: block_shuffle, weighted, node_shuffle, mix_order
    keyed_batches.py              orders that form the batches themselves: length_buckets, token_budget
    snapshot_schedule.py          the plain order over each snapshot of a dataset that grows
    shard_shuffle.py              the order of remote shards: windows of whole shards, mixed sample by sample
    stream_positions.py           positions of an endless or finite stream of items, dealt to ranks

A formula needs no state and resumes anywhere. Batches that an order forms itself are computed once per epoch, are the same for all
ranks, and are kept for two epochs. A mixture is the only order with state: one counter for each member (src/mix.h).

Everything that is sorted or drawn uses integers and plain IEEE operations only, so all machines compute the same order.
"""

from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder

__all__ = ["KeyedBatches", "KeyedOrder"]
