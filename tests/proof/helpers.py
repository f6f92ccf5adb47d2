"""A model of helpers in another rank's ring: which are admitted, which may claim, whose claims are taken back (src/helpers.h).

A record connects one helper at a time with the ring's trainer. A worker of another rank (an *incarnation*: when it dies, its own
rank starts the next one, which does not know how far the trainer is) exchanges `visitor` from 0 to its identity, waits until
`accepted` has the same value, and then claims and finishes chunks. The trainer opens a handle of the process, checks that it is
the process of the identity, and accepts it. When it sees the end of a process that it has a handle of, it takes back what the
record's number holds, and clears the record. A chunk is claimed under the record's number, not the identity's, so the words do not
say which incarnation holds them.

One step is one shared access of a helper or of the trainer. A helper may be killed at each of its steps, and its death is seen
arbitrarily late. A process id may belong to an unrelated process by the time the trainer opens it; that process lives on. The
ring's own workers fill open chunks, too, so the ring must finish whatever helpers do, except for chunks that a helper holds.

Invariants: a chunk is opened again only when its claimant is dead; no incarnation finds its claim gone. From every state the end
can be reached, in which all chunks are done and no dead helper occupies the record.

`BUGS` are mistakes that can be planted; each must be found. `explore` is model.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.model import Violation

BUGS = (
    "a helper claims before it is accepted",
    "a helper's chunks are taken back when its rank ends",
    "the next helper is admitted before the chunks are taken back",
    "a helper takes the record from the previous one",
    "the trainer accepts any process with the number",
    "the dead helper's chunks are left",
)
OPEN, HELPERS, POOLS, DONE = range(4)  # a chunk's word; HELPERS: the record's number, POOLS: one of the ring's own workers
START, KNOCKED, ACCEPTED, CLAIMED, DEAD = range(5)
NOBODY, STRANGER = 0, -1  # values of in_hand, or an incarnation


class State(NamedTuple):
    chunks: tuple[int, ...]
    holders: tuple[int, ...]  # the incarnation that really holds a chunk, or 0
    helpers: tuple[int, ...]  # the state of each incarnation, newest last
    visitor: int = 0
    accepted: int = 0
    in_hand: int = NOBODY
    cleared: int = 0  # planted: an incarnation whose chunks are still to be taken back
    kills: int = 0  # kills that are left


class Model:
    """A ring with `num_chunks` chunks, at most `kills` kills, and an optional planted bug."""

    def __init__(self, num_chunks: int, kills: int, bug: str = "") -> None:
        self.bug = bug
        self.first = State((OPEN,) * num_chunks, (0,) * num_chunks, (START,), kills=kills)

    def is_complete(self, s: State) -> bool:
        is_held_by_the_dead = s.visitor and s.helpers[s.visitor - 1] == DEAD
        return all(chunk == DONE for chunk in s.chunks) and not is_held_by_the_dead

    def check(self, s: State) -> None:
        for chunk, holder in zip(s.chunks, s.holders, strict=True):
            if holder and s.helpers[holder - 1] != DEAD and chunk != HELPERS:
                raise Violation(f"helper {holder} is alive but its chunk has word {chunk}")

    def steps(self, s: State) -> Iterator[tuple[bool, State]]:
        """Yields (whether the ring itself makes the step, next state) for every possible step."""
        yield from ((True, after) for after in self.helper_steps(s))
        yield from ((True, after) for after in self.trainer_steps(s))
        for c, chunk in enumerate(s.chunks):  # the ring's own workers
            if chunk == OPEN:
                yield True, put(s, c, POOLS, 0)
            elif chunk == POOLS:
                yield True, put(s, c, DONE, 0)
        if s.kills and s.helpers[-1] != DEAD:
            yield False, at(s, DEAD)._replace(kills=s.kills - 1)
        if s.helpers[-1] == DEAD:  # its rank replaces it or does not, and nothing may depend on that
            yield False, s._replace(helpers=(*s.helpers, START))

    # ------------------------------------------------------------ helper

    def helper_steps(self, s: State) -> Iterator[State]:
        me, where = len(s.helpers), s.helpers[-1]
        may_claim = where == ACCEPTED or (where == KNOCKED and self.bug == "a helper claims before it is accepted")
        if where == START and (s.visitor == 0 or self.bug == "a helper takes the record from the previous one"):
            yield at(s._replace(visitor=me), KNOCKED)
        if where == KNOCKED and s.accepted == me:
            yield at(s, ACCEPTED)
        if may_claim:
            for c, chunk in enumerate(s.chunks):
                if chunk == OPEN:
                    yield at(put(s, c, HELPERS, me), CLAIMED)
        if where == CLAIMED:
            c = s.holders.index(me)
            if s.chunks[c] != HELPERS:
                raise Violation(f"helper {me} finds its claim gone")
            yield at(put(s, c, DONE, 0), ACCEPTED)

    # ------------------------------------------------------------ trainer

    def trainer_steps(self, s: State) -> Iterator[State]:
        if s.cleared:
            yield self.taken_back(s)._replace(cleared=0)
        if s.visitor and s.visitor != s.accepted:
            is_dead = s.helpers[s.visitor - 1] == DEAD
            if not is_dead:
                yield s._replace(in_hand=s.visitor, accepted=s.visitor)
            elif self.bug == "the trainer accepts any process with the number":
                yield s._replace(in_hand=STRANGER, accepted=s.visitor)
            else:  # it has ended, or its number belongs to another process now
                yield s._replace(visitor=0, accepted=0)
        ends = s.in_hand > 0 and s.helpers[s.in_hand - 1] == DEAD
        if self.bug == "a helper's chunks are taken back when its rank ends":
            ends = s.in_hand > 0  # the end of the rank is seen before the end of its worker
        if ends:
            cleared = s._replace(visitor=0, accepted=0, in_hand=NOBODY)
            if self.bug == "the next helper is admitted before the chunks are taken back":
                yield cleared._replace(cleared=1)
            elif self.bug == "the dead helper's chunks are left":
                yield cleared
            else:
                yield self.taken_back(cleared)

    def taken_back(self, s: State) -> State:
        for c, chunk in enumerate(s.chunks):
            if chunk == HELPERS:
                s = s._replace(chunks=(*s.chunks[:c], OPEN, *s.chunks[c + 1 :]))
                holder = s.holders[c]
                if holder and s.helpers[holder - 1] == DEAD:
                    s = put(s, c, OPEN, 0)
        return s


def put(s: State, c: int, chunk: int, holder: int) -> State:
    chunks, holders = (*s.chunks[:c], chunk, *s.chunks[c + 1 :]), (*s.holders[:c], holder, *s.holders[c + 1 :])
    return s._replace(chunks=chunks, holders=holders)


def at(s: State, where: int) -> State:
    return s._replace(helpers=(*s.helpers[:-1], where))
