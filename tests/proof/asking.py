"""What workers ask of the trainer while they hold a claim, as a model: the layout, and more room for a batch.

Beside the owner words (model.py, accesses.c) a ring has two small conversations, each over one word:

* layout: NONE → ASKING + w (a worker's compare-exchange) → PROPOSED → READY (the trainer's). Workers that hold a claim and need
  the layout wait until it is READY; whoever finds NONE meanwhile asks.
* room: a worker stores `need` in its slot and rings; the trainer gives the slot a larger payload, stores 0, and rings `grants`. A
  worker that gives up, because its batch is abandoned, leaves its need behind; the next order in that slot begins by clearing it.

One step is one shared access of a worker, or one verb of the trainer. A worker may be killed at each of its steps; its death is
seen arbitrarily late; the epoch may be abandoned between any two verbs. Waits have no end of their own here, so a missing post is
found: a worker that sleeps on `grants` wakes by a post of it and by nothing else, but for two things that in C are left to the
time-out of its wait: an abandoned batch, and the death of the one that was asking. Each worker has one slot with one chunk, which it
fills in four steps: claim, layout, room, finish.

Invariants: a worker writes only with a layout and into a payload that is large enough and that nobody exchanges while it is
written; the trainer settles the layout once. Every state must have a way to the end, in which every batch is delivered.

`BUGS` are mistakes that can be planted; each must be found. `explore` is model.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.model import Violation

BUGS = (
    "the dead asker is not undone",
    "recovery leaves the need of the dead",
    "one grant is posted for all",
    "the layout is settled without a ring",
    "a proposal is not rung for",
    "the need is cleared before the payload is there",
    "a worker writes before it looks whether it was granted",
    "the layout is accepted from one who still asks",
)
NONE, PROPOSED, READY = -1, -2, -3  # or the number of the worker that asks
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
    text: bool = False  # the layout text is whole
    ready: bool = True  # the trainer's bell
    grants: int = 0
    kills: int = 0  # left
    bumps: int = 0
    exchanging: int = -1  # planted: a slot whose payload is still to come


class Model:
    """As many slots as workers, with at most so many kills and bumps and, perhaps, one planted bug."""

    def __init__(self, workers: int, kills: int, bumps: int, bug: str = "") -> None:
        self.bug = bug
        self.first = State((Slot(),) * workers, (Worker(),) * workers, kills=kills, bumps=bumps)

    def is_complete(self, s: State) -> bool:
        return all(slot.is_delivered for slot in s.slots) and all(worker.at in (IDLE,) for worker in s.workers)

    def steps(self, s: State) -> Iterator[tuple[bool, State]]:
        """(is the ring's own doing, next state) for everything that may happen now."""
        for w, worker in enumerate(s.workers):
            yield from ((True, after) for after in self.worker_steps(s, w, worker))
            if s.kills and worker.at != DEAD:
                yield False, put_worker(s, w, worker._replace(at=DEAD))._replace(kills=s.kills - 1, ready=True)
        yield from ((True, after) for after in self.trainer_steps(s))
        if s.bumps and not self.is_complete(s):
            slots = tuple(
                slot._replace(word=VOID if slot.word == OPEN else slot.word, is_draining=True) if not slot.is_delivered else slot
                for slot in s.slots
            )
            # a sleeping worker is not rung for by a bump: it looks again by itself, at its time-out
            workers = tuple(
                worker._replace(at={SLEEPS_LAYOUT: LOOKING, SLEEPS_ROOM: NEEDING}.get(worker.at, worker.at)) for worker in s.workers
            )
            yield False, s._replace(slots=slots, workers=workers, bumps=s.bumps - 1, ready=True)

    # ------------------------------------------------------------ worker

    def worker_steps(self, s: State, w: int, me: Worker) -> Iterator[State]:
        def go(at: int) -> State:
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
                yield go(LAID_OUT)
            elif s.layout == NONE:
                yield put_worker(s, w, me._replace(at=ASKING))._replace(layout=w, text=False)
            else:
                yield go(SLEEPS_LAYOUT)
        elif me.at == ASKING:
            yield put_worker(s, w, me._replace(at=PROPOSING))._replace(text=True)
        elif me.at == PROPOSING:
            if s.layout != w:
                raise Violation(f"worker {w} proposes while the layout's word says {s.layout}")
            rings = self.bug != "a proposal is not rung for"
            yield put_worker(s, w, me._replace(at=LOOKING))._replace(layout=PROPOSED, ready=s.ready or rings)
        elif me.at == SLEEPS_LAYOUT:
            if s.grants:
                yield go(LOOKING)._replace(grants=s.grants - 1)
        elif me.at == LAID_OUT:
            assert slot is not None
            if slot.has_room:
                yield go(ROOMY)
            else:
                asked = put_slot(s, me.slot, slot._replace(need=True))
                eager = self.bug == "a worker writes before it looks whether it was granted"
                yield put_worker(asked, w, me._replace(at=ROOMY if eager else NEEDING))._replace(ready=True)
        elif me.at == NEEDING:
            assert slot is not None
            if not slot.need:
                yield go(ROOMY)
            elif slot.is_draining:
                yield self.finish(s, w, me, VOID)
            else:
                yield go(SLEEPS_ROOM)
        elif me.at == SLEEPS_ROOM:
            if s.grants:
                yield go(NEEDING)._replace(grants=s.grants - 1)
        elif me.at == ROOMY:
            assert slot is not None
            if s.layout != READY or not slot.has_room or s.exchanging == me.slot:
                raise Violation(f"worker {w} writes with layout {s.layout} into {slot}")
            yield go(WRITTEN)
        elif me.at == WRITTEN:
            yield self.finish(s, w, me, DONE)

    def finish(self, s: State, w: int, me: Worker, word: int) -> State:
        s = put_slot(s, me.slot, s.slots[me.slot]._replace(word=word))
        return put_worker(s, w, Worker())._replace(ready=True)

    # ------------------------------------------------------------ trainer

    def trainer_steps(self, s: State) -> Iterator[State]:
        """One verb; with nothing to do it empties its bell and sleeps, which is no state of its own: it looks at everything."""
        if s.exchanging >= 0:
            yield put_slot(s, s.exchanging, s.slots[s.exchanging]._replace(has_room=True))._replace(exchanging=-1)
            return
        if not s.ready:
            return
        verbs = list(self.verbs(s))
        yield from verbs or [s._replace(ready=False)]

    def verbs(self, s: State) -> Iterator[State]:
        posts = 1 if self.bug == "one grant is posted for all" else len(s.workers)
        accepts = s.layout == PROPOSED
        if self.bug == "the layout is accepted from one who still asks":
            accepts = s.layout != READY and s.layout != NONE
        if accepts:
            if not s.text:
                raise Violation("half a layout is settled")
            rings = 0 if self.bug == "the layout is settled without a ring" else posts
            yield s._replace(layout=READY, grants=min(s.grants + rings, 2 * len(s.workers)))
        for i, slot in enumerate(s.slots):
            if slot.need:
                if any(worker.slot == i and worker.at in (ROOMY, WRITTEN) for worker in s.workers):
                    raise Violation(f"the payload of slot {i} is exchanged while a worker writes into it")
                grown = s._replace(grants=min(s.grants + posts, 2 * len(s.workers)))
                if self.bug == "the need is cleared before the payload is there":
                    yield put_slot(grown, i, slot._replace(need=False))._replace(exchanging=i)
                else:
                    yield put_slot(grown, i, slot._replace(need=False, has_room=True))
            if slot.word == DONE and not slot.is_draining and not slot.is_delivered:
                yield put_slot(s, i, slot._replace(is_delivered=True))
            if slot.is_draining and slot.word in (DONE, VOID):
                yield put_slot(s, i, Slot(has_room=slot.has_room))._replace(ready=True)  # drained, and ordered anew
        for w, worker in enumerate(s.workers):
            if worker.at == DEAD:
                yield self.recover(s, w, worker)

    def recover(self, s: State, w: int, dead: Worker) -> State:
        if s.layout == w and self.bug != "the dead asker is not undone":
            s = s._replace(layout=NONE)
        if dead.slot >= 0 and s.slots[dead.slot].word == CLAIMED_WORD:
            slot = s.slots[dead.slot]
            need = slot.need and self.bug == "recovery leaves the need of the dead"
            s = put_slot(s, dead.slot, slot._replace(word=VOID if slot.is_draining else OPEN, need=need))
        # who waits for the layout must look again: the dead one may have been the one that asked
        workers = tuple(worker._replace(at=LOOKING) if worker.at == SLEEPS_LAYOUT else worker for worker in s.workers)
        return put_worker(s._replace(workers=workers), w, Worker())

    def check(self, s: State) -> None:
        for w, worker in enumerate(s.workers):
            if worker.at not in (IDLE, DEAD) and s.slots[worker.slot].word != CLAIMED_WORD:
                raise Violation(f"worker {w} is at {worker.at} without its claim")
        for i, slot in enumerate(s.slots):
            if slot.need and slot.word == OPEN:
                raise Violation(f"slot {i} needs room for nobody, and will when somebody writes into it: {slot}")


def put_slot(s: State, i: int, slot: Slot) -> State:
    return s._replace(slots=(*s.slots[:i], slot, *s.slots[i + 1 :]))


def put_worker(s: State, w: int, worker: Worker) -> State:
    return s._replace(workers=(*s.workers[:w], worker, *s.workers[w + 1 :]))
