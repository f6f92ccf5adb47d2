# A ring as a rank sees it that reads another rank's; included by trainer.pyx.

cdef extern from *:
    """
    typedef struct { /* what the end of a follower's lease must know */
        shml_share share;
        uint32_t rank;
        int num_forks;
    } shml_holder;
    static void shml_end_hold(void *context, uint32_t slot) {
        shml_holder *holder = (shml_holder *)context;
        if (holder->num_forks == shml_num_forks) /* a forked child's copy says nothing about the slot */
            shml_share_let_go(&holder->share, holder->rank, slot);
    }
    static void shml_report_ends(shml_local_ring *local_ring, shml_holder *holder) {
        local_ring->ended = shml_end_hold;
        local_ring->context = holder;
    }
    """
    ctypedef struct shml_holder:
        shml_share share
        uint32_t rank
        int num_forks
    void shml_report_ends(shml_local_ring *local_ring, shml_holder *holder)


cdef class _Holder:
    """Lives as long as a lease of this follower's, and the words in which the leases' ends are reported with it."""

    cdef shml_holder _holder
    cdef object _memory


cdef class FollowerRing:
    """A ring that another rank leads: batches are found, leased and passed; nothing is published.

    Args:
        control: mapping of the leader's control block.
        shared: what the ranks report to each other.
    """

    cdef shml_ring _ring
    cdef shml_local_ring *_local_ring
    cdef object _control
    cdef Share _shared
    cdef int _num_forks
    cdef readonly int num_slots
    cdef readonly uint64_t num_copied_out

    def __cinit__(self, control, Share shared):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        if control.nbytes < sizeof(shml_header) or header.magic != SHML_MAGIC or header.abi != SHML_ABI:
            raise ValueError("this memory is no control block of this shmload's; the ranks of a node need the same version")
        if header.num_slots != <uint32_t>shared.num_slots or header.total_nbytes > <uint64_t>control.nbytes:
            raise ValueError(f"a ring of {header.num_slots} slots is not the one whose {shared.num_slots} are shared")
        shml_view(&self._ring, header)
        self._control = control
        self._shared = shared
        self._num_forks = shml_num_forks
        self.num_slots = shared.num_slots
        self._local_ring = shml_local_ring_new(self.num_slots, self.num_slots)
        if self._local_ring == NULL:
            raise MemoryError
        cdef _Holder holder = _Holder.__new__(_Holder)
        holder._holder.share = shared._share
        holder._holder.rank = shared.me
        holder._holder.num_forks = shml_num_forks
        holder._memory = shared.memory
        _enter(self._local_ring)._ended = holder
        shml_report_ends(self._local_ring, &holder._holder)

    def __dealloc__(self):
        if self._local_ring != NULL:
            shml_local_ring_close(self._local_ring)
            shml_local_ring_drop(self._local_ring)

    cdef int _slot(self, int slot) except -1:
        if shml_num_forks != self._num_forks:
            raise RuntimeError("this loader belongs to the process that forked this one; a forked child cannot use it: make a new one")
        if slot < 0 or slot >= self.num_slots:
            raise IndexError(f"slot {slot} of a ring with {self.num_slots}")
        return 0

    def find(self, Order order):
        """The slot in which the leader has ordered a batch, -1: it has not yet. It stays there until it is passed."""
        self._slot(0)
        return shml_share_find(&self._shared._share, self._shared.me, self._shared.generation, order.epoch, order.step)

    def look(self, int slot):
        """FILLING, READY or FAILED, of a slot that `find` gave. FILLING is also what its leader has yet to see to."""
        self._slot(slot)
        return shml_share_look(&self._shared._share, &self._ring, slot)

    def failure(self, int slot):
        """Of a FAILED slot: the worker's error text; None: a sample has ended its workers."""
        self._slot(slot)
        cdef uint64_t order
        cdef shml_status status = shml_share_inspect(&self._shared._share, &self._ring, slot, &order)
        if status.bad_own == SHML_POISON:
            return None
        cdef uint64_t nbytes = min(self._ring.slots[slot].text_nbytes, self._ring.header.text_capacity)
        return (<const char *>shml_text_area(&self._ring, slot))[:nbytes]

    def payload(self, int slot):
        """(version, path, offset, nbytes) of the payload of a slot that `find` gave."""
        self._slot(slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        return record.payload_version, <bytes>(<const char *>record.payload_path), record.payload_offset, record.payload_nbytes

    def let_go(self):
        """Unmaps the payloads, as far as no lease is left: this rank takes nothing any more."""
        self._slot(0)
        shml_local_ring_close(self._local_ring)

    def set_payload(self, int slot, memory, uint64_t offset, uint64_t nbytes):
        """Says where a slot's bytes lie in this process: a private mapping, so that what a program writes is its own."""
        self._slot(slot)
        if nbytes > <uint64_t>memory.nbytes or offset > <uint64_t>memory.nbytes - nbytes:
            raise ValueError(f"slot of {nbytes} bytes at {offset} ends beyond its segment of {memory.nbytes}")
        if not self.is_free(slot):
            raise ValueError(f"slot {slot} is leased: its payload cannot change")
        cdef shml_place *place = &self._local_ring.places[slot]
        shml_map_drop(place.map)
        place.map = shml_map_keep(<shml_map *><uintptr_t>memory.handle)
        place.offset = offset
        place.nbytes = nbytes

    def is_free(self, int slot):
        """Whether it can be leased. One that is READY may still have its last lease, not quite over in the thread that ends it."""
        self._slot(slot)
        shml_local_ring_collect(self._local_ring)
        return self._local_ring.places[slot].state == SHML_FREE

    def lease(self, int slot):
        """Leases a READY slot that is free, and passes its batch."""
        if not self.is_free(slot):
            raise ValueError(f"slot {slot} is leased already")
        cdef shml_place *place = &self._local_ring.places[slot]
        if place.map == NULL:
            raise ValueError(f"slot {slot} has no payload")
        shml_renew(place)
        shml_local_ring_pull_free(self._local_ring, slot)
        cdef Lease lease = Lease.__new__(Lease)
        lease.used_nbytes = self._ring.slots[slot].used_nbytes
        lease.has_note = False
        shml_share_take(&self._shared._share, self._shared.me, slot)
        lease._lease = shml_lease_begin(self._local_ring, slot)
        return lease

    def skip(self, int slot):
        """Passes a batch without a lease."""
        self._slot(slot)
        shml_share_skip(&self._shared._share, self._shared.me, slot)

    def wait(self, Order order, double timeout_s):
        """Sleeps until something has changed in the ring, or that long; not if a batch (None: none) is in place or has failed."""
        cdef uint32_t seen
        cdef int failed = 0
        shml_begin_sleep(self._ring.header, &seen)
        try:
            if order is not None:
                slot = self.find(order)
                if slot >= 0 and self.look(slot) != FILLING:
                    return
            with nogil:
                failed = shml_sleep(self._ring.header, seen, timeout_s)
        finally:
            shml_end_sleep(self._ring.header)
        if failed == EINTR:
            PyErr_CheckSignals()

    def wake(self):
        """Wakes the other followers that sleep."""
        shml_wake(&self._ring)

    @property
    def is_leader_waiting(self):
        """Whether the leader sleeps until any slot changes hands: then its bell must be rung when one has been passed."""
        return self._ring.header.awaited == <uint64_t>-1

    @property
    def layout_text(self):
        """The settled layout text."""
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    @property
    def num_leased(self):
        """Slots that this rank has leased."""
        shml_local_ring_collect(self._local_ring)
        return self._local_ring.num_leased

    @property
    def num_lendable(self):
        """Slots that it may have leased at a time, the newest lease's included."""
        return shml_share_lendable(&self._shared._share)

    def count_copied_out(self):
        """Adds to the batches copied to private memory."""
        self.num_copied_out += 1
