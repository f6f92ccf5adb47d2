"""Which samples are read next: pure functions of integers and arrays, and the base classes for orders of your own."""

from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder

__all__ = ["KeyedBatches", "KeyedOrder"]
