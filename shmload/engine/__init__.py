"""The engine of a loader: publish orders in the slots of a ring, supervise the workers that fill them, and deliver the batches.

`engine.py` has the queue of orders and drives everything else. `ring.py` is the shared memory, `ring_memory.py` the part of it that
contains batches, `publisher.py` writes orders into it, `worker_set.py` starts and stops workers, and `supervisor.py` handles their
deaths. A batch may be ordered again without its bad samples (`bad_samples.py`), copied out of its slot (`copy_out.py`) or sent to a
GPU (`device_feed.py`); `outcome.py` is what a mode gets. Other ranks take part through `rank_hook.py`. A mode (modes/) sees an
engine through the protocol in `batch_source.py`.

`argument_checks.py` and `argument_types.py` check the loader's arguments, and `config.py` freezes them for a pass. `builder.py`
makes an engine of them and of its `options.py`; `backend_choice.py` chooses its workers, and `tuning/` changes settings given as
"auto". `ring_reader.py` reads a running ring, `stats.py`, `time_shares.py` and `bottleneck.py` report on it, `holders.py` names the
lines of the program that hold its slots, and `tracing/` records its events.

Rejected alternatives: memory statistics by PSS, because reading it locks the memory map of the observed process; a heartbeat of the
workers, because a worker that decodes a large sample would look dead.
"""
