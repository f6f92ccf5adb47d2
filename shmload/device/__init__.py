"""The ring as pinned memory, and batches that arrive on a device.

`calls.py` is all that is asked of a device, and asks CUDA for it; the tests have a stand-in of their own. Over these: `pins.py`
registers the slots, and gives a slot back when the copies from it are done; `sending.py` says what becomes of a batch's tensors on
the device, and keeps tensors that are filled again and again. The engine copies batches ahead (`engine/feed.py`) and can find
copies that nobody waits for (`engine/watching.py`).
"""
