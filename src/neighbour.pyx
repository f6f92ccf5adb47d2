"""Another rank's ring, as the node's other trainers and their workers see it: who of its worker pool is idle, whether its trainer waits.

Only words that are there for stats readers are read, and what they say may be over when it is heard: it decides who is rung for and who is
helped first, and nothing else.
"""

include "ring.pxi"


cdef class Neighbour:
    """One neighbour's control block.

    Args:
        control: mapping of all of it.
    Raises:
        ValueError: it is no control block of this layout version.
    """

    cdef shml_ring _ring
    cdef object _control

    def __cinit__(self, control):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        if <uint64_t>control.nbytes < sizeof(shml_header) or header.magic != SHML_MAGIC or header.abi != SHML_ABI:
            raise ValueError(f"this is no control block of layout version {SHML_ABI}")
        if header.total_nbytes > <uint64_t>control.nbytes:
            raise ValueError(f"a control block of {header.total_nbytes} bytes does not fit its mapping of {control.nbytes}")
        self._control = control
        shml_view(&self._ring, header)

    @property
    def num_idle(self):
        """Workers of its worker pool that sleep until there is something to do."""
        return shml_num_idle(&self._ring)

    @property
    def is_closing(self):
        """Whether its trainer wants nothing any more."""
        return bool(self._ring.header.is_closing)

    @property
    def waiting_since_ns(self):
        """CLOCK_MONOTONIC when its trainer began to wait for a batch; 0: it does not."""
        return self._ring.header.waiting_since_ns
