"""Pinned rings, and batches that arrive on a GPU.

`cuda.py` makes every call to the device; the tests replace it with a simulated device. `pinned_slots.py` registers the slots as
pinned memory, `pending_copies.py` delays the reuse of a slot until the copies from it are done, and `sending.py` copies the
tensors of a batch. The engine copies batches ahead (`engine/device_feed.py`).
"""
