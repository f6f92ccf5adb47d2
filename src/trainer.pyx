"""The trainer's end of a ring: publish orders, look at them, lease ready slots, take back what dead workers held.

One process, the one that made the ring, may call it (a forked child is refused), and only with the GIL held, which serves as
the protocol's private mutex: every step is one C call that nothing interrupts half-way. Waiting is not done here.
"""

include "ring.pxi"

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import os

from numpy import ndarray

include "leases.pxi"
include "order.pxi"

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    static uint64_t shml_now_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    static int shml_num_forks; /* between this process and the one that imported the module; getpid would be a system call */
    static void shml_in_child(void) { shml_num_forks++; }
    static int shml_watch_forks(void) { return pthread_atfork(NULL, NULL, shml_in_child); }
    """
    int shml_num_forks
    int shml_watch_forks()
    uint64_t _now_ns "shml_now_ns" ()

if shml_watch_forks():
    raise MemoryError

# What `look` answers about an ordered slot.
FILLING = 0   # a chunk is unclaimed or being filled
READY = 1     # every row is in place
FAILED = 2    # a chunk ended in an error, or was given up after killing its workers
REPACK = 3    # its samples have no fixed rows: order it again as one packed chunk
# What `state` answers, apart from free, leased and draining.
HELD = SHML_HELD
ORDERED = SHML_ORDERED
MAX_CHUNKS = SHML_MAX_CHUNKS
MAX_WORKERS = SHML_MAX_WORKERS
ANYONE = SHML_ANYONE
ANY_SLOT = SHML_ANY_SLOT

cdef uint64_t CHUNK_WORK_NS = 300_000  # a chunk worth a claim of its own keeps a worker busy this long


def control_nbytes(uint32_t num_slots, uint32_t num_workers, *, uint64_t order_capacity, uint64_t text_capacity,
                   uint64_t layout_capacity):
    """Bytes of the control block for such a ring."""
    return shml_plan(NULL, num_slots, num_workers, order_capacity, text_capacity, layout_capacity)


cdef class TrainerRing:
    """The private state of a ring's slots and the trainer's verbs on them.

    Args:
        control: mapping of zeroed memory, `control_nbytes(...)` long; everything else goes in by keyword.
        is_static: batch i belongs to one worker, and each worker takes its orders oldest first.
        threads_per_worker: rows that a worker reads at a time: no chunk is smaller.
    """

    cdef shml_ring _ring
    cdef shml_desk *_desk
    cdef object _control
    cdef int _num_forks
    cdef object _pid
    cdef uint64_t _order
    cdef uint32_t _threads_per_worker, _expected_nrows
    cdef uint64_t _expected_nbytes
    cdef uint64_t _look_ns
    cdef bint _is_draining
    cdef readonly int num_slots, num_workers

    def __cinit__(self, control, *, uint32_t num_slots, uint32_t num_workers, uint64_t order_capacity,
                  uint64_t text_capacity, uint64_t layout_capacity, bint is_static=False, uint32_t threads_per_worker=1):
        cdef uint64_t needed = shml_plan(NULL, num_slots, num_workers, order_capacity, text_capacity, layout_capacity)
        if num_slots < 1 or num_workers > SHML_MAX_WORKERS:
            raise ValueError(f"a ring has at least 1 slot and at most {SHML_MAX_WORKERS} workers, "
                             f"got num_slots={num_slots}, num_workers={num_workers}")
        if control.nbytes < needed:
            raise ValueError(f"the control block needs {needed} bytes, the mapping has {control.nbytes}")
        self._control = control
        self._num_forks = shml_num_forks
        self._pid = os.getpid()
        self.num_slots = num_slots
        self.num_workers = num_workers
        self._threads_per_worker = max(threads_per_worker, 1)
        shml_create(&self._ring, <void *><uintptr_t>control.address, num_slots, num_workers, order_capacity,
                    text_capacity, layout_capacity)
        self._ring.header.is_static = is_static
        self._ring.header.owner_pid = self._pid
        self._ring.header.owner_start_ns = _now_ns()
        self._desk = shml_desk_new(num_slots)
        if self._desk == NULL:
            raise MemoryError
        _enter(self._desk)

    def __dealloc__(self):
        if self._desk != NULL:
            shml_desk_close(self._desk)
            shml_desk_drop(self._desk)

    cdef int _guard(self) except -1:
        if shml_num_forks != self._num_forks:
            raise RuntimeError(f"this loader belongs to process {self._pid}; a forked child cannot use it: make a new one")
        return 0

    cdef int _slot(self, int slot) except -1:
        if slot < 0 or slot >= self.num_slots:
            raise IndexError(f"slot {slot} of a ring with {self.num_slots}")
        return self._guard()

    cdef int _worker(self, uint32_t worker) except -1:
        if worker >= <uint32_t>self.num_workers:
            raise IndexError(f"worker {worker} of a ring with {self.num_workers}")
        return self._guard()

    # ------------------------------------------------------------ slots

    cdef void _collect(self):
        """Takes in what leases have given back."""
        cdef uint32_t first = self._desk.num_free
        shml_desk_collect(self._desk)
        if shml_num_forks != self._num_forks:
            return  # a forked child's copy of all this says nothing about the slots
        for i in range(first, self._desk.num_free):
            self._ring.slots[self._desk.free_list[i]].state = SHML_FREE

    def hold(self):
        """Takes the most recently freed slot for publication; -1 if none is free."""
        self._guard()
        self._collect()
        if self._desk.num_free == 0:
            return -1
        self._desk.num_free -= 1
        cdef int slot = self._desk.free_list[self._desk.num_free]
        self._set_state(slot, SHML_HELD)
        return slot

    cdef int _require_final(self, int slot) except -1:
        cdef shml_status status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed:
            raise ValueError(f"slot {slot} still has {status.num_open} open and {status.num_claimed} claimed chunks")
        return 0

    cdef void _set_state(self, int slot, int state):
        self._desk.places[slot].state = state
        self._ring.slots[slot].state = state

    def free(self, int slot):
        """Gives back a slot that was held, or whose order has ended without a delivery."""
        self._slot(slot)
        cdef int state = self._desk.places[slot].state
        if state == SHML_FREE or state == SHML_LEASED:
            raise ValueError(f"slot {slot} is not the trainer's to free: its state is {state}")
        if state != SHML_HELD:
            self._require_final(slot)
        shml_desk_push_free(self._desk, slot)
        self._ring.slots[slot].state = SHML_FREE

    def state(self, int slot):
        """The slot's private state: 0 free, 1 held, 2 ordered, 3 leased, 4 draining."""
        self._slot(slot)
        self._collect()
        return self._desk.places[slot].state

    def set_payload(self, int slot, mapping, bytes path, uint64_t offset, uint64_t nbytes):
        """Points a slot to its bytes: `nbytes` from `offset` of the segment that workers open as `path`.

        Allowed while nothing reads or writes the slot: it is held or free, or its one claimant waits for `need_nbytes`.
        """
        self._slot(slot)
        if len(path) >= SHML_PATH_NBYTES:
            raise ValueError(f"a payload path has at most {SHML_PATH_NBYTES - 1} bytes, got {len(path)}")
        if nbytes > <uint64_t>mapping.nbytes or offset > <uint64_t>mapping.nbytes - nbytes:
            raise ValueError(f"slot of {nbytes} bytes at {offset} ends beyond its segment of {mapping.nbytes}")
        cdef shml_place *place = &self._desk.places[slot]
        cdef shml_slot *record = &self._ring.slots[slot]
        if place.state == SHML_LEASED:
            raise ValueError(f"slot {slot} is leased: its payload cannot change")
        shml_map_drop(place.map)
        place.map = shml_map_keep(<shml_map *><uintptr_t>mapping.handle)
        place.offset = offset
        place.nbytes = nbytes
        memset(record.payload_path, 0, SHML_PATH_NBYTES)
        memcpy(record.payload_path, <const char *>path, len(path))
        record.payload_offset = offset
        record.payload_nbytes = nbytes
        record.payload_version += 1

    def payload_nbytes(self, int slot):
        """Bytes the slot may use; 0 before the layout is known."""
        self._slot(slot)
        return self._desk.places[slot].nbytes

    # ------------------------------------------------------------ orders

    def publish(self, int slot, *, int64_t epoch, int64_t step, uint64_t seq, indices, uint32_t nrows, uint32_t nchunks=1,
                bint is_packed=False, bint is_pickled=False, int reserved=SHML_ANYONE, bytes order_path=b""):
        """Writes an order into a held slot, or into one whose order has ended undelivered, and opens it to workers.

        Args:
            indices: buffer with the order's bytes: `nrows` int64, or a pickle of them. Empty if `order_path` names a segment
                that holds them; its used length is then `len(indices)` as given there: pass the buffer anyway.
            reserved: the one worker that may claim it, or ANYONE.
        Returns:
            the order number.
        """
        self._slot(slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._desk.places[slot]
        cdef Py_buffer view
        if place.state != SHML_HELD and place.state != SHML_ORDERED:
            raise ValueError(f"slot {slot} must be held before it is published; its state is {place.state}")
        if place.state == SHML_ORDERED:
            self._require_final(slot)
        if nchunks < 1 or nchunks > SHML_MAX_CHUNKS or (nrows and nchunks > nrows):
            raise ValueError(f"an order has 1 to {SHML_MAX_CHUNKS} chunks and no more than rows, got {nchunks} for {nrows}")
        if len(order_path) >= SHML_PATH_NBYTES:
            raise ValueError(f"an order path has at most {SHML_PATH_NBYTES - 1} bytes, got {len(order_path)}")
        PyObject_GetBuffer(indices, &view, PyBUF_SIMPLE)
        try:
            if not is_pickled and <uint64_t>view.len != <uint64_t>nrows * 8:
                raise ValueError(f"{nrows} rows need {nrows * 8} bytes of indices, got {view.len}")
            if not order_path:
                if <uint64_t>view.len > self._ring.header.order_capacity:
                    raise ValueError(f"the order area holds {self._ring.header.order_capacity} bytes, the order has {view.len}")
                memcpy(shml_order_area(&self._ring, slot), view.buf, view.len)
            record.order_nbytes = view.len
        finally:
            PyBuffer_Release(&view)
        memset(record.order_path, 0, SHML_PATH_NBYTES)
        memcpy(record.order_path, <const char *>order_path, len(order_path))
        record.epoch = epoch
        record.step = step
        record.seq = seq
        record.order_kind = SHML_ORDER_PICKLED if is_pickled else SHML_ORDER_INT64
        return self._open(slot, nrows, nchunks, is_packed, reserved)

    cdef uint64_t _open(self, int slot, uint32_t nrows, uint32_t nchunks, bint is_packed, int reserved):
        """Opens to workers an order that stands in its slot."""
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._desk.places[slot]
        record.nrows = nrows
        record.nchunks = nchunks
        record.form = SHML_FORM_PACKED if is_packed else SHML_FORM_ROWS
        record.generation = self._ring.header.generation
        record.ordered_ns = _now_ns()
        self._order += 1
        place.order = self._order
        place.reserved = reserved
        self._set_state(slot, SHML_ORDERED)
        shml_publish(&self._ring, slot, self._order, reserved)
        return self._order

    def expect(self, uint32_t nrows, uint64_t nbytes):
        """Says what room batches of up to `nrows` rows take, for `post`; until then it posts packed ones alone."""
        self._expected_nrows = nrows
        self._expected_nbytes = nbytes

    def post(self, Order order, *, bint is_packed):
        """Publishes an order in a free slot if it is a usual one: int64 indices that fit the order area, a slot that has the room.

        One call for what `hold` and `publish` and what is asked between them do, which costs a trainer of small batches most.

        Returns:
            the number of its chunks; 0: it is no usual order, or no slot is free, and nothing has happened.
        """
        self._guard()
        self._collect()
        if order.is_given or self._desk.num_free == 0 or type(order.indices) is not ndarray:
            return 0
        cdef int slot = self._desk.free_list[self._desk.num_free - 1]
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef Py_buffer view
        cdef uint32_t nrows
        PyObject_GetBuffer(order.indices, &view, PyBUF_FORMAT | PyBUF_STRIDES)
        try:
            if view.ndim != 1 or view.len == 0 or view.strides[0] != 8 or (view.format[0] != b"l" and view.format[0] != b"q"):
                return 0
            if <uint64_t>view.len > self._ring.header.order_capacity or record.order_path[0]:
                return 0
            nrows = view.len // 8
            if not is_packed and (nrows > self._expected_nrows or self._desk.places[slot].nbytes < self._expected_nbytes):
                return 0
            memcpy(shml_order_area(&self._ring, slot), view.buf, view.len)
            record.order_nbytes = view.len
        finally:
            PyBuffer_Release(&view)
        self._desk.num_free -= 1
        record.epoch = order.epoch
        record.step = record.seq = order.step
        record.order_kind = SHML_ORDER_INT64
        cdef uint32_t nchunks = 1 if is_packed or order.worker >= 0 else self._num_chunks(nrows)
        order.slot = slot
        self._open(slot, nrows, nchunks, is_packed, order.worker)
        return nchunks

    def num_chunks(self, uint32_t nrows):
        """Chunks for a batch of rows: enough that every worker has a part, none shorter than a claim is worth."""
        return self._num_chunks(nrows)

    cdef uint32_t _num_chunks(self, uint32_t nrows):
        cdef uint32_t most = min(4 * <uint32_t>self.num_workers, <uint32_t>SHML_MAX_CHUNKS, nrows // self._threads_per_worker)
        if most <= 1:
            return 1
        cdef uint64_t busy_ns = 0, num_samples = 0
        for worker in range(self.num_workers):
            busy_ns += self._ring.workers[worker].busy_ns
            num_samples += self._ring.workers[worker].num_samples
        if num_samples < 2 * <uint64_t>nrows:
            return most
        return max(1, min(most, <uint32_t>(<double>nrows * busy_ns / num_samples / CHUNK_WORK_NS)))

    # ------------------------------------------------------------ looking and leasing

    def look(self, int slot):
        """FILLING, READY, FAILED or REPACK, from the owner words. Cost: about 0.1 us."""
        self._slot(slot)
        if self._desk.places[slot].state != SHML_ORDERED:
            raise ValueError(f"slot {slot} is not ordered: its state is {self._desk.places[slot].state}")
        cdef shml_status status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed:
            return FILLING
        if status.first_bad >= 0 and status.bad_own == SHML_POISON:
            return FAILED
        if self._ring.slots[slot].repack == self._desk.places[slot].order or status.num_void:
            return REPACK
        return FAILED if status.first_bad >= 0 else READY

    def failure(self, int slot):
        """Of a FAILED slot: (chunk, text), the lowest chunk that failed and the worker's error text.

        `text` is None if the chunk was poisoned. If the text area tells of another chunk's error, the chunk is opened again and
        (chunk, b"") comes back: ring the workers and look again later. So the message does not depend on who failed first.
        """
        self._slot(slot)
        cdef shml_status status = shml_inspect(&self._ring, slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._desk.places[slot]
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

    def rows(self, int slot):
        """(nrows, nchunks) of the slot's order."""
        self._slot(slot)
        return self._ring.slots[slot].nrows, self._ring.slots[slot].nchunks

    def first_row(self, int slot, int chunk):
        """First row of a chunk of the slot's order."""
        self._slot(slot)
        return shml_first_row(self._ring.slots[slot].nrows, self._ring.slots[slot].nchunks, chunk)

    def note(self, int slot):
        """What the worker sent along with a READY batch of one chunk; empty if nothing."""
        self._slot(slot)
        cdef uint64_t nbytes = min(self._ring.slots[slot].note_nbytes, self._ring.header.text_capacity)
        return (<const char *>shml_text_area(&self._ring, slot))[:nbytes]

    def need_nbytes(self, int slot):
        """Payload bytes the slot's claimant waits for; 0: none."""
        self._slot(slot)
        return self._ring.slots[slot].need_nbytes

    def needy(self):
        """A slot whose claimant waits for a larger payload; -1: none."""
        return self._needy()

    cdef int _needy(self):
        cdef int slot
        for slot in range(self.num_slots):
            if self._ring.slots[slot].need_nbytes != 0 and self._desk.places[slot].state in (SHML_ORDERED, SHML_DRAINING):
                return slot
        return -1

    def grant(self, int slot):
        """Tells the claimant that the slot now has the payload it asked for."""
        self._slot(slot)
        self._ring.header.num_grown += 1
        self._ring.slots[slot].need_nbytes = 0

    def lease(self, int slot):
        """Leases a READY slot: it is the holder's until the last tensor made from the lease dies."""
        self._slot(slot)
        if self.look(slot) != READY:
            raise ValueError(f"slot {slot} is not ready")
        if self._desk.places[slot].map == NULL:
            raise ValueError(f"slot {slot} has no payload")
        return self._lease(slot)

    def take(self, Order order):
        """The lease of an order that is ready, if nothing else asks for the trainer: no death is to be looked for by now, no layout
        or room to be settled, nothing drains, and no note came with it. Else None: then look at it all, one by one.

        One call for what `look` and `lease` and what is asked between them do.
        """
        self._guard()
        cdef int slot = order.slot
        cdef shml_status status
        cdef shml_slot *record
        if slot < 0 or self._desk.places[slot].state != SHML_ORDERED or _now_ns() >= self._look_ns:
            return None
        if self._is_draining or self._ring.header.layout_state == SHML_LAYOUT_PROPOSED or self._needy() >= 0:
            return None
        record = &self._ring.slots[slot]
        status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed or status.num_void or status.first_bad >= 0:
            return None
        if record.note_nbytes > 1 or (record.note_nbytes == 1 and shml_text_area(&self._ring, slot)[0] != 0):
            return None
        if record.repack == self._desk.places[slot].order or self._desk.places[slot].map == NULL:
            return None
        return self._lease(slot)

    cdef Lease _lease(self, int slot):
        cdef Lease lease = Lease.__new__(Lease)
        lease.used_nbytes = self._ring.slots[slot].used_nbytes
        lease.has_note = self._ring.slots[slot].note_nbytes != 0
        lease._lease = shml_lease_begin(self._desk, slot)
        self._ring.slots[slot].state = SHML_LEASED
        return lease

    def count_batch(self, uint32_t nrows, uint64_t nbytes):
        """Adds to what was delivered. Returns whether every slot is leased now, so that the next batch would find none."""
        self._ring.header.batches += 1
        self._ring.header.samples += nrows
        self._ring.header.nbytes += nbytes
        self._collect()
        return self._desk.num_leased == <uint32_t>self.num_slots

    @property
    def num_leased(self):
        """Slots with a live lease."""
        self._collect()
        return self._desk.num_leased

    @property
    def num_free(self):
        """Slots free now."""
        self._collect()
        return self._desk.num_free

    # ------------------------------------------------------------ abandoning and recovering

    def void(self):
        """Abandons every order: unclaimed chunks become final, claimed ones are left to their workers. Leases are untouched."""
        self._guard()
        self._ring.header.generation += 1
        for slot in range(self.num_slots):
            if self._desk.places[slot].state == SHML_ORDERED:
                shml_void(&self._ring, slot)
                self._set_state(slot, SHML_DRAINING)
                self._is_draining = True

    def drain(self):
        """Frees the draining slots that no worker writes into any more. Returns how many still drain."""
        self._guard()
        cdef shml_status status
        cdef int num_left = 0
        for slot in range(self.num_slots):
            if self._desk.places[slot].state != SHML_DRAINING:
                continue
            status = shml_inspect(&self._ring, slot)
            if status.num_open or status.num_claimed:
                num_left += 1
            else:
                shml_desk_push_free(self._desk, slot)
                self._ring.slots[slot].state = SHML_FREE
        self._is_draining = num_left > 0
        return num_left

    def held_by(self, uint32_t worker):
        """(slot, chunk, order, row) claimed by a worker, or None; row is -1 if it had not begun one of this order."""
        self._worker(worker)
        cdef uint64_t word, now = self._ring.workers[worker].now
        cdef shml_slot *record
        cdef uint64_t *owner
        for slot in range(self.num_slots):
            record = &self._ring.slots[slot]
            for chunk in range(record.nchunks):
                word = _owner(record, chunk)
                if (word & 0xFFFF) == worker + 1:
                    first = shml_first_row(record.nrows, record.nchunks, chunk)
                    row = -1
                    if now >> 16 == word >> 16:
                        row = first + (((now & 0xFFFF) - first) & 0xFFFF)
                        if row >= shml_first_row(record.nrows, record.nchunks, chunk + 1):
                            row = -1  # of a chunk of this order that it had done before
                    return slot, chunk, word >> 16, row
        return None

    def recover(self, uint32_t worker, *, bint poison=False):
        """Takes back what a worker held. Only after its process is dead and reaped.

        Returns:
            the slot it held a chunk of, or -1. The chunk is open again (reserved as before), void if its slot drains, or given
            up for good with `poison=True`.
        """
        self._worker(worker)
        cdef uint32_t own
        cdef int32_t found = -1
        cdef shml_place *place
        for slot in range(self.num_slots):
            place = &self._desk.places[slot]
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
        return found

    def count_restart(self):
        """Adds to the workers replaced."""
        self._ring.header.num_restarts += 1

    def count_copied_out(self):
        """Adds to the batches copied to private memory."""
        self._ring.header.num_copied_out += 1

    # ------------------------------------------------------------ layout and the rest of the header

    @property
    def proposal(self):
        """The layout text a worker has proposed, or None."""
        if self._ring.header.layout_state != SHML_LAYOUT_PROPOSED:
            return None
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    @property
    def has_layout(self):
        """Whether rows have their places."""
        return self._ring.header.layout_state == SHML_LAYOUT_READY

    def accept_layout(self, bytes text, *, bint is_packed):
        """Settles the layout; slots must have their payloads. With `is_packed` no worker tries fixed rows any more."""
        self._guard()
        if <uint64_t>len(text) > self._ring.header.layout_capacity:
            raise ValueError(f"a layout has at most {self._ring.header.layout_capacity} bytes of text, got {len(text)}")
        memcpy(self._ring.layout, <const char *>text, len(text))
        self._ring.header.layout_nbytes = len(text)
        self._ring.header.is_packed = is_packed
        self._ring.header.layout_state = SHML_LAYOUT_READY

    def set_closing(self):
        """Tells workers to leave."""
        self._ring.header.is_closing = 1

    def look_again(self, double after_s):
        """From so many seconds on `take` declines: it is time to look for deaths."""
        self._look_ns = _now_ns() + <uint64_t>(after_s * 1e9)

    def begin_wait(self, int slot):
        """Says that the trainer is about to sleep until this slot (ANY_SLOT: any) is final. Look once more before it does."""
        if self._ring.header.waiting_since_ns == 0:
            self._ring.header.waiting_since_ns = _now_ns()
        shml_await(&self._ring, slot)

    def end_wait(self):
        """Says that it is awake, and adds to the time it has waited; does nothing if it had not begun to."""
        if self._ring.header.waiting_since_ns == 0:
            return
        shml_await(&self._ring, -1)
        self._ring.header.wait_ns += _now_ns() - self._ring.header.waiting_since_ns
        self._ring.header.num_waits += 1
        self._ring.header.waiting_since_ns = 0

    def counters(self):
        """The header's counters, as a dict."""
        cdef shml_header *h = self._ring.header
        return {"batches": h.batches, "samples": h.samples, "nbytes": h.nbytes, "wait_s": h.wait_ns / 1e9,
                "num_waits": h.num_waits, "num_copied_out": h.num_copied_out, "num_grown": h.num_grown,
                "num_restarts": h.num_restarts, "generation": h.generation}

    @property
    def order_capacity(self):
        """Bytes of an order that fit its area."""
        return self._ring.header.order_capacity

    def worker(self, uint32_t worker):
        """One worker's record, as a dict."""
        if worker >= <uint32_t>self.num_workers:
            raise IndexError(f"worker {worker} of a ring with {self.num_workers}")
        cdef shml_worker *r = &self._ring.workers[worker]
        return {"pid": r.pid, "started_ns": r.started_ns, "since_ns": r.since_ns, "index": <int64_t>r.index,
                "is_waiting": bool(r.is_waiting), "busy_s": r.busy_ns / 1e9, "num_chunks": r.num_chunks,
                "num_samples": r.num_samples, "num_foreign": r.num_foreign}

    @property
    def poison(self):
        """Debugging: overwrite a slot's bytes the moment it comes back."""
        return bool(self._desk.poison)

    @poison.setter
    def poison(self, bint on):
        self._desk.poison = on


cdef extern from *:
    """
    static inline uint64_t shml_owner_word(shml_slot *slot, uint32_t chunk) {
        return atomic_load_explicit(&slot->owner[chunk], memory_order_acquire);
    }
    """
    uint64_t _owner "shml_owner_word" (shml_slot *slot, uint32_t chunk) nogil
