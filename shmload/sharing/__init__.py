"""Ranks of one node work together: `ShmLoader(share="node")`. Those that want the same samples read one ring; where no two do, the
node's workers go where they are needed.

The ranks of a tensor- or pipeline-parallel group are given the same `rank` and `world_size`, and so the same batches. Without
sharing each of them decodes every sample.

    choice.py      which of all this a rank gets; the group's lowest local rank leads: it has ring and worker pool, as any loader,
                   and hands a slot on when all have let it go; the others map that ring. They publish nothing; they find, lease and
                   pass batches
    rank_group.py  who is there: each rank of the node says at a board (shm/meeting.py) what it wants; who want the same are a
                   group. Where each rank stands, who has left, where all begin anew

src/share.h has the words that they share, one writer each, and the order in which they are written and read; tests/proof/sharing.py
explores it. What follows from that:

* a slow rank holds the others back by the ring's length; each may keep (slots - 1) // ranks batches, and further ones are copied
  out, so that one slot at least goes on to the batch that the slowest needs;
* every rank maps the payload privately: what a program writes into its batch no other rank sees;
* where reading goes on elsewhere (break, resume, set_epoch) all ranks meet and compare how far they have come and where they begin;
* whoever ends, closes or leaves the pass ends it for all: the others read what it had read (what is ready, until the kernel reports
  of a death, which is looked for at each batch and every 0.02 s of waiting), and then get RankLeft. Nothing of a dead rank's need
  be cleared. The leader's reaper removes the ring.

Rejected: a readers' bitmap in each slot (two writers a word, and somebody must clear a dead rank's bits); a host process (one more
to start, watch and clean up after, and each batch crosses two processes); to let ranks follow the leader's deliveries (a rank that
is behind could not be waited for by the leader's own step); to go on without a rank that has gone (its group cannot).

In data parallelism the rank whose batch is dear holds up all, while its neighbours' rings are full and their workers idle. So:

    balancing.py   each rank has ring, worker pool, order and supervision of its own; who has no idle worker rings for others.
                   Who of them is let in and watched; what a dead one held is read again
    worker/helping.py (HelperRing) a worker with nothing open at home claims a chunk of the neighbour's whose trainer has waited
                   for longest

* a helper is a worker like any other to the protocol (src/protocol.h), under a record of its own behind those of the worker pool;
  the trainer has its process in hand before it may claim anything (src/helpers.h; explored in tests/proof/helpers.py);
* it never waits for the neighbour's trainer, which may itself wait for this rank: it comes when the layout is known, and a batch
  that needs more room is ordered again;
* its death is not put down to the sample it was at, since its rank may have ended; no other helper touches that batch, so a sample
  that kills is found out by the worker pool, and counts twice there;
* a rank that closes or dies takes its ring and its workers away and nothing else.

Rejected: one ring for all (one trainer would order for the others, and its death end them); worker pools that grow and shrink by
need (a process start is longer than most needs); handing chunks over by message (a claim is one exchange).

Not built: both at once, where groups of ranks share rings: their leaders' worker pools do not help each other.
"""
