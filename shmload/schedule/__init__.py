"""Which samples come next: pure functions of integers and arrays, and the protocol of anything that yields orders."""

from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder

__all__ = ["KeyedBatches", "KeyedOrder"]
