"""The trainer's end of a ring: publish orders, check them, lease ready slots, and recover the claims of dead workers.

Only the process that made the ring may use these classes (a forked child is refused). The protocol's mutex is the GIL or, in a Python
without the GIL, the critical section of the ring: it is held in every call, and every step is one C call that cannot be interrupted.
Nothing here waits. A critical section is nothing in a Python with the GIL, and no fork finds it taken, which a lock would be.
"""

cimport cython

include "ring.pxi"

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport free, malloc
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR
from libc.string cimport memcpy, memset

import os

from numpy import ndarray

include "leases.pxi"

cdef extern from *:
    """
    #include <pthread.h>
    static void shml_count_batch(shml_header *h, uint64_t nrows, uint64_t nbytes, int64_t epoch, int64_t step) {
        shml_count(&h->batches, 1);
        shml_count(&h->samples, nrows);
        shml_count(&h->nbytes, nbytes);
        atomic_store_explicit(&h->epoch, (uint64_t)epoch, memory_order_relaxed);
        atomic_store_explicit(&h->step, (uint64_t)step, memory_order_relaxed);
    }
    static void shml_in_child(void) { shml_num_forks++; }
    static int shml_watch_forks(void) { return pthread_atfork(NULL, NULL, shml_in_child); }
    """
    int shml_watch_forks()
    void shml_count_batch(shml_header *h, uint64_t nrows, uint64_t nbytes, int64_t epoch, int64_t step)

if shml_watch_forks():
    raise MemoryError

# Results of `look` for an ordered slot.
FILLING = 0   # a chunk is unclaimed or being filled
READY = 1     # every row is in place
FAILED = 2    # a chunk ended in an error, or was given up because it crashed its workers or took too long
REPACK = 3    # its samples do not have one shape, so it must be ordered again as one packed chunk
# Results of `state`. Stats readers see a slot with pending copies as leased.
FREE = SHML_FREE
HELD = SHML_HELD
ORDERED = SHML_ORDERED
LEASED = SHML_LEASED
DRAINING = SHML_DRAINING
PARKED = SHML_PARKED
PENDING_COPIES = SHML_PENDING_COPIES
MAX_WORKERS = SHML_MAX_WORKERS
ANYONE = SHML_ANYONE
ANY_SLOT = SHML_ANY_SLOT

cdef uint64_t CHUNK_WORK_NS = 300_000  # least work of a chunk, below which claims cost too much


def control_nbytes(uint32_t num_slots, uint32_t num_workers, *, uint64_t order_capacity, uint64_t text_capacity,
                   uint64_t layout_capacity):
    """Return the size in bytes of the control block for a ring.

    Args:
        num_slots: number of slots.
        num_workers: number of worker records.
        order_capacity: bytes of each slot's area for an order.
        text_capacity: bytes of each slot's area for an error text or a note.
        layout_capacity: bytes of the area for the layout.
    """
    return shml_plan(NULL, num_slots, num_workers, order_capacity, text_capacity, layout_capacity)


include "share.pxi"
include "local_ring.pxi"
include "orders.pxi"
include "hosting.pxi"
include "follower.pxi"


