# Helpers in a ring: workers of the node's other ranks, as its trainer sees them; included by trainer.pyx.


cdef class HostRing(OrderRing):
    """The ring's side door. Records beyond `num_wanted` are for helpers (helpers.h)."""

    def requests(self):
        """(record, ticket) of each helper that waits to be let in."""
        self._guard()
        cdef uint32_t worker
        cdef uint64_t ticket
        found = []
        for worker in range(<uint32_t>self._ring.header.num_wanted, <uint32_t>self.num_workers):
            ticket = shml_requests(&self._ring, worker)
            if ticket:
                found.append((worker, ticket))
        return found

    def accept(self, uint32_t worker, uint64_t ticket):
        """Lets a helper claim chunks. Only with hold of its process: its end must be seen."""
        self._worker(worker)
        shml_accept(&self._ring, worker, ticket)

    def release(self, uint32_t worker):
        """Clears a helper's record for the next. Only when its process has ended, and after `recover`."""
        self._worker(worker)
        shml_release(&self._ring, worker)

    @property
    def num_unattended(self):
        """Chunks that are open beyond those that idle workers of the worker pool are about to claim."""
        cdef uint32_t num_idle = shml_num_idle(&self._ring), num_open = shml_num_open(&self._ring)
        return num_open - num_idle if num_open > num_idle else 0
