"""A model of a ring that several ranks read, to show when a slot may be reused (src/share.h).

Beside the owner words, each slot has the *ticket* of its batch, which counts batches over the ring's life. Each follower alone
writes its *round*, its *next* (it takes no more batches with a smaller ticket) and a *hold* on each slot that it has leased.
The leader may reuse a free slot when every follower has passed its ticket and, checked after that, has no hold on it. One step is
one shared access of a follower or of the leader's check; the leader's other actions are one C call each.

All ranks take `before` batches, abandon the remaining orders if `after` is not 0, and take `after` batches of the next
round. A follower may be killed at each of its steps, and the leader between two of its actions; both deaths are seen
arbitrarily late. A rank that sees the end of another takes the batches that the other had taken, and then ends with an error. So
nothing needs to clear a dead follower's holds.

Invariants: a follower reads the whole batch that it expects, until it drops it. From every state the end can be reached, in which
each living rank has taken everything or has ended with an error. `BUGS` are mistakes that can be planted; each must be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.model import Violation

BUGS = (
    "holds are checked before next",
    "a follower passes before it holds",
    "the ticket is stored before the slot is written",
    "a slot is free when the leader's lease ends",
    "tickets of an abandoned round are waited for",
    "the leader's end is not seen",
)
FREE, ORDERED, LEASED = range(3)
IDLE, FOUND, HELD, PASSED, ENDED, DEAD = range(6)


class Slot(NamedTuple):
    state: int = FREE  # of the leader
    ticket: int = -1
    round: int = 0
    batch: int = 0
    is_filled: bool = True


class Follower(NamedTuple):
    at: int = IDLE
    slot: int = -1
    round: int = 0
    count: int = 0  # batches taken in this round
    next: int = 0
    holds: frozenset[int] = frozenset()


class Leader(NamedTuple):
    at: int = IDLE  # or ENDED, DEAD
    round: int = 0
    count: int = 0
    published: int = 0  # batches published in this round
    ticket: int = 0  # the next ticket
    look: tuple[int, int, bool] = (-1, 0, False)  # (slot, follower, whether the first half of the check is done)
    writes: int = -1  # a slot that is half published


class State(NamedTuple):
    slots: tuple[Slot, ...]
    followers: tuple[Follower, ...]
    leader: Leader = Leader()
    kills: int = 0


class Model:
    """A ring of `slots` slots with `followers` followers."""

    def __init__(self, followers: int, slots: int, before: int, after: int, kills: int, bug: str = "") -> None:
        self.bug = bug
        self.goals = (before, after)
        self.first = State((Slot(),) * slots, (Follower(),) * followers, kills=kills)

    def is_at_end(self, round: int, count: int) -> bool:
        return count == self.goals[round] and (round == 1 or self.goals[1] == 0)

    def is_complete(self, s: State) -> bool:
        return all(rank.at in (ENDED, DEAD) for rank in (s.leader, *s.followers))

    def check(self, s: State) -> None:
        for follower in s.followers:
            if follower.at == PASSED:
                slot = s.slots[follower.slot]
                if (slot.round, slot.batch, slot.is_filled) != (follower.round, follower.count - 1, True):
                    raise Violation(f"{follower} reads {slot}")

    def steps(self, s: State) -> Iterator[tuple[bool, State]]:
        """Yields (whether the ring itself makes the step, next state) for every possible step."""
        for f, follower in enumerate(s.followers):
            if follower.at not in (ENDED, DEAD):
                for after in self.follower_steps(s, follower):
                    yield True, put_follower(s, f, after)
                if s.kills:
                    yield False, put_follower(s, f, follower._replace(at=DEAD))._replace(kills=s.kills - 1)
        if s.leader.at in (ENDED, DEAD):
            return
        yield from ((True, after) for after in self.leader_steps(s))
        if s.kills:
            yield False, s._replace(leader=s.leader._replace(at=DEAD), kills=s.kills - 1)

    # ------------------------------------------------------------ a follower

    def follower_steps(self, s: State, me: Follower) -> Iterator[Follower]:
        passes_first = self.bug == "a follower passes before it holds"
        if me.at == IDLE:
            yield from self.look(s, me)
        elif me.at == FOUND:
            slot = s.slots[me.slot]
            if passes_first:
                yield me._replace(at=HELD, next=slot.ticket + 1)
            else:
                yield me._replace(at=HELD, holds=me.holds | {me.slot})
        elif me.at == HELD:
            holds = me.holds | {me.slot}
            yield me._replace(at=PASSED, holds=holds, next=max(me.next, s.slots[me.slot].ticket + 1), count=me.count + 1)
        elif me.at == PASSED:
            yield me._replace(at=IDLE, holds=me.holds - {me.slot}, slot=-1)

    def look(self, s: State, me: Follower) -> Iterator[Follower]:
        leader = s.leader
        if self.is_at_end(me.round, me.count):
            yield me._replace(at=ENDED, next=1 << 30)
            return
        if me.count == self.goals[me.round]:
            yield me._replace(round=1, count=0)
            return
        has_stopped = leader.at in (ENDED, DEAD) and (leader.round, leader.count) <= (me.round, me.count)
        if has_stopped and self.bug != "the leader's end is not seen":
            yield me._replace(at=ENDED)
        found = [
            (slot.ticket, i)
            for i, slot in enumerate(s.slots)
            if slot.ticket >= me.next and slot.round == me.round and slot.batch == me.count
        ]
        if found and s.slots[min(found)[1]].is_filled:
            yield me._replace(at=FOUND, slot=min(found)[1])

    # ------------------------------------------------------------ the leader

    def leader_steps(self, s: State) -> Iterator[State]:
        leader = s.leader
        if leader.writes >= 0:
            yield self.publish_rest(s)
            return
        if leader.look[0] >= 0:
            yield self.continue_check(s)
            return
        for i, slot in enumerate(s.slots):
            if slot.state == ORDERED and not slot.is_filled:
                yield put_slot(s, i, slot._replace(is_filled=True))  # done by a worker
            if slot.state == LEASED:
                yield put_slot(s, i, slot._replace(state=FREE))
            is_wanted = leader.count < self.goals[leader.round] and slot.batch == leader.count
            if slot.state == ORDERED and slot.is_filled and is_wanted:
                taken = leader._replace(count=leader.count + 1)
                yield put_slot(s, i, slot._replace(state=LEASED))._replace(leader=taken)
            if slot.state == FREE and leader.published <= self.goals[leader.round]:  # at most one batch ahead
                yield s._replace(leader=leader._replace(look=(i, 0, False)))
        if self.is_at_end(leader.round, leader.count):
            yield s._replace(leader=leader._replace(at=ENDED))
        elif leader.count == self.goals[leader.round]:
            slots = tuple(slot._replace(state=FREE) if slot.state == ORDERED else slot for slot in s.slots)
            yield s._replace(slots=slots, leader=leader._replace(round=1, count=0, published=0))
        elif any(f.at == DEAD and (f.round, f.count) <= (leader.round, leader.count) for f in s.followers):
            yield s._replace(leader=leader._replace(at=ENDED))

    def continue_check(self, s: State) -> State:
        leader, (i, f, is_half) = s.leader, s.leader.look
        slot, give_up = s.slots[i], s._replace(leader=s.leader._replace(look=(-1, 0, False)))
        if f == len(s.followers) or self.bug == "a slot is free when the leader's lease ends":
            return self.publish_first(s, i)
        follower = s.followers[f]
        has_passed = follower.next > slot.ticket
        if self.bug != "tickets of an abandoned round are waited for":
            has_passed |= follower.round > slot.round
        is_free_of = i not in follower.holds
        first, second = has_passed, is_free_of
        if self.bug == "holds are checked before next":
            first, second = second, first
        if not (second if is_half else first):
            return give_up
        return s._replace(leader=leader._replace(look=(i, f + is_half, not is_half)))

    def publish_first(self, s: State, i: int) -> State:
        leader = s.leader._replace(look=(-1, 0, False), writes=i)
        if self.bug == "the ticket is stored before the slot is written":
            slot = s.slots[i]._replace(ticket=leader.ticket, round=leader.round, batch=leader.published)
        else:
            slot = s.slots[i]._replace(is_filled=False, batch=-1)
        return put_slot(s, i, slot)._replace(leader=leader)

    def publish_rest(self, s: State) -> State:
        leader, i = s.leader, s.leader.writes
        done = leader._replace(writes=-1, ticket=leader.ticket + 1, published=leader.published + 1)
        slot = Slot(ORDERED, leader.ticket, leader.round, leader.published, is_filled=False)
        return put_slot(s, i, slot)._replace(leader=done)


def put_slot(s: State, i: int, slot: Slot) -> State:
    return s._replace(slots=(*s.slots[:i], slot, *s.slots[i + 1 :]))


def put_follower(s: State, f: int, follower: Follower) -> State:
    return s._replace(followers=(*s.followers[:f], follower, *s.followers[f + 1 :]))
