"""Ranks of one node that want the same samples read one ring: `ShmLoader(share="node")`.

The ranks of a tensor- or pipeline-parallel group are given the same `rank` and `world_size`, and so the same batches. Without
sharing each of them decodes every sample.

    gathering.py   who is there: each rank of the node says at a board (shm/meeting.py) what it wants; who want the same are a group
    leading.py     the group's lowest local rank has ring and crew, as any loader; it hands a slot on when all have let it go
    following.py   the others map that ring. They publish nothing; they find, lease and pass batches
    company.py     what both tell and ask: where each rank stands, who has left, where all begin anew

src/share.h has the words that they share, one writer each, and the order in which they are written and read; tests/proof/sharing.py
explores it. What follows from that:

* a slow rank holds the others back by the ring's length; each may keep (slots - 1) // ranks batches, and further ones are copied
  out, so that one slot at least goes on to the batch that the slowest needs;
* every rank maps the payload privately: what a program writes into its batch no other rank sees;
* where reading goes on elsewhere (break, resume, set_epoch) all ranks meet and compare how far they have come and where they begin;
* whoever ends, closes or leaves the pass ends it for all: the others read what it had read (what is ready, until the kernel tells
  of a death, which is looked for at each batch and every 0.02 s of waiting), and then get RankLeft. Nothing of a dead rank's need
  be cleared. The leader's reaper removes the ring.

Rejected: a readers' bitmap in each slot (two writers a word, and somebody must clear a dead rank's bits); a host process (one more
to start, watch and clean up after, and each batch crosses two processes); to let ranks follow the leader's deliveries (a rank that
is behind could not be waited for by the leader's own step); to go on without a rank that has gone (its group cannot).

Not built: one crew for ranks that want different samples.
"""
