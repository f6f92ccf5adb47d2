"""The status of another rank of the node: its idle workers, and since when its trainer waits.

Only the words for stats readers are read. Their values may be outdated by the time they are used: they only decide which rank is
woken and which is helped first.
"""

include "ring.pxi"


cdef class PeerStatus:
    """Status of another rank's worker pool and trainer, read from its control block.

    Args:
        control: mapping of the whole block.
    Raises:
        ValueError: not a control block of this layout version.
    """

    cdef shml_ring _ring
    cdef object _control

    def __cinit__(self, control):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        if <uint64_t>control.nbytes < sizeof(shml_header) or header.magic != SHML_MAGIC or header.abi != SHML_ABI:
            raise ValueError(f"the memory is not a control block of layout version {SHML_ABI}: "
                             "all ranks of a node must run the same version of shmload")
        if header.total_nbytes > <uint64_t>control.nbytes:
            raise ValueError(f"the control block of {header.total_nbytes} bytes ends beyond its mapping of {control.nbytes} bytes")
        self._control = control
        shml_view(&self._ring, header)

    @property
    def num_idle(self):
        """Return the number of its workers that sleep until there is work."""
        return shml_num_idle(&self._ring)

    @property
    def is_closing(self):
        """Return whether its trainer is closing."""
        return bool(self._ring.header.is_closing)

    @property
    def waiting_since_ns(self):
        """Return the CLOCK_MONOTONIC time in ns at which its trainer began to wait for a batch; 0 if it does not wait."""
        return self._ring.header.waiting_since_ns
