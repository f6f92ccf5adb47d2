# Orders, and their publication in slots; included by trainer.pyx.


cdef class Order:
    """One batch to be made: its position, its samples, and (in torch mode) its worker. `slot` is -1 until it is published.

    An iterable dataset's order has one index for each wanted sample, and all of them are the pass's shared seed.

    Args:
        is_samplers_object: the indices are the object that the user's batch sampler has yielded, which `__getitems__` gets unchanged.
    """

    cdef public int64_t epoch, step
    cdef public object indices  # an int64 array, or a sequence of a sampler's keys
    cdef public int worker, slot
    cdef public bint is_samplers_object
    cdef public object origins  # for each row after bad samples: (its original row, substitutes tried); None without bad samples
    cdef public object ordered  # the indices before bad samples were replaced; None without bad samples

    def __init__(self, int64_t epoch, int64_t step, indices, int worker=SHML_ANYONE, *, bint is_samplers_object=False):
        self.epoch = epoch
        self.step = step
        self.indices = indices
        self.worker = worker
        self.slot = -1
        self.is_samplers_object = is_samplers_object

    def __repr__(self):
        return f"Order(epoch={self.epoch}, step={self.step}, indices={self.indices!r}, worker={self.worker}, slot={self.slot})"

    @property
    def nrows(self):
        """Return the number of rows of the batch; 1 if the batch sampler's own object, such as a slice, has no length."""
        return len(self.indices) if hasattr(self.indices, "__len__") else 1


