"""The ring as pinned memory, and batches that arrive on a device.

`calls.py` is all that is asked of a device, `cuda.py` asks CUDA for it; the tests have a stand-in of their own. Over
these: `pins.py` registers the slots, `cooling.py` gives a slot back when the copies from it are done, `feed.py` copies batches
ahead on a stream of its own: `sending.py` says what becomes of a batch's tensors there, `normalise.py` of its images, and
`buffers.py` keeps tensors that are filled again and again. `watching.py` finds copies that nobody waits for.
"""
