"""Decide which samples are read next: pure functions of integers and arrays, and the base classes for orders of your own.

An *order* is a sequence of samples, or of batches, that is the same for all ranks. A *schedule* deals an order to ranks, step by
step: (seed, epoch, step, rank) -> indices.

    any_schedule.py               the interface of schedules
    schedule.py                   the schedule of the plain or shuffled order, or of a `KeyedOrder`
    keyed_order.py                orders that are formulas of a position: block_shuffle, weighted, shard_shuffle, node_shuffle,
                                  mix_order (with mix.py, mix_draws.py and shares.py)
    keyed_batches.py              orders that form the batches themselves, and their schedule: length_buckets, token_budget
    snapshot_schedule.py          the schedule of a dataset that grows: the plain order over each snapshot (epoch_snapshots.py)
    stream_positions.py           positions of an endless or finite stream of items, dealt to ranks
    units.py                      which samples make up the k-th item after slices and batches
    permutation.py                the random permutation that all of them use; key_streams.py numbers its streams
    state.py                      the saved state of a run; state_codec.py and state_checksum.py

A formula needs no state and resumes anywhere. Batches that an order forms itself are computed once per epoch, are the same for all
ranks, and are kept for two epochs. A mixture is the only order with state: one counter for each member (src/mix.h).

Everything that is sorted or drawn uses integers and plain IEEE operations only, so all machines compute the same order.
"""

from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder

__all__ = ["KeyedBatches", "KeyedOrder"]
