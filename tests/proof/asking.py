"""A model of the workers' requests to the trainer while they hold a claim: for the layout, and for more memory for a batch.

Beside the owner words (model.py, accesses.c) a ring has two small protocols, each over one word:

* layout: NONE → ASKING + w (a worker's compare-exchange) → PROPOSED → READY (set by the trainer). Workers that hold a claim and
  need the layout wait until it is READY; a worker that finds NONE in the meantime asks.
* room: a worker stores `need` in its slot and posts the trainer's bell; the trainer gives the slot a larger payload, stores 0,
  and posts `grants`. A worker that gives up because its batch is abandoned leaves its need in place; the next order in that slot
  clears it first.

One step is one shared access of a worker, or one action of the trainer. A worker may be killed at each of its steps, its death is
seen arbitrarily late, and the epoch may be abandoned between any two actions. Waits have no timeout here, so that a missing post
is found: only a post of `grants` wakes a worker that sleeps on it. Two exceptions are left to the timeout in C: an abandoned
batch, and the death of the worker that was asking. Each worker has one slot with one chunk, which it fills in four steps: claim,
layout, room, finish.

Invariants: a worker writes only with a layout, and only into a payload that is large enough and not replaced during the write;
the trainer sets the layout once. From every state the end can be reached, in which every batch is delivered.

`BUGS` are mistakes that can be planted; each must be found. `explore` is model.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.model import Violation

BUGS = (
    "the request of a dead worker is not undone",
    "recovery leaves the need of a dead worker",
    "one grant is posted for all workers",
    "the layout is accepted without a post",
    "a proposal does not post the bell",
    "the need is cleared before the payload exists",
    "a worker writes before it checks the grant",
    "the layout is accepted before it is proposed",
)
NONE, PROPOSED, READY = -1, -2, -3  # NONE, or the number of the worker that asks
IDLE, CLAIMED, LOOKING, ASKING, PROPOSING, SLEEPS_LAYOUT, LAID_OUT, NEEDING, SLEEPS_ROOM, ROOMY, WRITTEN, DEAD = range(12)
OPEN, CLAIMED_WORD, DONE, VOID = range(4)


class Slot(NamedTuple):
    word: int = OPEN
    is_draining: bool = False
    has_room: bool = False
    need: bool = False
    is_delivered: bool = False


class Worker(NamedTuple):
    at: int = IDLE
    slot: int = -1


class State(NamedTuple):
    slots: tuple[Slot, ...]
    workers: tuple[Worker, ...]
    layout: int = NONE
    text: bool = False  # the layout text is complete
    bell: bool = True  # the trainer's bell is posted
    grants: int = 0
    kills: int = 0  # kills that are left
    bumps: int = 0
    exchanging: int = -1  # planted: a slot whose payload is still to be allocated


class Model:
    """A ring with as many slots as workers, at most `kills` kills and `bumps` bumps, and an optional planted bug."""

    def __init__(self, workers: int, kills: int, bumps: int, bug: str = "") -> None:
        self.bug = bug
        self.first = State((Slot(),) * workers, (Worker(),) * workers, kills=kills, bumps=bumps)

    def is_complete(self, s: State) -> bool:
        return all(slot.is_delivered for slot in s.slots) and all(worker.at in (IDLE,) for worker in s.workers)

    def steps(self, s: State) -> Iterator[tuple[bool, State]]:
        """Yields (whether the ring itself makes the step, next state) for every possible step."""
        for w, worker in enumerate(s.workers):
            yield from ((True, after) for after in self.worker_steps(s, w, worker))
            if s.kills and worker.at != DEAD:
                yield False, put_worker(s, w, worker._replace(at=DEAD))._replace(kills=s.kills - 1, bell=True)
        yield from ((True, after) for after in self.trainer_steps(s))
        if s.bumps and not self.is_complete(s):
            slots = tuple(
                slot._replace(word=VOID if slot.word == OPEN else slot.word, is_draining=True) if not slot.is_delivered else slot
                for slot in s.slots
            )
            # a bump does not wake a sleeping worker, which looks again after its timeout
            workers = tuple(
                worker._replace(at={SLEEPS_LAYOUT: LOOKING, SLEEPS_ROOM: NEEDING}.get(worker.at, worker.at)) for worker in s.workers
            )
            yield False, s._replace(slots=slots, workers=workers, bumps=s.bumps - 1, bell=True)

    # ------------------------------------------------------------ worker

    def worker_steps(self, s: State, w: int, me: Worker) -> Iterator[State]:
        def at_step(at: int) -> State:
            return put_worker(s, w, me._replace(at=at))

        slot = s.slots[me.slot] if me.slot >= 0 else None
        if me.at == IDLE:
            for i, found in enumerate(s.slots):
                if found.word == OPEN:
                    yield put_worker(put_slot(s, i, found._replace(word=CLAIMED_WORD)), w, Worker(CLAIMED, i))
        elif me.at in (CLAIMED, LOOKING):
            assert slot is not None
            if slot.is_draining:
                yield self.finish(s, w, me, VOID)
            elif s.layout == READY:
                yield at_step(LAID_OUT)
            elif s.layout == NONE:
                yield put_worker(s, w, me._replace(at=ASKING))._replace(layout=w, text=False)
            else:
                yield at_step(SLEEPS_LAYOUT)
        elif me.at == ASKING:
            yield put_worker(s, w, me._replace(at=PROPOSING))._replace(text=True)
        elif me.at == PROPOSING:
            if s.layout != w:
                raise Violation(f"worker {w} proposes although the layout's word is {s.layout}")
            rings = self.bug != "a proposal does not post the bell"
            yield put_worker(s, w, me._replace(at=LOOKING))._replace(layout=PROPOSED, bell=s.bell or rings)
        elif me.at == SLEEPS_LAYOUT:
            if s.grants:
                yield at_step(LOOKING)._replace(grants=s.grants - 1)
        elif me.at == LAID_OUT:
            assert slot is not None
            if slot.has_room:
                yield at_step(ROOMY)
            else:
                asked = put_slot(s, me.slot, slot._replace(need=True))
                is_early = self.bug == "a worker writes before it checks the grant"
                yield put_worker(asked, w, me._replace(at=ROOMY if is_early else NEEDING))._replace(bell=True)
        elif me.at == NEEDING:
            assert slot is not None
            if not slot.need:
                yield at_step(ROOMY)
            elif slot.is_draining:
                yield self.finish(s, w, me, VOID)
            else:
                yield at_step(SLEEPS_ROOM)
        elif me.at == SLEEPS_ROOM:
            if s.grants:
                yield at_step(NEEDING)._replace(grants=s.grants - 1)
        elif me.at == ROOMY:
            assert slot is not None
            if s.layout != READY or not slot.has_room or s.exchanging == me.slot:
                raise Violation(f"worker {w} writes with layout {s.layout} into {slot}")
            yield at_step(WRITTEN)
        elif me.at == WRITTEN:
            yield self.finish(s, w, me, DONE)

    def finish(self, s: State, w: int, me: Worker, word: int) -> State:
        s = put_slot(s, me.slot, s.slots[me.slot]._replace(word=word))
        return put_worker(s, w, Worker())._replace(bell=True)

    # ------------------------------------------------------------ trainer

    def trainer_steps(self, s: State) -> Iterator[State]:
        """Yields the states after one action. With nothing to do, the trainer clears its bell and sleeps, because it has looked
        at everything.
        """
        if s.exchanging >= 0:
            yield put_slot(s, s.exchanging, s.slots[s.exchanging]._replace(has_room=True))._replace(exchanging=-1)
            return
        if not s.bell:
            return
        actions = list(self.actions(s))
        yield from actions or [s._replace(bell=False)]

    def actions(self, s: State) -> Iterator[State]:
        posts = 1 if self.bug == "one grant is posted for all workers" else len(s.workers)
        accepts = s.layout == PROPOSED
        if self.bug == "the layout is accepted before it is proposed":
            accepts = s.layout != READY and s.layout != NONE
        if accepts:
            if not s.text:
                raise Violation("an incomplete layout is accepted")
            rings = 0 if self.bug == "the layout is accepted without a post" else posts
            yield s._replace(layout=READY, grants=min(s.grants + rings, 2 * len(s.workers)))
        for i, slot in enumerate(s.slots):
            if slot.need:
                if any(worker.slot == i and worker.at in (ROOMY, WRITTEN) for worker in s.workers):
                    raise Violation(f"the payload of slot {i} is replaced while a worker writes into it")
                grown = s._replace(grants=min(s.grants + posts, 2 * len(s.workers)))
                if self.bug == "the need is cleared before the payload exists":
                    yield put_slot(grown, i, slot._replace(need=False))._replace(exchanging=i)
                else:
                    yield put_slot(grown, i, slot._replace(need=False, has_room=True))
            if slot.word == DONE and not slot.is_draining and not slot.is_delivered:
                yield put_slot(s, i, slot._replace(is_delivered=True))
            if slot.is_draining and slot.word in (DONE, VOID):
                yield put_slot(s, i, Slot(has_room=slot.has_room))._replace(bell=True)  # drained, then ordered again
        for w, worker in enumerate(s.workers):
            if worker.at == DEAD:
                yield self.recover(s, w, worker)

    def recover(self, s: State, w: int, dead: Worker) -> State:
        if s.layout == w and self.bug != "the request of a dead worker is not undone":
            s = s._replace(layout=NONE)
        if dead.slot >= 0 and s.slots[dead.slot].word == CLAIMED_WORD:
            slot = s.slots[dead.slot]
            need = slot.need and self.bug == "recovery leaves the need of a dead worker"
            s = put_slot(s, dead.slot, slot._replace(word=VOID if slot.is_draining else OPEN, need=need))
        # workers that wait for the layout must look again, because the dead worker may have been the one that asked
        workers = tuple(worker._replace(at=LOOKING) if worker.at == SLEEPS_LAYOUT else worker for worker in s.workers)
        return put_worker(s._replace(workers=workers), w, Worker())

    def check(self, s: State) -> None:
        for w, worker in enumerate(s.workers):
            if worker.at not in (IDLE, DEAD) and s.slots[worker.slot].word != CLAIMED_WORD:
                raise Violation(f"worker {w} is at {worker.at} without its claim")
        for i, slot in enumerate(s.slots):
            if slot.need and slot.word == OPEN:
                raise Violation(f"slot {i} has a need although it is open, so it would be granted during a write: {slot}")


def put_slot(s: State, i: int, slot: Slot) -> State:
    return s._replace(slots=(*s.slots[:i], slot, *s.slots[i + 1 :]))


def put_worker(s: State, w: int, worker: Worker) -> State:
    return s._replace(workers=(*s.workers[:w], worker, *s.workers[w + 1 :]))
