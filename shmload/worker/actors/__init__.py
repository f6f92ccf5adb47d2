"""A crew on other machines: Ray actors decode, and one process beside the trainer, the agent, stands for them in the ring.

    trainer ──order──▶ slot ──claim──▶ agent's thread w ──errand──▶ actor w: the same Body over a ring of one slot
    tensors ◀──lease── slot ◀──copy─── agent's thread w ◀──one buffer, by Ray's object store──┘

What a worker is to the ring (a number that claims and finishes) is here a *thread* of the agent; what decodes is an actor somewhere
in the cluster. Trainer, leases, order and repair stay as they are, and the trainer spends nothing on the way: it neither imports
a running Ray nor unpickles. `crew.py` starts the agent and tells of its death, `agent.py` is its process, `stand_in.py` a thread of
it, `cluster.py` its side of Ray, `placement.py` which actor goes where. On the actor, `decoder.py` runs the worker's own
`Body` over `desk.py`, a ring of one slot in private memory whose trainer is a few lines that grant whatever is asked for. So
every path (rows, packed, ragged, iterable, notes, errors) is the local one, and batches cannot differ. `errand.py` is
what travels.

* A claim of some rows of a batch travels as a batch of its own; its rows come back dense, field by field, and are copied into
  their places. Where the ring's layout is not the actor's, or rows had to be packed that others share, the usual repack follows.
* One agent for all actors, because a Ray driver is the owner of what it puts and starts: the dataset is put once and fetched once
  by each node; when the agent ends, however it ends, Ray ends the actors and drops the objects. The agent ends with
  the trainer (`die_with`), so a killed trainer leaves nothing in the cluster either.
* In seed mode an actor or node that dies costs a retry on another actor: what an errand gives depends on nothing else. In torch
  mode its random streams and its iterator die with it; that is an error, as for any worker of torch's.
* Back-pressure is the ring's: a thread has at most one errand under way, into a slot that is there already.

Rejected: the trainer as Ray's driver (its threads and its fork hazards would be the training program's); a process and so a driver
for each actor (each would put the dataset again, and the head counts every driver as a job); multiprocessing for the agent (spawn
imports the user's program again, which the seed's examples do not guard against, and a fork of a program that uses Ray is broken).
"""
