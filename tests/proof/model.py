"""A model of the slot protocol that is small enough to explore every interleaving.

One step is one shared access of a worker, or one action of the trainer (one C call under the GIL). A worker may be killed at any
of its steps, its death is seen arbitrarily late, leases are held forever or end in any order, and the epoch may be abandoned
between any two actions of the trainer. The invariants of src/protocol.h are checked in every reachable state:

* a worker writes rows only while the chunk's word names it and this order, in a slot that is ordered or draining;
* no chunk has two live writers; a free or leased slot has no open and no claimed word;
* batches 0, 1, 2, ... are delivered once each, every row filled for its own order; at least one slot is not leased.

A state in which neither trainer nor workers can move must be complete, and from every state completion must be possible without
outside help (no kill, no bump, no lease returned). That is checked backwards over all edges, so it finds a ring that could run
forever without delivering as well as one that stops.

Waits have no timeout here: only the bell or a death wakes a sleeping trainer, so one missing post is found. Scans are coarser
than in the C code: a free worker may claim any word that is open now, which includes every real scan. Memory is sequentially
consistent; race.c tests memory ordering.

Static mode, errors and repacking are not in this model; test_ring_machine.py and race.c test them in the real code.

`BUGS` are mistakes that can be planted; each must be found. Command line: python model.py WORKERS SLOTS CHUNKS BATCHES KILLS
BUMPS [BUG]. The largest run so far, 2 2 2 2 1 1, has 841,705 states and holds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

BUGS = (
    "ready is stored by a worker without the order",
    "a ticket is taken before the claim",
    "words do not carry the order",
    "slots are freed at the bump",
    "voiding reads and then stores",
    "a stopped worker is recovered",
    "recovery skips draining slots",
    "the replacement starts before recovery",
    "words are published before the order's fields",
    "nothing is copied out",
    "the last to finish posts only if all is DONE",
    "a death does not wake the trainer",
    "the trainer looks before it clears its bell",
)
OPEN, DONE, VOID = 0, -1, -2  # or w + 1 for a claim by worker w
FREE, ORDERED, LEASED, DRAINING = range(4)
IDLE, PICKED, CLAIMED, FILLED, FINISHED, MARKING, DEAD, STOPPED = range(8)
AWAKE, EMPTIED, ASLEEP = range(3)


class Slot(NamedTuple):
    state: int = FREE
    order: int = 0  # newest order published here
    fields: int = 0  # the order that the plain fields describe
    step: int = 0
    words: tuple[tuple[int, int], ...] = ()  # (order, own) for each chunk
    rows: tuple[int, ...] = ()  # for each chunk, the order for which its rows were filled
    flag: bool = False  # planted: a stored "ready"
    ticket: int = 0  # planted


class Worker(NamedTuple):
    at: int = IDLE
    slot: int = -1
    chunk: int = -1
    order: int = 0
    resumes: int = IDLE  # the step at which a stopped worker resumes


class State(NamedTuple):
    slots: tuple[Slot, ...]
    workers: tuple[Worker, ...]
    trainer: int = AWAKE
    bell: bool = False
    ordered: int = 0  # batches published in this generation
    delivered: int = 0
    orders: int = 0  # orders published in the ring's life
    kills: int = 0  # kills that are left
    bumps: int = 0
    pending: tuple[int, ...] = ()  # planted: the rest of an action that is not one step


class Violation(Exception):
    """An invariant does not hold."""


class Model:
    """A ring of these sizes, with an optional planted bug."""

    def __init__(self, workers: int, slots: int, chunks: int, batches: int, kills: int, bumps: int, bug: str = "") -> None:
        self.chunks, self.batches, self.bug = chunks, batches, bug
        self.first = State(
            (Slot(words=((0, VOID),) * chunks, rows=(0,) * chunks),) * slots, (Worker(),) * workers, kills=kills, bumps=bumps
        )

    def is_complete(self, s: State) -> bool:
        return s.delivered == self.batches

    # ------------------------------------------------------------ steps

    def steps(self, s: State) -> Iterator[tuple[bool, State]]:
        """Yields (whether the ring itself makes the step, next state) for every possible step."""
        for w, worker in enumerate(s.workers):
            for after in self.worker_steps(s, w, worker):
                yield True, after
            if s.kills and worker.at not in (DEAD, STOPPED):
                killed = worker._replace(at=DEAD)
                if self.bug == "a stopped worker is recovered":
                    killed = worker._replace(at=STOPPED, resumes=worker.at)
                wakes = self.bug != "a death does not wake the trainer"
                yield False, set_worker(s, w, killed)._replace(kills=s.kills - 1, bell=s.bell or wakes)
        for after in self.trainer_steps(s):
            yield True, after
        for i, slot in enumerate(s.slots):
            if slot.state == LEASED:
                yield False, set_slot(s, i, slot._replace(state=FREE))
        if s.bumps and not self.is_complete(s) and not s.pending:
            yield False, self.bump(s)

    def worker_steps(self, s: State, w: int, me: Worker) -> Iterator[State]:
        if me.at == IDLE:
            for i, slot in enumerate(s.slots):
                for c, (order, own) in enumerate(slot.words):
                    if own != OPEN:
                        continue
                    if self.bug == "a ticket is taken before the claim":
                        if slot.ticket == c:
                            yield set_worker(set_slot(s, i, slot._replace(ticket=c + 1)), w, Worker(PICKED, i, c, order))
                    elif self.bug == "words do not carry the order":
                        yield set_worker(s, w, Worker(PICKED, i, c, slot.fields))
                    else:
                        yield set_worker(set_word(s, i, c, order, w + 1), w, Worker(CLAIMED, i, c, order))
        elif me.at == PICKED:
            order, own = s.slots[me.slot].words[me.chunk]
            if own == OPEN:
                yield set_worker(set_word(s, me.slot, me.chunk, order, w + 1), w, me._replace(at=CLAIMED))
            else:
                yield set_worker(s, w, Worker())
        elif me.at == CLAIMED:
            slot = s.slots[me.slot]
            word = slot.words[me.chunk]
            if slot.state not in (ORDERED, DRAINING) or word[1] != w + 1:
                raise Violation(f"worker {w} writes into a slot in state {slot.state} with word {word}")
            filled = me.order if self.bug == "words do not carry the order" else slot.fields
            rows = tuple(filled if c == me.chunk else r for c, r in enumerate(slot.rows))
            yield set_worker(set_slot(s, me.slot, slot._replace(rows=rows)), w, me._replace(at=FILLED))
        elif me.at == FILLED:
            order, own = s.slots[me.slot].words[me.chunk]
            if own != w + 1 or (order != me.order and self.bug != "words do not carry the order"):
                raise Violation(f"worker {w} finishes a chunk with word {(order, own)}")
            yield set_worker(set_word(s, me.slot, me.chunk, order, DONE), w, me._replace(at=FINISHED))
        elif me.at == FINISHED:
            owns = [own for _, own in s.slots[me.slot].words]
            rings = all(own == DONE for own in owns) if "all is DONE" in self.bug else all(own < 0 for own in owns)
            if rings and self.bug.startswith("ready is stored"):
                yield set_worker(s, w, me._replace(at=MARKING))
            else:
                yield set_worker(s, w, Worker())._replace(bell=s.bell or rings)
        elif me.at == MARKING:
            yield set_worker(set_slot(s, me.slot, s.slots[me.slot]._replace(flag=True)), w, Worker())._replace(bell=True)
        elif me.at == STOPPED:
            yield set_worker(s, w, me._replace(at=me.resumes))

    def trainer_steps(self, s: State) -> Iterator[State]:
        if s.pending:
            yield self.finish_action(s)
            return
        actions = list(self.actions(s))
        if s.trainer == ASLEEP:
            if s.bell:
                yield s._replace(trainer=AWAKE)
        elif self.bug == "the trainer looks before it clears its bell":
            yield from actions
            if s.trainer == AWAKE and not actions:
                yield s._replace(trainer=EMPTIED)
            elif s.trainer == EMPTIED:
                yield s._replace(trainer=ASLEEP, bell=False)
        elif actions:
            yield from (v._replace(trainer=AWAKE) for v in actions)
        elif s.trainer == AWAKE:
            yield s._replace(trainer=EMPTIED, bell=False)
        elif not self.is_complete(s):
            yield s._replace(trainer=ASLEEP)

    def actions(self, s: State) -> Iterator[State]:
        """Yields the states after every action that the trainer can take without waiting."""
        for w, worker in enumerate(s.workers):
            if worker.at == DEAD:
                if self.bug == "the replacement starts before recovery":
                    yield set_worker(s, w, Worker())._replace(pending=(w,))
                else:
                    yield set_worker(self.recover(s, w), w, Worker())
            elif worker.at == STOPPED:
                yield self.recover(s, w)
        free = [i for i, slot in enumerate(s.slots) if slot.state == FREE]
        for i, slot in enumerate(s.slots):
            if slot.state == DRAINING and all(own < 0 for _, own in slot.words):
                yield set_slot(s, i, slot._replace(state=FREE))
            if slot.state == ORDERED and slot.step == s.delivered:
                is_ready = slot.flag if self.bug.startswith("ready is stored") else all(own == DONE for _, own in slot.words)
                if is_ready:
                    yield self.deliver(s, i, slot)
        if free and s.ordered < self.batches:
            yield self.publish(s, free[0])

    def publish(self, s: State, i: int) -> State:
        order = s.orders + 1
        words = ((order, OPEN),) * self.chunks
        slot = Slot(ORDERED, order, order, s.ordered, words, s.slots[i].rows)
        s = s._replace(orders=order, ordered=s.ordered + 1)
        if self.bug.startswith("words are published"):
            return set_slot(s, i, slot._replace(fields=s.slots[i].fields))._replace(pending=(i,))
        return set_slot(s, i, slot)

    def deliver(self, s: State, i: int, slot: Slot) -> State:
        if slot.rows != (slot.order,) * self.chunks:
            raise Violation(f"batch {slot.step} of order {slot.order} is delivered with rows of orders {slot.rows}")
        leased = sum(other.state == LEASED for other in s.slots)
        must_copy = leased >= len(s.slots) - 1 and self.bug != "nothing is copied out"
        return set_slot(s, i, slot._replace(state=FREE if must_copy else LEASED))._replace(delivered=s.delivered + 1)

    def bump(self, s: State) -> State:
        s = s._replace(bumps=s.bumps - 1, ordered=0, delivered=0, trainer=AWAKE)
        if self.bug == "voiding reads and then stores":
            seen = tuple(
                i * self.chunks + c
                for i, slot in enumerate(s.slots)
                if slot.state == ORDERED
                for c, (_, own) in enumerate(slot.words)
                if own == OPEN
            )
            return s._replace(pending=(-1, *seen))
        return self.abandon(s)

    def abandon(self, s: State) -> State:
        for i, slot in enumerate(s.slots):
            if slot.state == ORDERED:
                words = tuple((order, VOID if own == OPEN else own) for order, own in slot.words)
                state = FREE if self.bug == "slots are freed at the bump" else DRAINING
                s = set_slot(s, i, slot._replace(state=state, words=words))
        return s

    def recover(self, s: State, w: int) -> State:
        for i, slot in enumerate(s.slots):
            if slot.state == DRAINING and self.bug == "recovery skips draining slots":
                continue
            becomes = VOID if slot.state == DRAINING else OPEN
            words = tuple((order, becomes if own == w + 1 else own) for order, own in slot.words)
            s = set_slot(s, i, slot._replace(words=words))
        return s

    def finish_action(self, s: State) -> State:
        """Runs the second half of an action that a planted bug has split."""
        what, s = s.pending, s._replace(pending=())
        if self.bug == "the replacement starts before recovery":
            return self.recover(s, what[0])
        if self.bug == "voiding reads and then stores":
            for place in what[1:]:
                i, c = divmod(place, self.chunks)
                s = set_word(s, i, c, s.slots[i].words[c][0], VOID)
            return self.abandon(s)
        slot = s.slots[what[0]]
        return set_slot(s, what[0], slot._replace(fields=slot.order))

    # ------------------------------------------------------------ checks

    def check(self, s: State) -> None:
        if s.pending:
            return
        for i, slot in enumerate(s.slots):
            writers = [(x.slot, x.chunk) for x in s.workers if x.at in (CLAIMED, FILLED) and x.slot == i]
            if len(writers) != len(set(writers)):
                raise Violation(f"a chunk of slot {i} has two live writers")
            if slot.state in (FREE, LEASED) and any(own >= 0 for _, own in slot.words):
                raise Violation(f"slot {i} is in state {slot.state} with words {slot.words}")
        if all(slot.state == LEASED for slot in s.slots) and self.bug != "nothing is copied out":
            raise Violation("every slot is leased")


def set_slot(s: State, i: int, slot: Slot) -> State:
    return s._replace(slots=(*s.slots[:i], slot, *s.slots[i + 1 :]))


def set_word(s: State, i: int, c: int, order: int, own: int) -> State:
    words = s.slots[i].words
    return set_slot(s, i, s.slots[i]._replace(words=(*words[:c], (order, own), *words[c + 1 :])))


def set_worker(s: State, w: int, worker: Worker) -> State:
    return s._replace(workers=(*s.workers[:w], worker, *s.workers[w + 1 :]))


def explore(model: Model) -> tuple[str, int]:
    """Explores every interleaving. Returns the verdict ("holds", "violation: ..." or "stuck: ...") and the number of states."""
    numbers = {model.first: 0}
    before: list[list[int]] = [[]]  # for each state, the states from which the ring itself reaches it
    complete = []
    todo = deque([model.first])
    while todo:
        state = todo.popleft()
        number = numbers[state]
        if model.is_complete(state):
            complete.append(number)
        try:
            for is_own, after in model.steps(state):
                found = numbers.get(after)
                if found is None:
                    model.check(after)
                    found = numbers[after] = len(numbers)
                    before.append([])
                    todo.append(after)
                if is_own:
                    before[found].append(number)
        except Violation as error:
            return f"violation: {error}", len(numbers)
    ends = set(complete)
    while complete:
        for number in before[complete.pop()]:
            if number not in ends:
                ends.add(number)
                complete.append(number)
    if len(ends) < len(numbers):
        return f"stuck: {len(numbers) - len(ends)} states have no way to completion", len(numbers)
    return "holds", len(numbers)


if __name__ == "__main__":
    print(*explore(Model(*map(int, sys.argv[1:7]), *sys.argv[7:])))
