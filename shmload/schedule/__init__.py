"""Which samples come next: pure functions of integers and arrays, and the protocol of anything that yields orders."""

from shmload.schedule.schedule import KeyedBatches, KeyedOrder

__all__ = ["KeyedBatches", "KeyedOrder"]
