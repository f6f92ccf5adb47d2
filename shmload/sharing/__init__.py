"""Let the ranks of one node work together: `ShmLoader(share="node")`.

There are two ways. Ranks that want the same samples read one ring (*sharing*). If no two ranks want the same samples, each has its
own ring, and idle workers of one rank help others (*balancing*).

Sharing is for the ranks of a tensor- or pipeline-parallel group, which are given the same `rank` and `world_size`, and so the same
batches. Without sharing, each of them decodes every sample.

    choice.py      chooses a way for a rank. The group's lowest local rank is the leader
    rank_group.py  forms groups: each rank of the node writes on a board (shm/meeting.py) which data it wants, and ranks that want
                   the same data are a group. Also keeps track of the progress of each rank (RankSync)
    leader.py      the leader has a ring and a worker pool, like any loader. It reuses a slot when all ranks have released it
    follower.py    the other ranks map that ring. They publish nothing; they find, lease and release batches

src/share.h defines the words that ranks share, one writer each, and the order in which they are written and read;
tests/proof/sharing.py explores it. The consequences are:

* a fast rank can be ahead of a slow one by at most the ring's length. Each rank may keep (slots - 1) // ranks batches, and further
  ones are copied out, so that at least one slot is free for the batch that the slowest rank needs;
* every rank maps the payload privately, so no other rank sees what a program writes into its batch;
* if reading continues at another position (break, resume, set_epoch), all ranks wait for each other, and compare their progress
  and the position where they begin;
* a rank that ends, closes its loader or leaves the pass ends the pass for all. The others read as far as it had read (until the
  kernel reports its death, they read all ready batches; they check at each batch and every 0.02 s of waiting), and then get
  RankLeft. No state of a dead rank has to be cleared. The leader's reaper removes the ring.

Rejected for sharing: a bitmap of readers in each slot (two writers of one word, and another process must clear a dead rank's bits);
a host process (one more to start, watch and clean up after, and each batch crosses two processes); ranks that follow the leader's
deliveries (the leader's own step could not wait for a slower rank); continuing without a rank that has ended (its parallel group
cannot continue either).

Balancing is for data parallelism: there, the rank with an expensive batch delays all, while the other ranks' rings are full and
their workers idle.

    balancing.py   each rank has its own ring, workers, order and supervision. A rank whose workers are busy wakes idle workers of
                   other ranks, admits and watches these helpers, and recovers the chunks of a dead one
    worker/helping.py (HelperRing) an idle worker claims a chunk of the rank whose trainer has waited longest

* for the protocol, a helper is a worker like any other (src/protocol.h), with its own record after those of the worker pool; the
  trainer has its pidfd before it may claim anything (src/helpers.h; explored in tests/proof/helpers.py);
* a helper never waits for that ring's trainer, which may itself wait for the helper's rank: it helps only when the layout is known,
  and a batch that needs more room is ordered again;
* a helper's death is not blamed on its sample, because its rank may have ended. No other helper touches that batch again, so if the
  sample does kill its reader, the ring's own workers read it next, and two of their deaths show that it is bad;
* if a rank closes or dies, only its own ring and workers end.

Rejected for balancing: one ring for all (one trainer would order for the others, and its death would end them); worker pools that
grow and shrink by need (starting a process takes longer than most needs last); passing chunks by message (a claim is a single
compare-exchange).

Not built: both at once, so if groups of ranks share rings, their leaders' worker pools do not help each other.
"""
