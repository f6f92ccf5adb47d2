"""The engine of a loader: publish orders in the slots of a ring, supervise the workers that fill them, and deliver the batches.

`engine.py` has the queue of orders and drives everything else. `ring.py` is the shared memory, `publisher.py` writes orders into
it, `worker_set.py` starts and stops workers, and `supervisor.py` handles their deaths. `builder.py` makes an engine from the
loader's arguments. A mode (modes/) sees an engine through the protocol in `batch_source.py`.

Rejected for the number of workers ("auto"): a thread of its own, which would compete with the trainer for the GIL. Rejected for
statistics: PSS, because reading it locks the memory map of the process that is observed; a heartbeat, because a worker that
decodes a large sample looks dead.
"""
