"""Read the flight recorder of a ring (src/events.h), in the trainer or from another process, without disturbing any writer.

The block's offsets are checked against its length once, and only the checked values are used afterwards.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from cpython.bytearray cimport PyByteArray_AS_STRING

cdef extern from "protocol.h" nogil:
    ctypedef struct shml_header:
        uint64_t magic, workers_offset, events_offset, events_per_ring
        uint32_t abi, num_workers, is_closing
        int64_t owner_pid, owner_start_ns
    ctypedef struct shml_recorder:
        uint64_t head
    ctypedef struct shml_worker:
        uint64_t pid
    enum:
        SHML_ABI, SHML_MAX_WORKERS, SHML_ALIGN, SHML_ERROR, SHML_VOID, SHML_DONE
        SHML_EVENT_CHUNK, SHML_EVENT_IDLE, SHML_EVENT_ROOM, SHML_EVENT_LAYOUT, SHML_EVENT_START
        SHML_EVENT_WAIT, SHML_EVENT_DELIVER, SHML_EVENT_PUBLISH, SHML_EVENT_LEASE, SHML_EVENT_ABANDON
    const uint64_t SHML_MAGIC
    uint64_t shml_recorder_nbytes(uint32_t capacity)
    uint64_t shml_read_events(const shml_recorder *recorder, uint32_t capacity, uint64_t since, uint64_t *out, uint64_t *first)

EVENT_NBYTES = 64
KINDS = {
    SHML_EVENT_CHUNK: "chunk", SHML_EVENT_IDLE: "idle", SHML_EVENT_ROOM: "room", SHML_EVENT_LAYOUT: "layout",
    SHML_EVENT_START: "start", SHML_EVENT_WAIT: "wait", SHML_EVENT_DELIVER: "deliver", SHML_EVENT_PUBLISH: "publish",
    SHML_EVENT_LEASE: "lease", SHML_EVENT_ABANDON: "abandon",
}
RESULTS = {SHML_DONE: "done", SHML_VOID: "void", SHML_ERROR: "error"}


cdef class Recorders:
    """The recorders of one control block: one for each worker and, last, the trainer's.

    Args:
        control: mapping of the block; may be read-only.

    Attributes:
        num_workers: number of worker records, which is also the number of the trainer's recorder.
        owner_pid, owner_start_ns: the trainer's pid, and CLOCK_MONOTONIC when it made the block.

    Raises:
        ValueError: not a control block of this version, damaged, or without recorders.
    """

    cdef object _control
    cdef char *_base
    cdef shml_worker *_workers
    cdef uint64_t _stride
    cdef uint32_t _capacity
    cdef readonly int num_workers
    cdef readonly int64_t owner_pid, owner_start_ns

    def __cinit__(self, control):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        cdef uint64_t nbytes = control.nbytes, offset, workers
        cdef uint32_t num_workers
        if nbytes < sizeof(shml_header) or header.magic != SHML_MAGIC:
            raise ValueError("the memory is not the control block of a loader")
        if header.abi != SHML_ABI:
            raise ValueError(f"the control block has layout version {header.abi}, and this shmload reads version {SHML_ABI}: "
                             "use the shmload that the loader runs with")
        offset, workers, num_workers = header.events_offset, header.workers_offset, header.num_workers
        self._capacity = header.events_per_ring & 0xFFFFFFFF
        self._stride = shml_recorder_nbytes(self._capacity)
        if (self._capacity == 0 or self._capacity & (self._capacity - 1) or header.events_per_ring != self._capacity
                or offset % SHML_ALIGN or offset < sizeof(shml_header) or offset > nbytes
                or workers % SHML_ALIGN or workers > nbytes or num_workers > <uint32_t>SHML_MAX_WORKERS
                or num_workers * sizeof(shml_worker) > nbytes - workers
                or (num_workers + <uint64_t>1) * self._stride > nbytes - offset):
            raise ValueError(f"the control block of {nbytes} bytes is damaged: it claims {num_workers} workers from byte {workers} on "
                             f"and {header.events_per_ring} events each from byte {offset} on")
        self.num_workers = num_workers
        self._workers = <shml_worker *>(<char *>header + workers)
        self._control = control
        self._base = <char *>header + offset
        self.owner_pid = header.owner_pid
        self.owner_start_ns = header.owner_start_ns

    cdef shml_recorder *_recorder(self, int owner) except NULL:
        if owner < 0 or owner > self.num_workers:
            raise IndexError(f"recorder {owner} does not exist: there are {self.num_workers + 1}")
        return <shml_recorder *>(self._base + owner * self._stride)

    @property
    def capacity(self):
        """Return the number of events that a recorder keeps."""
        return self._capacity

    @property
    def is_closing(self):
        """Return whether the loader has asked its workers to exit."""
        return bool((<shml_header *><uintptr_t>self._control.address).is_closing)

    def pids(self):
        """Return the process ID of each worker as the worker itself sees it; 0 if it has not started."""
        return [self._workers[worker].pid for worker in range(self.num_workers)]

    def heads(self):
        """Return how many events each owner has ever written."""
        return [self._recorder(owner).head for owner in range(self.num_workers + 1)]

    def most_unread(self, list since):
        """Return the largest number of events that any recorder has written after the given numbers."""
        cdef uint64_t most = 0, head, seen
        cdef int owner
        for owner in range(self.num_workers + 1):
            head, seen = self._recorder(owner).head, since[owner]
            if head > seen and head - seen > most:
                most = head - seen
        return most

    def read(self, int owner, uint64_t since):
        """Return the events numbered `since` or later that still exist.

        Returns:
            (first, raw): the number of the first, and EVENT_NBYTES bytes for each. Those from `since` to `first` were overwritten.
        """
        cdef shml_recorder *recorder = self._recorder(owner)
        if recorder.head <= since:
            return since, b""
        raw = bytearray(self._capacity * EVENT_NBYTES)
        cdef uint64_t *out = <uint64_t *>PyByteArray_AS_STRING(raw)
        cdef uint64_t first, count
        with nogil:
            count = shml_read_events(recorder, self._capacity, since, out, &first)
        return first, bytes(memoryview(raw)[:count * EVENT_NBYTES])
