# A ring as seen by a rank that reads another rank's ring; included by trainer.pyx.

cdef extern from *:
    """
    typedef struct { /* state that the end of a follower's lease needs */
        shml_share share;
        uint32_t rank;
        int num_forks;
    } shml_holder;
    static void shml_end_hold(void *context, uint32_t slot) {
        shml_holder *holder = (shml_holder *)context;
        if (holder->num_forks == shml_num_forks) /* the copy in a forked child does not hold the slot */
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
    """Owns the words in which the ends of leases are reported; lives as long as any lease of this follower."""

    cdef shml_holder _holder
    cdef object _memory


cdef class FollowerRing:
    """A ring led by another rank: find, lease and pass batches, but publish nothing.

    Args:
        control: mapping of the leader's control block.
        shared: the words that the ranks report to each other.
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
            raise ValueError("the memory is not a control block of this version of shmload: all ranks of a node must run the same version")
        if header.num_slots != <uint32_t>shared.num_slots or header.total_nbytes > <uint64_t>control.nbytes:
            raise ValueError(f"the ring has {header.num_slots} slots, but the ranks share {shared.num_slots}")
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
            raise RuntimeError("this loader belongs to the parent process: create a new loader in a forked child")
        if slot < 0 or slot >= self.num_slots:
            raise IndexError(f"slot {slot} is out of range: the ring has {self.num_slots}")
        return 0

    @cython.critical_section
    def find(self, Order order):
        """Return the slot of a batch that the leader has ordered, or -1. The batch stays in that slot until it is passed."""
        self._slot(0)
        return shml_share_find(&self._shared._share, self._shared.me, self._shared.round, order.epoch, order.step)

    @cython.critical_section
    def look(self, int slot):
        """Return FILLING, READY or FAILED for a slot returned by `find`. FILLING includes all that the leader still has to handle.
        """
        self._slot(slot)
        return shml_share_look(&self._shared._share, &self._ring, slot)

    @cython.critical_section
    def failure(self, int slot):
        """Return the worker's error text of a FAILED slot, or None if a sample has crashed its workers."""
        self._slot(slot)
        cdef uint64_t order
        cdef shml_status status = shml_share_inspect(&self._shared._share, &self._ring, slot, &order)
        if status.bad_own == SHML_POISON:
            return None
        cdef uint64_t nbytes = min(self._ring.slots[slot].text_nbytes, self._ring.header.text_capacity)
        return (<const char *>shml_text_area(&self._ring, slot))[:nbytes]

    @cython.critical_section
    def payload(self, int slot):
        """Return (version, path, offset, nbytes) of the payload of a slot returned by `find`."""
        self._slot(slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        return record.payload_version, <bytes>(<const char *>record.payload_path), record.payload_offset, record.payload_nbytes

    @cython.critical_section
    def let_go(self):
        """Unmap the payloads that have no lease; this rank takes no batches afterwards."""
        self._slot(0)
        shml_local_ring_close(self._local_ring)

    @cython.critical_section
    def set_payload(self, int slot, memory, uint64_t offset, uint64_t nbytes):
        """Set where a slot's bytes are in this process: `nbytes` from `offset` of `memory`.

        `memory` is a private mapping, so what a program writes does not reach other ranks.
        """
        self._slot(slot)
        if nbytes > <uint64_t>memory.nbytes or offset > <uint64_t>memory.nbytes - nbytes:
            raise ValueError(f"the slot of {nbytes} bytes at {offset} ends beyond its segment of {memory.nbytes}")
        if not self.is_free(slot):
            raise ValueError(f"cannot change the payload of slot {slot} while it is leased")
        cdef shml_place *place = &self._local_ring.places[slot]
        shml_map_drop(place.map)
        place.map = shml_map_keep(<shml_map *><uintptr_t>memory.handle)
        place.offset = offset
        place.nbytes = nbytes

    @cython.critical_section
    def is_free(self, int slot):
        """Return whether a slot can be leased. A READY slot may still be leased while another thread ends its last lease."""
        self._slot(slot)
        shml_local_ring_collect(self._local_ring)
        return self._local_ring.places[slot].state == SHML_FREE

    @cython.critical_section
    def lease(self, int slot):
        """Lease a READY slot that is free, and pass its batch."""
        if not self.is_free(slot):
            raise ValueError(f"slot {slot} is already leased")
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

    @cython.critical_section
    def skip(self, int slot):
        """Pass a batch without a lease."""
        self._slot(slot)
        shml_share_skip(&self._shared._share, self._shared.me, slot)

    def wait(self, Order order, double timeout_s):
        """Sleep until the ring changes or `timeout_s` has passed. Return at once if the batch of `order` is ready or has failed; if
        `order` is None, no batch is checked.
        """
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

    @cython.critical_section
    def wake(self):
        """Wake the other followers that sleep."""
        shml_wake(&self._ring)

    @property
    @cython.critical_section
    def is_leader_waiting(self):
        """Return whether the leader sleeps until any slot is released; if so, ring its bell after passing a slot."""
        return self._ring.header.awaited == <uint64_t>-1

    @property
    @cython.critical_section
    def layout_text(self):
        """Return the settled layout text."""
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    @property
    @cython.critical_section
    def num_leased(self):
        """Return the number of slots that this rank has leased."""
        shml_local_ring_collect(self._local_ring)
        return self._local_ring.num_leased

    @property
    @cython.critical_section
    def num_lendable(self):
        """Return the number of slots that this rank may have leased at a time, including the newest lease."""
        return shml_share_lendable(&self._shared._share)

    @cython.critical_section
    def count_copied_out(self):
        """Add 1 to the number of batches copied to private memory."""
        self.num_copied_out += 1
