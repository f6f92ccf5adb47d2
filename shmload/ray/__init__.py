"""A worker pool on other machines: Ray actors decode, and one process beside the trainer, the agent, stands for them in the ring.

    trainer ──order──▶ slot ──claim──▶ dispatcher ──task──▶ actor w: the same WorkerLoop over a ring of one slot
    tensors ◀──lease── slot ◀──copy─── stand-in ◀──one buffer, by Ray's object store──┤
                        ◀──rows, by an actor that has the trainer's /dev/shm──────┘

What a worker is to the ring (a number that claims and finishes) is here a few *threads* of the agent; what decodes is an actor
somewhere in the cluster. Trainer, leases, order and repair stay as they are, and the trainer spends nothing on the way: it neither
imports a running Ray nor unpickles. `actor_pool.py` starts the agent, watches for its death, and says how many actors there are and
on which nodes. `agent.py` is the agent's process: it claims, and sees each claim through. `actors.py` is the actor: the worker's
own `WorkerLoop` over a ring of one slot in private memory, whose trainer is a few lines that grant whatever is asked for. So every
path (rows, packed, ragged, iterable, notes, errors) is the local one, and batches cannot differ.

* A claim of some rows of a batch travels as a batch of its own; its rows come back dense, field by field, and are copied into
  their places. Where the ring's layout is not the actor's, or rows had to be packed that others share, the usual repack follows.
* An actor that reaches the trainer's memory, and has proven it by a lock that the agent sees (`life_lock.py`), has the batch's
  own slot for the payload of its ring, if its rows are of the ring's layout. So they are written once, where the trainer reads
  them, and only word of it travels. All else, and all that is packed, comes by the object store. Whenever a task ends without its
  actor's word (`Cluster._answer` is the one place), the actor is ended first, and its lock waited for, before its rows are
  anybody else's; the trainer waits for the locks of all actors when their agent has ended (`RayPool.deaths`). A closed loader
  waits for none: nobody gets its memory.
* One agent for all actors, because a Ray driver is the owner of what it puts and starts: the dataset is put once and fetched once
  by each node; when the agent ends, however it ends, Ray ends the actors and drops the objects. The agent ends with
  the trainer (`die_with`), so a killed trainer leaves nothing in the cluster either.
* In seed mode an actor or node that dies costs a retry on another actor: what a task gives depends on nothing else. In torch
  mode its random streams and its iterator die with it; that is an error, as for any worker of torch's.
* An actor has as many tasks under way as the trainer orders ahead, four at most, so that it decodes one while another travels
  and a third is copied. The dispatcher claims for the worker with the least under way, and sends in the order of claims, on
  which torch mode's streams depend. A batch is not divided: a part would be a call of its own. What an actor died of is not known
  where it had several tasks: its successor does each of them alone, and only deaths of those count against a task.
* Back-pressure is the ring's: a task has a slot that is there already. A batch is waited for without a limit, because Ray begins
  the transfer of an object anew that was given up.
* A sample that takes too long is seen on the actor (`actors.py`), as only there it is known which one is read.

Rejected: the trainer as Ray's driver (its threads and its fork hazards would be the training program's); a process and so a driver
for each actor (each would put the dataset again, and the head counts every driver as a job); multiprocessing for the agent (spawn
imports the user's program again, which the seed's examples do not guard against, and a fork of a program that uses Ray is broken).
"""
