"""The two modes of a loader: seed mode, in which every batch follows from a seed, and torch mode, which equals torch's DataLoader.

Seed mode is in `seed_mode.py`, and its epochs in `epochs.py` and `sampled_epochs.py`. Torch mode is in `torch_mode.py`; its passes
are iterators with workers (`torch_iterator.py`) or without (`torch_inline_iterator.py`), which count their `pass_progress.py`.
Without workers, `inline_reader.py` reads batches in both modes.

A state identifies a position and contains no indices:

* In seed mode the position is an epoch and a place in that epoch, from which the schedule computes everything else. It has the
  same small size everywhere and is valid on any number of ranks. A rank without a row in the last step of an epoch stays at that
  step until the epoch has ended, so its state is valid on all ranks.
* In torch mode no formula gives the sequence of samples, so the state records how it arose: the generators' states before the
  sampler was started, the number of batches taken since (sampler_reader.py), and for each worker its dataset's and iterator's own
  states and its random streams directly after its last delivered batch (worker/snapshot.py).

A position is the set of completed orders, not a number of batches: an order is also complete if its batch was lost or skipped,
and with `in_order=False` orders beyond the first incomplete one may be complete. For an iterable dataset it is one number for
each worker.
"""