cdef class TrainerRing(HostRing):
    """The trainer's end of a ring, with all its operations. The arguments are those of LocalRing.

    Attributes:
        is_draining: whether any slot is draining, so that `drain` must be called.
    """

    cdef uint64_t _look_ns
    cdef int _awaited
    cdef readonly bint is_draining

    # ------------------------------------------------------------ looking and leasing

    @cython.critical_section
    def look(self, int slot):
        """Return FILLING, READY, FAILED or REPACK, from the owner words. Cost: about 0.1 us."""
        self._slot(slot)
        if self._local_ring.places[slot].state != SHML_ORDERED:
            raise ValueError(f"slot {slot} is not ordered: its state is {self._local_ring.places[slot].state}")
        cdef shml_status status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed:
            return FILLING
        if status.first_bad >= 0 and status.bad_own == SHML_POISON:
            return FAILED
        if self._ring.slots[slot].repack == self._local_ring.places[slot].order or status.num_void:
            return REPACK
        return FAILED if status.first_bad >= 0 else READY

    @cython.critical_section
    def failure(self, int slot):
        """Return (chunk, text) of a FAILED slot: the lowest chunk that failed and the worker's error text.

        `text` is None if the chunk was poisoned. If the text area has another chunk's error, open the chunk again and return
        (chunk, b""); the caller must ring the workers and check the slot again later. So the message does not depend on the order
        of failures.
        """
        self._slot(slot)
        cdef shml_status status = shml_inspect(&self._ring, slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._local_ring.places[slot]
        if place.state != SHML_ORDERED:
            raise ValueError(f"slot {slot} is not ordered: its state is {place.state}")
        if status.first_bad < 0 or status.num_open or status.num_claimed:
            raise ValueError(f"slot {slot} has not failed")
        if status.bad_own == SHML_POISON:
            return status.first_bad, None
        if record.err != (place.order << 16 | <uint64_t>(status.first_bad + 1)):
            shml_reopen(&self._ring, slot, status.first_bad, place.reserved)
            return status.first_bad, b""
        cdef uint64_t nbytes = min(record.text_nbytes, self._ring.header.text_capacity)
        return status.first_bad, (<const char *>shml_text_area(&self._ring, slot))[:nbytes]

    @cython.critical_section
    def rows(self, int slot):
        """Return (nrows, nchunks) of the slot's order."""
        self._slot(slot)
        return self._ring.slots[slot].nrows, self._ring.slots[slot].nchunks

    @cython.critical_section
    def first_row(self, int slot, int chunk):
        """Return the first row of a chunk of the slot's order."""
        self._slot(slot)
        return shml_first_row(self._ring.slots[slot].nrows, self._ring.slots[slot].nchunks, chunk)

    @cython.critical_section
    def note(self, int slot):
        """Return the worker's note with a READY batch of one chunk; empty without a note."""
        self._slot(slot)
        cdef uint64_t nbytes = min(self._ring.slots[slot].note_nbytes, self._ring.header.text_capacity)
        return (<const char *>shml_text_area(&self._ring, slot))[:nbytes]

    @cython.critical_section
    def bytes_at(self, int slot, uint64_t offset, uint64_t nbytes):
        """Return a copy of `nbytes` bytes of a slot's payload from `offset` on, for a batch that has failed and has no lease."""
        self._slot(slot)
        cdef shml_place *place = &self._local_ring.places[slot]
        if place.map == NULL or offset + nbytes > place.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} end beyond the slot of {place.nbytes}")
        return (<const char *>place.map.base + place.offset)[offset:offset + nbytes]

    @cython.critical_section
    def need_nbytes(self, int slot):
        """Return the payload size in bytes that the slot's worker has requested; 0 if it has not."""
        self._slot(slot)
        return self._ring.slots[slot].need_nbytes

    @cython.critical_section
    def needy(self):
        """Return a slot whose worker waits for a larger payload; -1 if there is none."""
        return self._needy()

    cdef int _needy(self):
        cdef int slot
        for slot in range(self.num_slots):
            if self._ring.slots[slot].need_nbytes != 0 and self._local_ring.places[slot].state in (SHML_ORDERED, SHML_DRAINING):
                return slot
        return -1

    @cython.critical_section
    def grant(self, int slot):
        """Tell the slot's worker that the slot now has the requested payload."""
        self._slot(slot)
        self._ring.header.num_grown += 1
        self._ring.slots[slot].need_nbytes = 0

    @cython.critical_section
    def lease(self, int slot):
        """Lease a READY slot. The slot is kept until the lease and every tensor made from it have died."""
        self._slot(slot)
        if self.look(slot) != READY:
            raise ValueError(f"slot {slot} is not ready")
        if self._local_ring.places[slot].map == NULL:
            raise ValueError(f"slot {slot} has no payload")
        return self._lease(slot, shml_now_ns())

    @cython.critical_section
    def lease_again(self, int slot):
        """Return another lease of a slot that is leased; None if its lease has ended."""
        self._slot(slot)
        cdef Lease lease = Lease.__new__(Lease)
        if not shml_lease_try_keep(&self._local_ring.places[slot].lease):
            return None
        lease._lease = &self._local_ring.places[slot].lease
        return lease

    @cython.critical_section
    def take(self, Order order, bint has_looked=False):
        """Return the lease of an order if it is ready and the trainer has nothing else to do; otherwise None.

        The trainer has something else to do if a check for deaths is due, a worker requests a layout or more room, a slot drains,
        or the batch has a note with news. One call in place of `look`, `lease` and the checks between them.

        Args:
            order: a published order.
            has_looked: ignore that a check for deaths is due.
        """
        self._guard()
        cdef int slot = order.slot
        cdef shml_status status
        cdef shml_slot *record
        cdef uint64_t now = shml_now_ns()
        if slot < 0 or self._local_ring.places[slot].state != SHML_ORDERED or (now >= self._look_ns and not has_looked):
            return None
        if self.is_draining or self._ring.header.layout_state == SHML_LAYOUT_PROPOSED or self._needy() >= 0:
            return None
        record = &self._ring.slots[slot]
        status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed or status.num_void or status.first_bad >= 0:
            return None
        if record.note_nbytes > 1 or (record.note_nbytes == 1 and shml_text_area(&self._ring, slot)[0] != 0):
            return None
        if record.repack == self._local_ring.places[slot].order or self._local_ring.places[slot].map == NULL:
            return None
        return self._lease(slot, now)

    @cython.critical_section
    def must_sleep(self, Order order):
        """Return whether the trainer can only sleep until the order's slot is final; if so, `begin_wait` has been called.

        Return False if the order is ready, or if there is anything else to do. The caller must call `end_wait` in both cases. One
        call in place of `begin_wait` and the checks before and after it.
        """
        self._guard()
        cdef int slot = order.slot
        cdef shml_status status
        if slot < 0 or self._local_ring.places[slot].state != SHML_ORDERED or self.is_draining:
            return False
        if self._ring.header.layout_state != SHML_LAYOUT_READY or self._needy() >= 0:
            return False
        status = shml_inspect(&self._ring, slot)
        if not (status.num_open or status.num_claimed) or status.first_bad >= 0:
            return False
        self.begin_wait(slot)
        status = shml_inspect(&self._ring, slot)
        return (status.num_open or status.num_claimed) and self._needy() < 0

    @property
    @cython.critical_section
    def must_look(self):
        """Return whether a check for deaths is due. If so, `take` returns None until `look_again` was called."""
        return shml_now_ns() >= self._look_ns

    cdef Lease _lease(self, int slot, uint64_t now):
        cdef Lease lease = Lease.__new__(Lease)
        if self._shared is not None:
            shml_renew(&self._local_ring.places[slot])
        self._local_ring.places[slot].leased_ns = now
        self._delivering = slot
        lease.used_nbytes = self._ring.slots[slot].used_nbytes
        lease.has_note = self._ring.slots[slot].note_nbytes != 0
        lease._lease = shml_lease_begin(self._local_ring, slot)
        self._ring.slots[slot].state = SHML_LEASED
        return lease

    # ------------------------------------------------------------ abandoning and recovering

    @cython.critical_section
    def void(self):
        """Abandon every order: unclaimed chunks become final, claimed ones are left to their workers. Leases are unchanged."""
        self._guard()
        cdef uint64_t now = shml_now_ns()
        shml_record_of_none(&self._ring, self.num_workers, SHML_EVENT_ABANDON, now, now)
        self._ring.header.generation += 1
        for slot in range(self.num_slots):
            if self._local_ring.places[slot].state == SHML_ORDERED:
                shml_void(&self._ring, slot)
                self._set_state(slot, SHML_DRAINING)
                self.is_draining = True

    @cython.critical_section
    def withdraw(self, int slot):
        """Make the unclaimed chunks of an order final, to order it in another form. Its slot is REPACK once no chunk is claimed."""
        self._slot(slot)
        if self._local_ring.places[slot].state != SHML_ORDERED:
            raise ValueError(f"slot {slot} is not ordered: its state is {self._local_ring.places[slot].state}")
        shml_void(&self._ring, slot)

    @cython.critical_section
    def drain(self):
        """Free the draining slots into which no worker writes any more. Return the number of those that still drain."""
        self._guard()
        cdef shml_status status
        cdef int num_left = 0
        for slot in range(self.num_slots):
            if self._local_ring.places[slot].state != SHML_DRAINING:
                continue
            status = shml_inspect(&self._ring, slot)
            if status.num_open or status.num_claimed:
                num_left += 1
            else:
                shml_local_ring_push_free(self._local_ring, slot)
                self._ring.slots[slot].state = SHML_FREE
        self.is_draining = num_left > 0
        return num_left

    @cython.critical_section
    def held_by(self, uint32_t worker):
        """Return (slot, chunk, order number, row in the batch) of a worker's first claim; None without one.

        The row is -1 if the worker is not reading a single row of this claim.
        """
        self._worker(worker)
        cdef uint64_t word, now = self._ring.workers[worker].now
        cdef int64_t row, first, begun = <int64_t>self._ring.workers[worker].row
        cdef shml_slot *record
        cdef uint64_t *owner
        for slot in range(self.num_slots):
            record = &self._ring.slots[slot]
            for chunk in range(record.nchunks):
                word = shml_owner(record, chunk)
                if (word & 0xFFFF) == worker + 1:
                    first = shml_first_row(record.nrows, record.nchunks, chunk)
                    row = -1
                    if now >> 16 == word >> 16 and <uint64_t>(begun & 0xFFFF) == (now & 0xFFFF):  # otherwise it is about to begin that row
                        if first <= begun < shml_first_row(record.nrows, record.nchunks, chunk + 1):
                            row = begun  # otherwise it belongs to a chunk of this order that it finished before
                    return slot, chunk, word >> 16, row
        return None

    @cython.critical_section
    def recover(self, uint32_t worker, *, bint poison=False):
        """Recover a dead worker's claims, at most one in each slot. Call this only after its process is dead and reaped.

        A recovered chunk is open again (reserved as before); VOID if its slot is draining; or POISON.

        Args:
            worker: number of the worker.
            poison: give up the chunk, so that its rows are not read again.
        Returns:
            the slot of a recovered claim; -1 if there was none. A Ray actor may have several claims in one slot, so call this until
            it returns -1.
        """
        self._worker(worker)
        cdef uint32_t own
        cdef int32_t found = -1
        cdef shml_place *place
        for slot in range(self.num_slots):
            place = &self._local_ring.places[slot]
            if place.state == SHML_DRAINING:
                own = SHML_VOID
            elif poison:
                own = SHML_POISON
            else:
                own = SHML_OPEN if place.reserved < 0 else SHML_RESERVED + place.reserved
            if shml_recover(&self._ring, slot, worker, own) >= 0:
                found = slot
        if self._ring.header.layout_state == SHML_LAYOUT_ASKING + worker:
            self._ring.header.layout_state = SHML_LAYOUT_NONE
        cdef shml_worker *record = &self._ring.workers[worker]
        record.now = 0
        record.pid = 0
        record.started_ns = 0
        record.is_waiting = 0
        record.claimed_ns = 0
        return found

    # ------------------------------------------------------------ layout, waiting

    @property
    @cython.critical_section
    def proposal(self):
        """Return the layout text that a worker has proposed, or None."""
        if self._ring.header.layout_state != SHML_LAYOUT_PROPOSED:
            return None
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    @property
    @cython.critical_section
    def has_layout(self):
        """Return whether the layout is settled."""
        return self._ring.header.layout_state == SHML_LAYOUT_READY

    @cython.critical_section
    def accept_layout(self, bytes text, *, bint is_packed):
        """Settle the layout. The slots must have their payloads.

        Args:
            text: the dumped layout; empty if there is none.
            is_packed: tell workers that samples do not have one shape, so that they do not try to place rows.
        """
        self._guard()
        if <uint64_t>len(text) > self._ring.header.layout_capacity:
            raise ValueError(f"the text of a layout must have at most {self._ring.header.layout_capacity} bytes, got {len(text)}")
        memcpy(self._ring.layout, <const char *>text, len(text))
        self._ring.header.layout_nbytes = len(text)
        self._ring.header.is_packed = is_packed
        self._ring.header.layout_state = SHML_LAYOUT_READY

    @cython.critical_section
    def share(self, Share shared):
        """Let other ranks read this ring, too. May be called once, before the first order."""
        self._guard()
        if self._order or self._shared is not None:
            raise ValueError("a ring can be shared only once, before its first order")
        self._shared = shared

    @cython.critical_section
    def wake(self):
        """Wake ranks that sleep until this ring changes."""
        shml_wake(&self._ring)

    @cython.critical_section
    def set_closing(self):
        """Tell workers to leave."""
        self._ring.header.is_closing = 1

    @cython.critical_section
    def look_again(self, double after_s):
        """Record that deaths were checked for; the next check is due after `after_s` seconds."""
        self._look_ns = shml_now_ns() + <uint64_t>(after_s * 1e9)

    @cython.critical_section
    cpdef begin_wait(self, int slot):
        """Announce that the trainer is about to sleep until this slot (or ANY_SLOT) is final. Check the slot again before that."""
        if self._ring.header.waiting_since_ns == 0:
            self._ring.header.waiting_since_ns = shml_now_ns()
        self._awaited = slot
        shml_await(&self._ring, slot)

    @cython.critical_section
    def end_wait(self):
        """Announce that the trainer is awake, and count the time that it has waited. Do nothing without a `begin_wait`."""
        if self._ring.header.waiting_since_ns == 0:
            return
        shml_await(&self._ring, -1)
        cdef uint64_t since = self._ring.header.waiting_since_ns
        cdef uint64_t now = shml_now_ns()
        if self._awaited < 0:
            shml_record_of_none(&self._ring, self.num_workers, SHML_EVENT_WAIT, since, now)
        else:
            self._log_event(SHML_EVENT_WAIT, since, now, self._awaited, 0, 0)
        self._ring.header.wait_ns += now - since
        self._ring.header.num_waits += 1
        self._ring.header.waiting_since_ns = 0
