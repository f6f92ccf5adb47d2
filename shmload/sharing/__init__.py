"""Ranks of one node work together: `ShmLoader(share="node")`.

Ranks that want the same samples read one ring. Where no two ranks want the same samples, the workers of the node go where they are
needed.

The ranks of a tensor- or pipeline-parallel group are given the same `rank` and `world_size`, and so the same batches. Without
sharing, each of them decodes every sample.

    choice.py      which of these a rank gets. The group's lowest local rank leads
    rank_group.py  who is there: each rank of the node writes on a board (shm/meeting.py) what it wants; ranks that want the same
                   are a group. How far each rank is, who has left, where all begin again
    leader.py      the leader has a ring and a worker pool, as any loader has. It reuses a slot when all ranks have released it
    follower.py    the others map that ring. They publish nothing; they find, lease and release batches

src/share.h defines the words that ranks share, one writer each, and the order in which they are written and read;
tests/proof/sharing.py explores it. It follows that:

* a slow rank delays the others by at most the ring's length. Each rank may keep (slots - 1) // ranks batches, and further ones are
  copied out, so that at least one slot continues to the batch that the slowest rank needs;
* every rank maps the payload privately, so no other rank sees what a program writes into its batch;
* where reading continues elsewhere (break, resume, set_epoch), all ranks meet and compare how far they are and where they begin;
* a rank that ends, closes its loader or leaves the pass ends the pass for all. The others read what it had read (what is ready,
  until the kernel reports its death, which they look for at each batch and every 0.02 s of waiting), and then get RankLeft. Nothing
  of a dead rank has to be cleared. The leader's reaper removes the ring.

Rejected: a bitmap of readers in each slot (two writers of one word, and somebody must clear a dead rank's bits); a host process
(one more to start, watch and clean up after, and each batch crosses two processes); ranks that follow the leader's deliveries (the
leader's own step could not wait for a slower rank); continuing without a rank that is gone (its group cannot).

In data parallelism, the rank with an expensive batch delays all, while its neighbors' rings are full and their workers idle. So:

    balancing.py   each rank has a ring, workers, order and supervision of its own; a rank without idle workers wakes those of
                   others. Which helpers are admitted and watched; chunks of a dead helper are read again
    worker/helping.py (HelperRing) an idle worker claims a chunk of the neighbor whose trainer has waited longest

* a helper is a worker like any other to the protocol (src/protocol.h), with a record of its own after those of the worker pool; the
  trainer has its pidfd before it may claim anything (src/helpers.h; explored in tests/proof/helpers.py);
* it never waits for the neighbor's trainer, which may itself wait for this rank: it comes when the layout is known, and a batch
  that needs more room is ordered again;
* its death is not blamed on its sample, because its rank may have ended. No other helper touches that batch, so a sample that
  kills is found by the worker pool, and counts twice there;
* a rank that closes or dies takes away its ring and its workers and nothing else.

Rejected: one ring for all (one trainer would order for the others, and its death end them); worker pools that grow and shrink by
need (a process start is longer than most needs); passing chunks by message (a claim is one exchange).

Not built: both at once, where groups of ranks share rings: their leaders' worker pools do not help each other.
"""
