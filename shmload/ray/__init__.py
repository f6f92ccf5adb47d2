"""The worker pool for `backend="ray"`: Ray actors decode, and a local process, the agent, represents them in the ring.

    trainer ──order──▶ slot ──claim──▶ dispatcher ──task──▶ actor w: the same WorkerLoop over a ring of one slot
    tensors ◀──lease── slot ◀──copy─── proxy ◀──one buffer, by Ray's object store──┤
                        ◀──rows, by an actor that has the trainer's /dev/shm──────┘

In the ring, a worker is a number that claims and finishes orders. Here a few threads of the agent act for each number, and an actor
somewhere in the cluster decodes for it. Trainer, leases, order and recovery are unchanged, and the trainer spends no time on Ray:
it neither imports Ray (except to pickle the dataset at the start) nor unpickles batches.

    in the trainer    ray_backend.py         makes the worker pool, for `backend="ray"`
                      ray_pool.py            starts the agent, and detects its death
                      joint_pool.py          actors and processes of this machine on one ring
                      dataset_shipping.py    pickles the dataset for other machines
    in the agent      agent.py               the process: reads its settings (agent_config.py) and starts everything below
                      cluster_connection.py  joins the cluster
                      actor_set.py           starts the actors, sends them the dataset and tasks, replaces those that die
                      placement.py           chooses the nodes of actors
                      dispatcher.py          claims orders and chooses the actor of each
                      local_processes.py     decides which orders are left to processes of this machine
                      worker_proxy.py        sends one claim to an actor, and writes the reply into the ring
                      status_line.py         shows on the terminal what the agent waits for
    in an actor       worker_actor.py        the worker's own `WorkerLoop` over a ring of one slot in private memory, whose
                                             trainer is a few lines that grant every request (actor_ring.py)
                      sample_timer.py        ends the actor if a sample takes too long
    in several        messages.py            the messages between agent and actors
                      version_check.py       compares the package versions of nodes
                      life_lock.py           shows which actors may write into the ring, and which have ended

Because an actor runs a local worker's loop, all kinds of batches, notes and errors are the same as from a local worker.

* A claim of some rows of a batch is sent as a separate batch; its rows come back dense, field by field, and are copied to their
  places. If the actor's layout differs from the ring's, or only a part of a batch had to be packed, the whole batch is packed, as
  with local workers.
* An actor that can reach the trainer's memory, and has proven it by a lock that the agent sees (`life_lock.py`), gets the batch's
  own slot as the payload of its ring, if its rows have the ring's layout. Then rows are written once, where the trainer reads
  them, and only a message is sent. All other batches, and all packed ones, come through the object store. If a task ends without
  an answer from its actor (`ActorSet._answer` is the only place where this is detected), the actor is ended, and its rows are
  given to another actor only after its lock has been released. When an agent has ended, the trainer waits for the locks of all its
  actors (`RayPool.deaths`). A closed loader does not wait, because its memory is not reused.
* There is one agent for all actors, because a Ray driver owns its objects and actors: the dataset is put once and fetched once by
  each node, and Ray ends the actors and drops the objects after any end of the agent. The agent ends with the trainer (`die_with`),
  so a killed trainer leaves nothing in the cluster either.
* In seed mode, a task whose actor or node has died is repeated on another actor, because its result depends only on the task. In
  torch mode, the actor's random streams and iterator are lost with it, which is an error, as with any worker of torch.
* An actor has as many tasks in progress as the trainer orders ahead, at most four, so that it decodes one while another is
  transferred and a third is copied. The dispatcher claims for the worker with the fewest tasks in progress, and sends in the
  order of claims, on which torch mode's streams depend. A batch is not divided, because each part would need its own call. If an
  actor with several tasks dies, the cause is unknown: its replacement repeats each task alone, and only deaths during these count
  against a task.
* Back-pressure comes from the ring, because a task already has its slot. The wait for a batch has no timeout, because Ray would
  restart the transfer of an object after a timeout.
* A sample that takes too long is detected on the actor (`sample_timer.py`), because only the actor knows which sample it reads.

Rejected alternatives: the trainer as Ray's driver (the training program would have Ray's threads and fork hazards); an agent, and
so a driver, for each actor (each would put the dataset into the store again, and the head counts every driver as a job);
multiprocessing to start the agent (spawn imports the user's program again, which many programs do not guard against, and a fork of
a program that uses Ray is broken).
"""
