# What the ranks that share one ring report to each other, as seen by one of them; included by trainer.pyx.

cdef extern from "share.h" nogil:
    ctypedef struct shml_share_header:
        uint64_t magic
        uint32_t num_ranks, num_slots
    ctypedef struct shml_share:
        shml_share_header *header
    const uint64_t SHML_SHARE_MAGIC
    enum:
        SHML_REPORT_NEXT, SHML_REPORT_ROUND, SHML_REPORT_ENDED, SHML_REPORT_EPOCH, SHML_REPORT_STEP, SHML_REPORT_ODD, SHML_REPORT_COUNT
        SHML_REPORT_LEFT, SHML_REPORT_CLOSED
    uint64_t shml_share_nbytes(uint32_t num_ranks, uint32_t num_slots)
    void shml_share_view(shml_share *share, void *base)
    void shml_share_create(shml_share *share, void *base, uint32_t num_ranks, uint32_t num_slots)
    uint32_t shml_share_lendable(const shml_share *share)
    int shml_share_is_passed(const shml_share *share, uint32_t slot)
    void shml_share_rewrites(const shml_share *share, uint32_t slot)
    void shml_share_wrote(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t order, uint64_t round,
                          uint64_t count)
    int shml_share_find(const shml_share *share, uint32_t rank, uint64_t round, int64_t epoch, int64_t step)
    int shml_share_look(const shml_share *share, const shml_ring *ring, uint32_t slot)
    shml_status shml_share_inspect(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t *order)
    void shml_share_take(const shml_share *share, uint32_t rank, uint32_t slot)
    void shml_share_skip(const shml_share *share, uint32_t rank, uint32_t slot)
    void shml_share_let_go(const shml_share *share, uint32_t rank, uint32_t slot)
    uint64_t shml_share_reported(const shml_share *share, uint32_t rank, uint32_t word)
    void shml_share_report(const shml_share *share, uint32_t rank, uint32_t word, uint64_t value)
    void shml_renew(shml_place *place)
    void shml_begin_sleep(shml_header *header, uint32_t *seen)
    void shml_end_sleep(shml_header *header)
    int shml_sleep(shml_header *header, uint32_t seen, double timeout_s)

# Words of a rank's record (src/share.h).
REPORT_ROUND = SHML_REPORT_ROUND
REPORT_ENDED = SHML_REPORT_ENDED
REPORT_EPOCH = SHML_REPORT_EPOCH
REPORT_STEP = SHML_REPORT_STEP
REPORT_ODD = SHML_REPORT_ODD
REPORT_COUNT = SHML_REPORT_COUNT
REPORT_LEFT = SHML_REPORT_LEFT
REPORT_CLOSED = SHML_REPORT_CLOSED


def share_nbytes(uint32_t num_ranks, uint32_t num_slots):
    """Return the number of bytes that ranks need to share a ring."""
    return shml_share_nbytes(num_ranks, num_slots)


cdef class Share:
    """The shared words of src/share.h.

    Args:
        memory: mapping, `share_nbytes(...)` long.
        me: this process's number among the ranks that share the ring; 0 is the leader.
        num_ranks, num_slots: written by the leader into zeroed memory; 0: read from the memory.
    """

    cdef shml_share _share
    cdef readonly object memory
    cdef readonly int me, num_ranks, num_slots
    cdef public uint64_t round  # round of the batches that are published now
    cdef uint64_t _num_ordered  # batches
    cdef uint64_t _newest_round  # of the newest batch, as the next line; a batch that is ordered again is not newer
    cdef int64_t _newest_epoch, _newest_step

    def __cinit__(self, memory, *, uint32_t me, uint32_t num_ranks=0, uint32_t num_slots=0):
        cdef void *base = <void *><uintptr_t>memory.address
        cdef uint64_t nbytes = memory.nbytes
        if nbytes < sizeof(shml_share_header):
            raise ValueError(f"the memory that ranks share has {nbytes} bytes, fewer than its header")
        if num_ranks:
            if nbytes < shml_share_nbytes(num_ranks, num_slots):
                raise ValueError(f"{num_ranks} ranks need {shml_share_nbytes(num_ranks, num_slots)} bytes to share {num_slots} slots, "
                                 f"the mapping has {nbytes}")
            shml_share_create(&self._share, base, num_ranks, num_slots)
        else:
            self._share.header = <shml_share_header *>base
            if (self._share.header.magic != SHML_SHARE_MAGIC
                    or nbytes < shml_share_nbytes(self._share.header.num_ranks, self._share.header.num_slots)):
                raise ValueError("the memory is not one in which ranks share a ring")
            shml_share_view(&self._share, base)
        self.num_ranks = self._share.header.num_ranks
        self.num_slots = self._share.header.num_slots
        if me >= <uint32_t>self.num_ranks:
            raise ValueError(f"rank {me} is out of range: {self.num_ranks} ranks share the ring")
        self.memory = memory
        self.me = me
        self.round = 1

    def report(self, uint32_t word, uint64_t value):
        """Write a word of this rank's record."""
        shml_share_report(&self._share, self.me, word, value)

    def reported(self, uint32_t rank, uint32_t word):
        """Return a word of a rank's record."""
        if rank >= <uint32_t>self.num_ranks:
            raise IndexError(f"rank {rank} is out of range: {self.num_ranks} ranks share the ring")
        return shml_share_reported(&self._share, rank, word)

    def is_passed(self, uint32_t slot):
        """Return whether every follower is done with a slot's batch."""
        if slot >= <uint32_t>self.num_slots:
            raise IndexError(f"slot {slot} is out of range: the ring has {self.num_slots}")
        return bool(shml_share_is_passed(&self._share, slot))

    cdef void _wrote(self, const shml_ring *ring, uint32_t slot, uint64_t order, bint is_rewritten):
        cdef int64_t epoch = ring.slots[slot].epoch, step = ring.slots[slot].step
        cdef bint is_new = (self.round > self._newest_round or epoch > self._newest_epoch
                            or (epoch == self._newest_epoch and step > self._newest_step))
        if is_new and not is_rewritten:
            self._newest_round, self._newest_epoch, self._newest_step = self.round, epoch, step
            self._num_ordered += 1
            shml_share_wrote(&self._share, ring, slot, order, self.round, self._num_ordered)
        else:
            shml_share_wrote(&self._share, ring, slot, order, self.round, 0)
