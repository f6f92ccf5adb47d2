# The state of each slot of a ring (SHML_FREE and the others of lease.h), and the counters; included by trainer.pyx.


cdef class LocalRing:
    """The trainer's view of a ring: the states of slots, and the counters.

    Args:
        control: mapping of zeroed memory, `control_nbytes(...)` long; all other arguments are keywords.
        num_usable: slots that are in use at first, while the others are parked; 0 for all.
        is_static: batch i belongs to one worker, and each worker takes its orders oldest first.
        threads_per_worker: rows that a worker reads at a time, which is the least size of a chunk.
        num_cpus: processors that the workers share; 0 for at least as many as workers.
    """

    cdef shml_ring _ring
    cdef shml_local_ring *_local_ring
    cdef object _control
    cdef _LocalRing _entry
    cdef int _num_forks
    cdef Share _shared  # reports between the ranks that read the ring; None if only this one reads it
    cdef object _pid
    cdef uint32_t _threads_per_worker, _num_cpus
    cdef int _delivering  # the slot leased last, until its batch is counted; -1 if none is
    cdef uint32_t _max_workers_per_batch  # that may fill one batch together, by the newest order
    cdef readonly int num_slots, num_workers

    def __cinit__(self, control, *, uint32_t num_slots, uint32_t num_workers, uint64_t order_capacity,
                  uint64_t text_capacity, uint64_t layout_capacity, bint is_static=False, uint32_t threads_per_worker=1,
                  uint32_t num_cpus=0, uint32_t num_usable=0):
        cdef uint64_t needed = shml_plan(NULL, num_slots, num_workers, order_capacity, text_capacity, layout_capacity)
        if num_slots < 1 or num_workers > SHML_MAX_WORKERS or num_usable > num_slots:
            raise ValueError(f"a ring must have at least 1 slot and at most {SHML_MAX_WORKERS} workers, "
                             f"got num_slots={num_slots}, num_workers={num_workers}, num_usable={num_usable}")
        if control.nbytes < needed:
            raise ValueError(f"the control block needs {needed} bytes, but the mapping has {control.nbytes}")
        self._control = control
        self._num_forks = shml_num_forks
        self._pid = os.getpid()
        self.num_slots = num_slots
        self.num_workers = num_workers
        self._threads_per_worker = max(threads_per_worker, 1)
        self._num_cpus = num_cpus
        self._delivering = -1
        self._max_workers_per_batch = 1
        shml_create(&self._ring, <void *><uintptr_t>control.address, num_slots, num_workers, order_capacity,
                    text_capacity, layout_capacity)
        self._ring.header.is_static = is_static
        self._ring.header.owner_pid = self._pid
        self._ring.header.owner_start_ns = shml_now_ns()
        self._local_ring = shml_local_ring_new(num_slots, num_usable or num_slots)
        for slot in range(num_usable or num_slots, num_slots):
            self._ring.slots[slot].state = SHML_PARKED
        if self._local_ring == NULL:
            raise MemoryError
        self._entry = _enter(self._local_ring)

    def __dealloc__(self):
        if self._local_ring != NULL:
            shml_local_ring_close(self._local_ring)
            shml_local_ring_drop(self._local_ring)

    cdef int _guard(self) except -1:
        if shml_num_forks != self._num_forks:
            raise RuntimeError(f"this loader belongs to process {self._pid}: create a new loader in a forked child")
        return 0

    cdef int _slot(self, int slot) except -1:
        if slot < 0 or slot >= self.num_slots:
            raise IndexError(f"slot {slot} is out of range: the ring has {self.num_slots}")
        return self._guard()

    cdef int _worker(self, uint32_t worker) except -1:
        if worker >= <uint32_t>self.num_workers:
            raise IndexError(f"worker {worker} is out of range: the ring has {self.num_workers}")
        return self._guard()

    # ------------------------------------------------------------ slots

    cdef void _collect(self):
        """Collect the slots that leases have released."""
        cdef uint32_t first = self._local_ring.num_free, first_pending_copies = self._local_ring.num_pending_copies
        shml_local_ring_collect(self._local_ring)
        if shml_num_forks != self._num_forks:
            return  # in a forked child, this copy is not the state of the slots
        cdef shml_place *place
        for i in range(first, self._local_ring.num_free):
            slot = self._local_ring.free_list[i]
            place = &self._local_ring.places[slot]
            self._ring.slots[slot].state = SHML_FREE
            self._log_event(SHML_EVENT_LEASE, place.leased_ns, place.released_ns, slot, 0, 0)
        for i in range(first_pending_copies, self._local_ring.num_pending_copies):  # stats readers see it as leased until its copies have finished
            place = &self._local_ring.places[self._local_ring.pending_copies[i]]
            self._log_event(SHML_EVENT_LEASE, place.leased_ns, place.released_ns, self._local_ring.pending_copies[i], 0, 0)

    cdef void _log_event(self, uint32_t kind, uint64_t begin_ns, uint64_t end_ns, int slot, uint32_t place, uint64_t amount):
        """Record an event of a slot's order for stats readers."""
        shml_record_of_slot(&self._ring, self.num_workers, kind, begin_ns, end_ns, self._local_ring.places[slot].order, slot, place,
                            self._ring.slots[slot].nrows, amount)

    @cython.critical_section
    def hold(self):
        """Take the most recently freed slot for publication. Return -1 if none is free."""
        self._guard()
        self._collect()
        if not self._has_free():
            return -1
        self._local_ring.num_free -= 1
        cdef int slot = self._local_ring.free_list[self._local_ring.num_free]
        self._set_state(slot, SHML_HELD)
        return slot

    cdef bint _has_free(self):
        """Return whether a slot is free, and move it to the top of the list. In a shared ring, no other rank may still read it."""
        cdef uint32_t at = self._local_ring.num_free
        cdef int32_t slot
        if self._shared is None:
            return at > 0
        while at > 0:
            at -= 1
            slot = self._local_ring.free_list[at]
            if shml_share_is_passed(&self._shared._share, slot):
                self._local_ring.free_list[at] = self._local_ring.free_list[self._local_ring.num_free - 1]
                self._local_ring.free_list[self._local_ring.num_free - 1] = slot
                return True
        return False

    cdef int _require_final(self, int slot) except -1:
        cdef shml_status status = shml_inspect(&self._ring, slot)
        if status.num_open or status.num_claimed:
            raise ValueError(f"slot {slot} still has {status.num_open} open and {status.num_claimed} claimed chunks")
        return 0

    cdef void _set_state(self, int slot, int state):
        self._local_ring.places[slot].state = state
        self._ring.slots[slot].state = state

    @cython.critical_section
    def free(self, int slot):
        """Free a slot that was held, or whose order has ended without a delivery."""
        self._slot(slot)
        cdef int state = self._local_ring.places[slot].state
        if state == SHML_FREE or state == SHML_LEASED or state == SHML_PENDING_COPIES:
            raise ValueError(f"the trainer cannot free slot {slot}: its state is {state}")
        if state != SHML_HELD:
            self._require_final(slot)
        if self._shared is None:  # otherwise followers must find the failure, and no worker of a shared ring waits for it
            shml_give_up(&self._ring, slot)
        shml_local_ring_push_free(self._local_ring, slot)
        self._ring.slots[slot].state = SHML_FREE

    @cython.critical_section
    def state(self, int slot):
        """Return the slot's private state: FREE, HELD, ORDERED, LEASED, DRAINING, PARKED or PENDING_COPIES."""
        self._slot(slot)
        self._collect()
        return self._local_ring.places[slot].state

    # ------------------------------------------------------------ copies to a device

    @cython.critical_section
    def await_copies(self, ended):
        """Free each released slot only after `copies_done`. May be called once, before the first lease.

        Args:
            ended: called with a slot when its lease ends, in any thread of Python, before the slot is released; not in threads of
                other code, at the interpreter's exit or in a forked child. Its exceptions are dropped. It must not refer to the
                ring.
        """
        self._guard()
        if self._local_ring.pending_copies != NULL or self._local_ring.num_leased:
            raise ValueError("await_copies() must be called once, before the first lease")
        if shml_local_ring_await_copies(self._local_ring, _report_ended, <void *>self._entry):
            raise MemoryError
        self._entry._ended = ended

    @property
    @cython.critical_section
    def pending_copies(self):
        """Return the slots with pending copies."""
        self._guard()
        self._collect()
        return [self._local_ring.pending_copies[i] for i in range(self._local_ring.num_pending_copies)]

    @cython.critical_section
    def copies_done(self, int slot):
        """Free a slot whose pending copies have finished."""
        self._slot(slot)
        if shml_local_ring_copies_done(self._local_ring, slot):
            raise ValueError(f"slot {slot} has no pending copies: its state is {self._local_ring.places[slot].state}")
        self._ring.slots[slot].state = SHML_FREE

    # ------------------------------------------------------------ slots in use

    @cython.critical_section
    def park(self, int slot):
        """Take a free slot out of use, and drop its payload."""
        if self.state(slot) != SHML_FREE:
            raise ValueError(f"slot {slot} cannot be parked unless it is free: its state is {self._local_ring.places[slot].state}")
        cdef shml_place *place = &self._local_ring.places[slot]
        cdef shml_slot *record = &self._ring.slots[slot]
        shml_local_ring_pull_free(self._local_ring, slot)
        self._local_ring.num_usable -= 1
        self._set_state(slot, SHML_PARKED)
        shml_map_drop(place.map)
        place.map = NULL
        place.offset = place.nbytes = 0
        memset(record.payload_path, 0, SHML_PATH_NBYTES)
        record.payload_offset = record.payload_nbytes = 0
        record.payload_version += 1

    @cython.critical_section
    def unpark(self, int slot):
        """Bring a parked slot back into use."""
        if self.state(slot) != SHML_PARKED:
            raise ValueError(f"slot {slot} is not parked: its state is {self._local_ring.places[slot].state}")
        shml_local_ring_push_free(self._local_ring, slot)
        self._local_ring.num_usable += 1
        self._ring.slots[slot].state = SHML_FREE

    @property
    @cython.critical_section
    def num_usable(self):
        """Return the number of slots that are not parked."""
        return self._local_ring.num_usable

    @property
    @cython.critical_section
    def num_wanted(self):
        """Return the number of wanted workers, which are the first ones. The others leave when they have finished their claim."""
        return self._ring.header.num_wanted

    @num_wanted.setter
    @cython.critical_section
    def num_wanted(self, uint32_t count):
        if count < 1 or count > <uint32_t>self.num_workers:
            raise ValueError(f"the number of workers must be 1 to {self.num_workers}, got {count}")
        self._guard()
        self._ring.header.num_wanted = count

    @cython.critical_section
    def set_payload(self, int slot, mapping, bytes path, uint64_t offset, uint64_t nbytes):
        """Set a slot's payload: `nbytes` from `offset` of `mapping`, whose segment workers open as `path`.

        Allowed while no process reads or writes the slot: it is held or free, or its only claimant waits for `need_nbytes`.
        """
        self._slot(slot)
        if len(path) >= SHML_PATH_NBYTES:
            raise ValueError(f"a payload path must have at most {SHML_PATH_NBYTES - 1} bytes, got {len(path)}")
        if nbytes > <uint64_t>mapping.nbytes or offset > <uint64_t>mapping.nbytes - nbytes:
            raise ValueError(f"the slot of {nbytes} bytes at {offset} ends beyond its segment of {mapping.nbytes}")
        cdef shml_place *place = &self._local_ring.places[slot]
        cdef shml_slot *record = &self._ring.slots[slot]
        if place.state == SHML_LEASED or place.state == SHML_PENDING_COPIES:
            raise ValueError(f"cannot change the payload of slot {slot} while it is leased")
        shml_map_drop(place.map)
        place.map = shml_map_keep(<shml_map *><uintptr_t>mapping.handle)
        place.offset = offset
        place.nbytes = nbytes
        memset(record.payload_path, 0, SHML_PATH_NBYTES)
        memcpy(record.payload_path, <const char *>path, len(path))
        record.payload_offset = offset
        record.payload_nbytes = nbytes
        record.payload_version += 1

    @cython.critical_section
    def let_go(self):
        """Unmap the payloads of a ring that has ended, except for leases. This object may be kept for its counters."""
        self._guard()
        shml_local_ring_close(self._local_ring)

    @cython.critical_section
    def payload_nbytes(self, int slot):
        """Return the bytes that the slot may use; 0 before the layout is known."""
        self._slot(slot)
        return self._local_ring.places[slot].nbytes

    @property
    @cython.critical_section
    def num_leased(self):
        """Return the number of slots with a live lease."""
        self._collect()
        return self._local_ring.num_leased

    @property
    @cython.critical_section
    def num_lendable(self):
        """Return the number of slots that may be leased at a time.

        A batch in the last of them is copied out, which leaves slots for the workers. Every worker needs a slot to write into: its
        own slot if one worker fills a batch, or a part of one if workers share it. Otherwise a program that keeps its last batches
        would leave workers idle.
        """
        if self._shared is not None:
            return shml_share_lendable(&self._shared._share)
        cdef uint32_t num_usable = self._local_ring.num_usable
        cdef uint32_t num_kept = (<uint32_t>self._ring.header.num_wanted + self._max_workers_per_batch - 1) // self._max_workers_per_batch
        return max(num_usable + 1 - min(max(num_kept, 1), num_usable), min(num_usable, <uint32_t>2))

    @property
    @cython.critical_section
    def num_free(self):
        """Return the number of slots that are free now."""
        self._collect()
        return self._local_ring.num_free

    # ------------------------------------------------------------ counters

    @cython.critical_section
    def count_restart(self, uint32_t worker):
        """Count a replaced worker, when another process has taken its number."""
        self._worker(worker)
        self._ring.header.num_restarts += 1
        self._ring.workers[worker].num_restarts += 1

    @cython.critical_section
    def forget(self, uint32_t worker):
        """Clear the record of a worker that has left for good. Only after its process has ended."""
        self._worker(worker)
        self._ring.workers[worker].started_ns = 0
        self._ring.workers[worker].pid = 0

    @cython.critical_section
    def count_bad_samples(self, uint64_t num_bad):
        """Set the number of samples that could not be read so far."""
        self._ring.header.num_bad_samples = num_bad

    @cython.critical_section
    def count_copied_out(self):
        """Count a batch copied to private memory."""
        self._ring.header.num_copied_out += 1

    @cython.critical_section
    def counters(self):
        """Return the header's counters as a dict."""
        cdef shml_header *h = self._ring.header
        return {"batches": h.batches, "samples": h.samples, "nbytes": h.nbytes, "wait_s": h.wait_ns / 1e9,
                "num_waits": h.num_waits, "num_copied_out": h.num_copied_out, "num_grown": h.num_grown,
                "num_restarts": h.num_restarts, "generation": h.generation}

    # ------------------------------------------------------------ stats readers

    @cython.critical_section
    def introduce(self, *, bytes dataset_name, bytes read_path, uint32_t rank, uint32_t world_size):
        """Write the loader's names and rank for stats readers. A name is cut to its capacity."""
        cdef shml_header *h = self._ring.header
        dataset_name, read_path = dataset_name[:SHML_NAME_NBYTES - 1], read_path[:15]
        memcpy(h.dataset_name, <const char *>dataset_name, len(dataset_name))
        memcpy(h.read_path, <const char *>read_path, len(read_path))
        h.rank, h.world_size = rank, world_size

    @cython.critical_section
    def begin_pass(self, uint64_t num_steps, *, uint32_t step_stride=1):
        """Write the length of the pass that begins now (0 if not known), and how its orders count steps."""
        self._ring.header.num_steps = num_steps
        self._ring.header.step_stride = step_stride

    @cython.critical_section
    def batch_of(self, int64_t step):
        """Return the number of an order's batch within its epoch, for messages.

        It equals `step`, except with an order of whole batches, in which a step counts the batches of all ranks.
        """
        cdef int64_t stride = max(self._ring.header.step_stride, 1)
        return (step + stride - 1) // stride

    @property
    @cython.critical_section
    def order_capacity(self):
        """Return the size in bytes of a slot's order area."""
        return self._ring.header.order_capacity

    @cython.critical_section
    def worker(self, uint32_t worker):
        """Return one worker's record as a dict."""
        if worker >= <uint32_t>self.num_workers:
            raise IndexError(f"worker {worker} is out of range: the ring has {self.num_workers}")
        cdef shml_worker *r = &self._ring.workers[worker]
        return {"pid": r.pid, "started_ns": r.started_ns, "since_ns": r.since_ns, "index": <int64_t>r.index,
                "is_waiting": bool(r.is_waiting), "busy_s": r.busy_ns / 1e9, "num_chunks": r.num_chunks,
                "num_samples": r.num_samples, "num_foreign": r.num_foreign, "num_irregular": r.num_irregular}

    @property
    @cython.critical_section
    def poison(self):
        """Return whether a slot's bytes are overwritten when it is released, for debugging."""
        return bool(self._local_ring.poison)

    @poison.setter
    @cython.critical_section
    def poison(self, bint on):
        self._local_ring.poison = on