cdef class OrderRing(LocalRing):
    """A ring that writes orders into free slots and opens them to workers."""

    cdef uint64_t _order  # number of the newest order
    cdef uint32_t _expected_nrows
    cdef uint64_t _expected_nbytes

    @cython.critical_section
    def publish(self, int slot, *, int64_t epoch, int64_t step, indices, uint32_t nrows, uint32_t nchunks=1,
                bint is_packed=False, bint is_pickled=False, int reserved=SHML_ANYONE, bytes order_path=b""):
        """Write an order into a held slot, or into one whose order has ended without delivery, and open it to workers.

        Args:
            slot: the slot.
            epoch, step: the batch's place.
            nrows, nchunks: number of rows, and of chunks that workers claim.
            is_packed: the batch is packed, so one worker writes it.
            is_pickled: `indices` is a pickle.
            indices: buffer with the order's bytes: `nrows` int64, or a pickle of them. If `order_path` names a segment that contains
                the bytes, only its length is used.
            reserved: the only worker that may claim it, or ANYONE.
        Returns:
            the order number.
        """
        self._slot(slot)
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._local_ring.places[slot]
        cdef Py_buffer view
        if place.state != SHML_HELD and place.state != SHML_ORDERED:
            raise ValueError(f"slot {slot} must be held before it is published, but its state is {place.state}")
        if place.state == SHML_ORDERED:
            self._require_final(slot)
        if nchunks < 1 or nchunks > SHML_MAX_CHUNKS or (nrows and nchunks > nrows):
            raise ValueError(f"an order must have 1 to {SHML_MAX_CHUNKS} chunks and at most one per row, "
                             f"got {nchunks} chunks for {nrows} rows")
        if is_packed and nchunks != 1:
            raise ValueError(f"a packed batch must be written by one worker, in an order of 1 chunk, got {nchunks}")
        if len(order_path) >= SHML_PATH_NBYTES:
            raise ValueError(f"an order path must have at most {SHML_PATH_NBYTES - 1} bytes, got {len(order_path)}")
        PyObject_GetBuffer(indices, &view, PyBUF_SIMPLE)
        try:
            if not is_pickled and <uint64_t>view.len != <uint64_t>nrows * 8:
                raise ValueError(f"{nrows} rows need {nrows * 8} bytes of indices, got {view.len}")
            if not order_path:
                if <uint64_t>view.len > self._ring.header.order_capacity:
                    raise ValueError(f"the order has {view.len} bytes, more than the order area of {self._ring.header.order_capacity}")
                memcpy(shml_order_area(&self._ring, slot), view.buf, view.len)
            record.order_nbytes = view.len
        finally:
            PyBuffer_Release(&view)
        memset(record.order_path, 0, SHML_PATH_NBYTES)
        memcpy(record.order_path, <const char *>order_path, len(order_path))
        record.epoch = epoch
        record.step = step
        record.order_kind = SHML_ORDER_PICKLED if is_pickled else SHML_ORDER_INT64
        return self._open(slot, nrows, nchunks, is_packed, reserved)

    cdef uint64_t _open(self, int slot, uint32_t nrows, uint32_t nchunks, bint is_packed, int reserved):
        """Open an order, which is written in its slot, to workers."""
        cdef shml_slot *record = &self._ring.slots[slot]
        cdef shml_place *place = &self._local_ring.places[slot]
        record.nrows = nrows
        record.nchunks = nchunks
        self._max_workers_per_batch = 1 if is_packed or reserved >= 0 else max(nrows, <uint32_t>1)
        record.form = SHML_FORM_PACKED if is_packed else SHML_FORM_ROWS
        record.generation = self._ring.header.generation
        record.ordered_ns = shml_now_ns()
        self._order += 1
        place.order = self._order
        place.reserved = reserved
        cdef bint is_rewritten = place.state == SHML_ORDERED
        self._set_state(slot, SHML_ORDERED)
        if self._shared is not None:
            shml_share_rewrites(&self._shared._share, slot)
        shml_publish(&self._ring, slot, self._order, reserved)
        if self._shared is not None:
            self._shared._wrote(&self._ring, slot, self._order, is_rewritten)
        self._log_event(SHML_EVENT_PUBLISH, record.ordered_ns, record.ordered_ns, slot, nchunks, 0)
        return self._order

    @cython.critical_section
    def expect(self, uint32_t nrows, uint64_t nbytes):
        """Set the payload size of batches of up to `nrows` rows for `post`, which until then posts only packed batches."""
        self._expected_nrows = nrows
        self._expected_nbytes = nbytes

    @cython.critical_section
    def post(self, Order order, *, bint is_packed):
        """Publish an order in a free slot in the usual case: its int64 indices fit the order area, and the slot has the room.

        One call in place of `hold`, `publish` and the steps between them, which cost most with small batches.

        Returns:
            the number of its chunks; 0 if this is not the usual case or no slot is free (then nothing was changed).
        """
        self._guard()
        self._collect()
        if order.is_samplers_object or not self._has_free() or type(order.indices) is not ndarray:
            return 0
        cdef int slot = self._local_ring.free_list[self._local_ring.num_free - 1]
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
            if not is_packed and (nrows > self._expected_nrows or self._local_ring.places[slot].nbytes < self._expected_nbytes):
                return 0
            memcpy(shml_order_area(&self._ring, slot), view.buf, view.len)
            record.order_nbytes = view.len
        finally:
            PyBuffer_Release(&view)
        self._local_ring.num_free -= 1
        record.epoch = order.epoch
        record.step = order.step
        record.order_kind = SHML_ORDER_INT64
        cdef uint32_t nchunks = 1 if is_packed or order.worker >= 0 else self._num_chunks(nrows)
        order.slot = slot
        self._open(slot, nrows, nchunks, is_packed, order.worker)
        return nchunks

    @cython.critical_section
    def count_batch(self, Order order, uint64_t nbytes):
        """Count a delivered batch. Return whether all lendable slots are leased, so that the next batch might not find a slot."""
        if self._delivering >= 0:
            self._log_event(SHML_EVENT_DELIVER, self._local_ring.places[self._delivering].leased_ns, shml_now_ns(), self._delivering, 0, nbytes)
            self._delivering = -1
        shml_count_batch(self._ring.header, order.nrows, nbytes, order.epoch, order.step)
        self._collect()
        return self._local_ring.num_leased >= self.num_lendable

    @cython.critical_section
    def num_chunks(self, uint32_t nrows):
        """Return the number of chunks for a batch of rows: enough for all workers, but none with less work than CHUNK_WORK_NS."""
        return self._num_chunks(nrows)

    cdef uint32_t _num_chunks(self, uint32_t nrows):
        cdef uint32_t most = min(4 * <uint32_t>self._ring.header.num_wanted, <uint32_t>SHML_MAX_CHUNKS, nrows // self._threads_per_worker)
        if most <= 1:
            return 1
        cdef uint64_t busy_ns = 0, num_samples = 0
        for worker in range(self.num_workers):
            busy_ns += self._ring.workers[worker].busy_ns
            num_samples += self._ring.workers[worker].num_samples
        if num_samples < 2 * <uint64_t>nrows:
            return most
        cdef double work_ns = <double>nrows * busy_ns / num_samples
        if 0 < self._num_cpus < self._ring.header.num_wanted:
            work_ns *= <double>self._num_cpus / self._ring.header.num_wanted  # for the rest of their time, workers wait for a processor
        return max(1, min(most, <uint32_t>(work_ns / CHUNK_WORK_NS)))
