"""The ring as pinned memory, and batches that arrive on a device.

`calls.py` is all that is asked of a device, `calls.py` asks CUDA for it, `shmload.testing.device` stands in for it in tests. Over
these: `pins.py` registers the slots, `pins.py` gives a slot back when the copies from it are done, `feed.py` copies batches
ahead on a stream of its own: `sending.py` says what becomes of a batch's tensors there, `sending.py` of its images, and
`sending.py` keeps tensors that are filled again and again. `watching.py` finds copies that nobody waits for.
"""
