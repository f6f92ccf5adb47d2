"""The ring as pinned memory, and batches that arrive on a device.

`calls.py` is all that is asked of a device, and asks CUDA for it; the tests have a stand-in of their own. It registers the slots,
gives a slot back when the copies from it are done, and says what becomes of a batch's tensors on the device. The engine copies
batches ahead (DeviceFeed in `engine/parts.py`).
"""
