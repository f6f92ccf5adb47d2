"""A worker pool on other machines: Ray actors decode, and one process beside the trainer, the agent, represents them in the ring.

    trainer ──order──▶ slot ──claim──▶ dispatcher ──task──▶ actor w: the same WorkerLoop over a ring of one slot
    tensors ◀──lease── slot ◀──copy─── stand-in ◀──one buffer, by Ray's object store──┤
                        ◀──rows, by an actor that has the trainer's /dev/shm──────┘

For the ring, a worker is a number that claims and finishes. Here each number belongs to a few *threads* of the agent, and an
actor somewhere in the cluster decodes. Trainer, leases, order and repair are unchanged, and the trainer spends no time on Ray: it
neither imports a running Ray nor unpickles. `actor_pool.py` starts the agent, watches for its death, and decides how many actors
there are and on which nodes. `agent.py` is the agent's process: it claims, and completes each claim. `actors.py` is the actor:
the worker's own `WorkerLoop` over a ring of one slot in private memory, whose trainer is a few lines that grant every request. So
every path (rows, packed, ragged, iterable, notes, errors) is the local one, and batches cannot differ.

* A claim of some rows of a batch is sent as a batch of its own; its rows come back dense, field by field, and are copied into
  their places. If the ring's layout is not the actor's, or rows that share a batch with others had to be packed, the usual repack
  follows.
* An actor that can reach the trainer's memory, and has proven it by a lock that the agent sees (`life_lock.py`), gets the batch's
  own slot as the payload of its ring, if its rows have the ring's layout. Then rows are written once, where the trainer reads
  them, and only a message is sent. Everything else, and everything packed, comes through the object store. Whenever a task ends
  without a message from its actor (`Cluster._answer` is the only place), the actor is ended and its lock awaited before its rows
  are given to another; the trainer waits for the locks of all actors when their agent has ended (`RayPool.deaths`). A closed
  loader does not wait, because its memory is not reused.
* There is one agent for all actors, because a Ray driver owns what it puts and starts: the dataset is put once and fetched once
  by each node, and however the agent ends, Ray ends the actors and drops the objects. The agent ends with the trainer
  (`die_with`), so a killed trainer leaves nothing in the cluster either.
* In seed mode an actor or node that dies costs a retry on another actor, because a task's result depends on the task alone. In
  torch mode the actor's random streams and iterator die with it; that is an error, as for any torch worker.
* An actor has as many tasks in progress as the trainer orders ahead, at most four, so that it decodes one while another is
  transferred and a third is copied. The dispatcher claims for the worker with the fewest tasks in progress, and sends in the
  order of claims, on which torch mode's streams depend. A batch is not divided, because each part would be a call of its own. If
  an actor with several tasks dies, the cause is unknown: its replacement repeats each of them alone, and only deaths during those
  count against a task.
* Back-pressure comes from the ring: a task already has its slot. The wait for a batch has no timeout, because Ray restarts the
  transfer of an object that was given up.
* A sample that takes too long is detected on the actor (`actors.py`), because only the actor knows which sample it reads.

Rejected: the trainer as Ray's driver (its threads and fork hazards would become the training program's); a process, and so a
driver, for each actor (each would put the dataset again, and the head counts every driver as a job); multiprocessing for the
agent (spawn imports the user's program again, which the seed's examples do not guard against, and a fork of a program that uses
Ray is broken).
"""
