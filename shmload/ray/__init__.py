"""A worker pool on other machines: Ray actors decode, and a local process, the agent, represents them in the ring.

    trainer ──order──▶ slot ──claim──▶ dispatcher ──task──▶ actor w: the same WorkerLoop over a ring of one slot
    tensors ◀──lease── slot ◀──copy─── proxy ◀──one buffer, by Ray's object store──┤
                        ◀──rows, by an actor that has the trainer's /dev/shm──────┘

In the ring, a worker is a number that claims and finishes orders. Here each number belongs to a few *threads* of the agent, and an
actor somewhere in the cluster decodes. Trainer, leases, order and repair are unchanged, and the trainer spends no time on Ray: it
neither imports Ray nor unpickles.

    in the trainer    ray_backend.py         makes the worker pool, for `backend="ray"`
                      ray_pool.py            starts the agent, and detects its death
                      joint_pool.py          actors and processes of this machine on one ring
                      dataset_shipping.py    pickles the dataset for other machines
    in the agent      agent.py               the process: reads its settings (agent_config.py) and starts everything below
                      cluster_connection.py  joins the cluster
                      actor_set.py           starts the actors, sends them the dataset and tasks, replaces those that die
                      placement.py           chooses the nodes of actors
                      dispatcher.py          claims orders and chooses the actor of each; local_processes.py: how many are left to
                                             processes of this machine
                      worker_proxy.py        writes the reply to a claim into the ring
    in an actor       worker_actor.py        the worker's own `WorkerLoop` over a ring of one slot in private memory, whose
                                             trainer is a few lines that grant every request (local_ring.py)
                      sample_timer.py        ends the actor if a sample takes too long
    in all            messages.py, version_check.py, life_lock.py (which actors may write into the ring)

So every path (rows, packed, ragged, iterable, notes, errors) is the same as in a local worker, and batches cannot differ.

* A claim of some rows of a batch is sent as a separate batch; its rows come back dense, field by field, and are copied to their
  places. If the actor's layout is not the ring's, or rows that share a batch with others had to be packed, the batch is repacked as
  usual.
* An actor that can reach the trainer's memory, and has proven it by a lock that the agent sees (`life_lock.py`), gets the batch's
  own slot as the payload of its ring, if its rows have the ring's layout. Then rows are written once, where the trainer reads
  them, and only a message is sent. All other batches, and all packed ones, come through the object store. Whenever a task ends
  without a message from its actor (`ActorSet._answer` is the only place), the actor is ended, and its lock must be released before
  another actor gets its rows; the trainer waits for the locks of all actors when their agent has ended (`RayPool.deaths`). A closed
  loader does not wait, because its memory is not reused.
* There is one agent for all actors, because a Ray driver owns its objects and actors: the dataset is put once and fetched once by
  each node, and Ray ends the actors and drops the objects after any end of the agent. The agent ends with the trainer (`die_with`),
  so a killed trainer leaves nothing in the cluster either.
* In seed mode, the death of an actor or node costs a retry on another actor, because a task's result depends only on the task. In
  torch mode, the actor's random streams and iterator die with it; that is an error, as for any torch worker.
* An actor has as many tasks in progress as the trainer orders ahead, at most four, so that it decodes one while another is
  transferred and a third is copied. The dispatcher claims for the worker with the fewest tasks in progress, and sends in the
  order of claims, on which torch mode's streams depend. A batch is not divided, because each part would need its own call. If an
  actor with several tasks dies, the cause is unknown: its replacement repeats each task alone, and only deaths during these count
  against a task.
* Back-pressure comes from the ring, because a task already has its slot. The wait for a batch has no timeout, because Ray would
  restart the transfer of an object after a timeout.
* A sample that takes too long is detected on the actor (`sample_timer.py`), because only the actor knows which sample it reads.

Rejected: the trainer as Ray's driver (the training program would have Ray's threads and fork hazards); a process, and so a driver,
for each actor (each would put the dataset again, and the head counts every driver as a job); multiprocessing for the agent (spawn
imports the user's program again, which many programs do not guard against, and a fork of a program that uses Ray is broken).
"""
