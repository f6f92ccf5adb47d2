"""Run workers, which read samples, write them into slots, and report failures. Workers are processes or threads.

`process.py` is a worker from start to end, `loop.py` the loop inside it, `read_plan.py` the decision how a batch is read, and
`sample_reader.py` the reading. `pool.py` starts and watches the processes for the engine; with spawn and forkserver they are
forks of one template process that has imported torch (template.py). `thread_pool.py` runs the same loop in threads of the trainer,
which draw from generators of their own (thread_generators.py). `sample_rng.py` is the randomness of samples in seed mode, and
`snapshot.py` the state that a worker sends in torch mode.

A worker that cannot read a row reads the other rows of its chunk one by one and reports all rows that failed. The engine decides
what to do (engine/bad_samples.py) and orders the batch again, so no reading path contains a policy for bad samples. In torch mode
the worker waits for that decision before its next batch, because its random streams continue from one batch to the next.

Rejected alternatives: multiprocessing's resource tracker to clean up shared memory, because it is in the trainer's process group
and dies with it; PR_SET_PDEATHSIG to end workers, because it fires when the thread that started the worker ends.
"""
