# The trainer's view of helpers: workers of the node's other ranks that fill chunks of this ring; included by trainer.pyx.


cdef class HostRing(OrderRing):
    """A ring that admits helpers. Worker records from `num_wanted` on are for helpers (helpers.h)."""

    @cython.critical_section
    def requests(self):
        """Return (record, identity) of each helper that waits for admission."""
        self._guard()
        cdef uint32_t worker
        cdef uint64_t identity
        found = []
        for worker in range(<uint32_t>self._ring.header.num_wanted, <uint32_t>self.num_workers):
            identity = shml_requests(&self._ring, worker)
            if identity:
                found.append((worker, identity))
        return found

    @cython.critical_section
    def accept(self, uint32_t worker, uint64_t identity):
        """Let a helper (from `requests`) claim chunks. The trainer must watch its process, so that it sees the process end."""
        self._worker(worker)
        shml_accept(&self._ring, worker, identity)

    @cython.critical_section
    def release(self, uint32_t worker):
        """Clear a helper's record for the next helper. Only after its process has ended, and after `recover`."""
        self._worker(worker)
        shml_release(&self._ring, worker)

    @property
    @cython.critical_section
    def num_unattended(self):
        """Return the number of open chunks beyond those that the pool's idle workers are about to claim."""
        cdef uint32_t num_idle = shml_num_idle(&self._ring), num_open = shml_num_open(&self._ring)
        return num_open - num_idle if num_open > num_idle else 0
