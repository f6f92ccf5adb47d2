"""The engine of a loader: publish orders in the slots of a ring, supervise the workers that fill them, and deliver the batches.

`engine.py` has the queue of orders and drives everything else. `ring.py` is the shared memory, `publisher.py` writes orders into
it, `worker_set.py` starts and stops workers, and `supervisor.py` handles their deaths. `builder.py` makes an engine from the
loader's arguments. A mode (modes/) sees an engine through the protocol in `batch_source.py`.

Other parts of this folder: `argument_checks.py` checks the loader's arguments; `tuning/` changes settings given as "auto";
`ring_reader.py` and `stats.py` report on a running ring; `tracing/` records its events.

Rejected alternatives: memory statistics by PSS, because reading it locks the memory map of the observed process; a heartbeat of the
workers, because a worker that decodes a large sample would look dead.
"""
