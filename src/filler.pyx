"""A worker's end of a ring: claim a chunk of rows, record the row being decoded, write it, finish.

Each claim is followed by exactly one finish. All fields of an order are read after the claim, because they cannot change from then
on.

In a Python without the GIL, the critical section of the ring replaces it: it is held in every call.
"""

cimport cython

include "ring.pxi"

from libc.string cimport memcpy

from shmload._core.rows cimport Part
from shmload._core.twister cimport Reseeder, index_of, integer_of

import os

DONE = SHML_DONE
VOID = SHML_VOID
ERROR = SHML_ERROR
# The reasons for which a worker with a claim waits.
ROOM = SHML_EVENT_ROOM
LAYOUT = SHML_EVENT_LAYOUT

cdef extern from *:
    """
    static _Atomic int64_t shml_num_begun; /* samples begun by all rings of this process */
    static int64_t shml_begin_sample(void) { return atomic_fetch_add_explicit(&shml_num_begun, 1, memory_order_relaxed) + 1; }
    """
    int64_t shml_begin_sample()

cdef uint64_t IDLE_NS = 1_000_000_000  # a wait for orders is reported in parts of this length, so that stats readers see it early


cdef class WorkerRing:
    """One worker's view of the control block.

    Args:
        control: mapping of the control block.
        worker_id: number of the worker's record.
    Raises:
        ValueError: the control block has another version, or no record of this number.

    Between `claim` and `finish`, the attributes describe the claim: `slot`, `chunk`, `order` (its number), rows `first_row` to
    `end_row` of `nrows`, `nchunks`, `epoch`, `step`, whether the order `is_pickled`, and whether it `is_packed` (then one chunk is
    the whole batch).

    `index` keys the random numbers of the sample begun last (see `index_of` of twister.pyx), and `begun` is a number that is unique
    in this process (0 before the first sample of the claim). While one sample is being read, `key` and `row` are those of the
    sample; otherwise they are None and -1.

    If `awaits_repair` is set, `claim` returns False until the trainer has ordered the failed batch of the last claim again, which is
    then claimed first, or has dropped it.
    """

    cdef shml_ring _ring
    cdef shml_claim _claim
    cdef object _control
    cdef uint64_t _claimed_ns
    cdef uint64_t _idle_ns  # time since which it waits for orders; 0 if it does not wait
    cdef bint _is_claimed, _is_detached
    cdef readonly int worker_id
    cdef readonly int slot, chunk, first_row, end_row, nrows, nchunks
    cdef readonly int64_t epoch, step
    cdef int64_t _index
    cdef object _hashed  # the key of the sample begun last, if its hash is `index` but was not computed yet; else None
    cdef readonly uint64_t order
    cdef readonly bint is_packed, is_pickled
    cdef readonly object key
    cdef readonly int row
    cdef readonly int64_t begun
    cdef public bint awaits_repair

    def __cinit__(self, control, uint32_t worker_id):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        if header.magic != SHML_MAGIC or header.abi != SHML_ABI:
            raise ValueError(f"the control block has layout version {header.abi}, and this shmload reads version {SHML_ABI}")
        if header.total_nbytes > control.nbytes or worker_id >= header.num_workers:
            raise ValueError(f"worker {worker_id} does not exist in a control block of {header.num_workers} workers and "
                             f"{control.nbytes} bytes")
        self._control = control
        self.worker_id = worker_id
        shml_view(&self._ring, header)

    @cython.critical_section
    def announce(self, uint64_t begun_ns=0):
        """Record that this process has started and is ready for orders.

        Args:
            begun_ns: CLOCK_MONOTONIC at its start, for stats readers; 0 if not known. If the ring was made later, its start counts.
        """
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        cdef uint64_t now = shml_now_ns()
        me.pid = os.getpid()
        me.started_ns = now
        if begun_ns:
            begun_ns = min(now, max(begun_ns, <uint64_t>self._ring.header.owner_start_ns))
            shml_record_of_none(&self._ring, self.worker_id, SHML_EVENT_START, begun_ns, now)

    @property
    @cython.critical_section
    def is_closing(self):
        """Return whether the trainer is closing the ring, so that all workers must leave."""
        return bool(self._ring.header.is_closing)

    @property
    @cython.critical_section
    def is_wanted(self):
        """Return whether this worker should continue: the ring is not closing, and the trainer wants a worker of this number."""
        return not self._ring.header.is_closing and <uint64_t>self.worker_id < self._ring.header.num_wanted

    @cython.critical_section
    def detach(self):
        """Separate this object from the ring for good, for a worker thread that is stuck in a sample. Called by the trainer.

        The thread goes on with a copy of the control block in which its order is abandoned and the ring is closing. So it leaves
        when it wakes up, and changes nothing that others see. Its claim can be recovered at once. All other methods that touch the
        control block within a claim hold the GIL or the ring's critical section, so none of them is under way.

        Returns:
            whether it was detached; False without a claim, because the worker is then not reading a sample.
        """
        if not self._is_claimed:
            return False
        if not self._is_detached:
            self._control.divert(True)
            self._ring.header.is_closing = 1
            self._ring.header.generation += 1
            self._is_detached = True
        return True

    @cython.critical_section
    def request(self, uint64_t identity):
        """Request admission as a helper; may be called again. Return whether it is admitted and may claim (helpers.h)."""
        return shml_request(&self._ring, self.worker_id, identity) == 1

    @cython.critical_section
    def waiting(self, bint on):
        """Record whether this worker waits for orders, for stats readers and for the trainers that it could help."""
        self._ring.workers[self.worker_id].is_waiting = on
        cdef uint64_t now
        if self._idle_ns == 0:
            self._idle_ns = shml_now_ns() if on else 0
        elif not on:
            now = shml_now_ns()
            if now - self._idle_ns >= IDLE_NS:
                self._end_idle(now)
                self._idle_ns = now  # the worker checks for orders now, and most likely continues to wait

    cdef void _end_idle(self, uint64_t now):
        shml_record_of_none(&self._ring, self.worker_id, SHML_EVENT_IDLE, self._idle_ns, now)
        self._idle_ns = 0

    @cython.critical_section
    def waited(self, uint32_t kind, uint64_t begin_ns):
        """Record for stats readers that this worker, with a claim, has waited from `begin_ns` until now.

        Args:
            kind: ROOM or LAYOUT.
            begin_ns: CLOCK_MONOTONIC at the beginning of the wait.
        """
        self._record()
        self._log_event(kind, begin_ns, shml_now_ns(), 0)

    cdef void _log_event(self, uint32_t kind, uint64_t begin_ns, uint64_t end_ns, uint32_t own):
        shml_record_of_slot(&self._ring, self.worker_id, kind, begin_ns, end_ns, self._claim.order, self._claim.slot,
                            self._claim.chunk, self.end_row - self.first_row, own)

    @cython.critical_section
    def claim(self, uint32_t num_left=0):
        """Claim the oldest chunk open to this worker. Return False if there is none now.

        Args:
            num_left: number of the oldest open orders that are left to others.
        """
        if self._is_claimed:
            raise RuntimeError("the worker already has a claim: finish it before the next one")
        cdef int found
        if self.awaits_repair:
            found = shml_take_failed(&self._ring, self.worker_id, self.epoch, self.step, &self._claim)
            if found < 0:
                found = shml_take_earlier(&self._ring, self.worker_id, self.epoch, self.step, &self._claim)
                if not found:
                    return False
            self.awaits_repair = False
            if found:
                self._read_claim()
                return True
        with nogil:
            found = shml_take_claim(&self._ring, self.worker_id, num_left, &self._claim)
        if found:
            self._read_claim()
        return bool(found)

    cdef int _read_claim(self) except -1:
        """Read the fields of the claimed order."""
        cdef shml_slot *record = &self._ring.slots[self._claim.slot]
        self._is_claimed = True
        self.end_sample()
        self.begun = 0
        self._claimed_ns = shml_now_ns()
        shml_count_claim(&self._ring.workers[self.worker_id], self._claimed_ns)
        if self._idle_ns:
            self._end_idle(self._claimed_ns)
        self.slot = self._claim.slot
        self.chunk = self._claim.chunk
        self.order = self._claim.order
        self.nrows = record.nrows
        self.nchunks = record.nchunks
        self.first_row = shml_first_row(record.nrows, record.nchunks, self._claim.chunk)
        self.end_row = shml_first_row(record.nrows, record.nchunks, self._claim.chunk + 1)
        self.epoch = record.epoch
        self.step = record.step
        self.is_packed = record.form == SHML_FORM_PACKED
        self.is_pickled = record.order_kind == SHML_ORDER_PICKLED

    @property
    @cython.critical_section
    def batch(self):
        """Return the number of the claimed batch within its epoch, for messages.

        It equals `step`, except with an order of whole batches, in which a step counts the batches of all ranks.
        """
        cdef int64_t stride = max(self._ring.header.step_stride, 1)
        return (self.step + stride - 1) // stride

    cdef shml_slot *_record(self) except NULL:
        if not self._is_claimed:
            raise RuntimeError("the worker has no claim: call claim() first")
        return &self._ring.slots[self._claim.slot]

    @property
    @cython.critical_section
    def order_path(self):
        """Return the path of the segment that contains the order's bytes; empty if they are in the order area."""
        return <bytes>(<const char *>self._record().order_path)

    @property
    @cython.critical_section
    def order_nbytes(self):
        """Return the number of the order's bytes."""
        return self._record().order_nbytes

    @cython.critical_section
    def order_bytes(self):
        """Return a copy of the order's bytes: the whole batch's int64 indices, or their pickle."""
        cdef shml_slot *record = self._record()
        return (<const char *>shml_order_area(&self._ring, self._claim.slot))[:record.order_nbytes]

    @cython.critical_section
    def begin_row(self, int row, key):
        """Record the row that this worker is about to decode, which is blamed if the process dies.

        Args:
            row: the row.
            key: key of its sample, of which stats readers see -1 if it is not an integer.
        Returns:
            whether the claimed order is still wanted.
        """
        return self._begin(row, key)

    @cython.critical_section
    cdef bint _begin(self, int row, object key) except -1:
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        self.key, self.row, self.begun, self._hashed = key, row, shml_begin_sample(), None
        if not integer_of(key, &self._index):
            self._index, self._hashed = -1, key
        me.index = <uint64_t>self._index
        me.since_ns = shml_now_ns()
        me.row = <uint64_t>row
        me.now = self._claim.order << 16 | <uint64_t>(row & 0xFFFF)
        return self._ring.header.generation == self._record().generation

    cdef int64_t _own_index(self) except? -1:
        if self._hashed is not None:  # in torch mode, nothing asks
            self._index, self._hashed = index_of(self._hashed), None
        return self._index

    @property
    @cython.critical_section
    def index(self):
        return self._own_index()

    @cython.critical_section
    def end_sample(self):
        """Record that no single sample is being read, so that none is blamed for an error."""
        self.key, self.row = None, -1

    @cython.critical_section
    def end_rows(self):
        """Record that no row is being decoded, so that no sample is blamed for a death or a timeout."""
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        me.since_ns = 0
        me.now = 0

    @property
    @cython.critical_section
    def is_abandoned(self):
        """Return whether the claimed order is no longer wanted; then finish it with VOID."""
        return self._ring.header.generation != self._record().generation

    @property
    @cython.critical_section
    def is_suspect(self):
        """Return whether a worker has died while filling the claimed order."""
        return self._record().num_lost > 0

    @property
    @cython.critical_section
    def payload(self):
        """Return (version, path, offset, nbytes) of the claimed slot's payload; the path is empty before there is one."""
        cdef shml_slot *record = self._record()
        return record.payload_version, <bytes>(<const char *>record.payload_path), record.payload_offset, record.payload_nbytes

    @property
    @cython.critical_section
    def payload_version(self):
        """Return a number that grows when the claimed slot gets another payload."""
        return self._record().payload_version

    @cython.critical_section
    def need(self, uint64_t nbytes):
        """Request a payload of `nbytes` for the claimed slot from the trainer. Then ring its bell."""
        self._record().need_nbytes = nbytes

    @property
    @cython.critical_section
    def is_granted(self):
        """Return whether the trainer has answered `need`."""
        return self._record().need_nbytes == 0

    @property
    @cython.critical_section
    def used_nbytes(self):
        """Return the size of the claimed order's packed batch in bytes, once `set_used` has recorded it; otherwise 0."""
        return self._record().used_nbytes

    @cython.critical_section
    def set_used(self, uint64_t nbytes):
        """Record the size in bytes of the slot's packed batch. The order must be one chunk, because the batch has one writer."""
        cdef shml_slot *record = self._record()
        if record.nchunks != 1:
            raise ValueError(f"a packed batch must be written by one worker, but this order is divided into {record.nchunks} chunks")
        record.used_nbytes = nbytes

    @cython.critical_section
    def write_note(self, bytes note):
        """Store a note, at most `text_capacity` bytes, that is sent with the claimed order's batch. The order must be one chunk."""
        cdef shml_slot *record = self._record()
        if record.nchunks != 1 or <uint64_t>len(note) > self._ring.header.text_capacity:
            raise ValueError(f"a note must have at most {self._ring.header.text_capacity} bytes and belong to an order of one chunk, "
                             f"got {len(note)} bytes and {record.nchunks} chunks")
        memcpy(shml_text_area(&self._ring, self._claim.slot), <const char *>note, len(note))
        record.note_nbytes = len(note)

    @cython.critical_section
    def ask_repack(self):
        """Request that the trainer orders the claimed batch again as one packed chunk; then finish with VOID."""
        self._record().repack = self._claim.order

    @cython.critical_section
    def write_error(self, bytes text):
        """Write the error of the claimed chunk for the trainer, unless another chunk's error is there; then finish with ERROR.

        Args:
            text: the error; cut to `text_capacity` bytes.
        Returns:
            whether the text was written.
        """
        cdef shml_slot *record = self._record()
        if not shml_win_error(&self._ring, &self._claim):
            return False
        cdef uint64_t nbytes = min(<uint64_t>len(text), self._ring.header.text_capacity)
        memcpy(shml_text_area(&self._ring, self._claim.slot), <const char *>text, nbytes)
        record.text_nbytes = nbytes
        return True

    @property
    @cython.critical_section
    def text_capacity(self):
        """Return the largest number of bytes of an error text or a note."""
        return self._ring.header.text_capacity

    @cython.critical_section
    def finish(self, uint32_t own, *, uint64_t num_foreign=0, uint64_t num_irregular=0):
        """End the claim with DONE, VOID or ERROR. Return whether the trainer sleeps until this slot is final, so ring its bell.

        Args:
            own: DONE, VOID or ERROR.
            num_foreign, num_irregular: counted for stats readers.
        """
        self._record()
        cdef uint64_t now = shml_now_ns()
        self._log_event(SHML_EVENT_CHUNK, self._claimed_ns, now, own)
        shml_count_finish(&self._ring.workers[self.worker_id], now - self._claimed_ns,
                          self.end_row - self.first_row if own == SHML_DONE else 0, num_foreign, num_irregular)
        cdef int all_final = shml_finish(&self._ring, &self._claim, self.worker_id, own)
        if all_final < 0:
            os.abort()  # another process owns the rows that this one was writing, so its memory cannot be trusted
        self._is_claimed = False
        if all_final:
            shml_wake(&self._ring)
        return all_final == 1 and shml_is_awaited(&self._ring, self._claim.slot) == 1

    @cython.critical_section
    def pace_of(self, uint32_t worker_id):
        """Return (number of chunks finished so far, nanoseconds that they took) of any worker of the ring."""
        if worker_id >= self._ring.header.num_workers:
            raise ValueError(f"worker {worker_id} does not exist: the ring has {self._ring.header.num_workers}")
        cdef shml_worker *worker = &self._ring.workers[worker_id]
        return worker.num_chunks, worker.busy_ns

    @cython.critical_section
    def count_fetch(self, uint64_t nbytes, *, bint is_remote, bytes node, uint32_t num_actors):
        """Count bytes that a Ray actor has sent, for stats readers.

        Args:
            nbytes: number of bytes.
            is_remote: whether they came from another node.
            node: Ray's id of the actor's node; the first 11 bytes are kept.
            num_actors: number of actors that this worker has had so far.
        """
        shml_count_fetch(&self._ring.workers[self.worker_id], nbytes, is_remote, node[:11], num_actors)

    # ------------------------------------------------------------ layout

    @property
    @cython.critical_section
    def has_layout(self):
        """Return whether the trainer has settled the layout."""
        return self._ring.header.layout_state == SHML_LAYOUT_READY

    @property
    @cython.critical_section
    def is_packed_only(self):
        """Return whether samples are known not to have one shape, so that workers need not try to place rows."""
        return bool(self._ring.header.is_packed)

    @property
    @cython.critical_section
    def layout_capacity(self):
        """Return the largest number of bytes of a layout text."""
        return self._ring.header.layout_capacity

    @property
    @cython.critical_section
    def layout_text(self):
        """Return the settled layout text."""
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    @cython.critical_section
    def ask_layout(self):
        """Become the worker that describes the layout. Return False if another worker does.

        After True, call `propose_layout` or `give_up_layout`.
        """
        return bool(shml_ask_layout(&self._ring, self.worker_id))

    @cython.critical_section
    def give_up_layout(self):
        """Let another worker describe the layout, after `ask_layout` has returned True and before `propose_layout`."""
        if self._ring.header.layout_state == <uint32_t>(SHML_LAYOUT_ASKING + self.worker_id):
            self._ring.header.layout_state = SHML_LAYOUT_NONE

    @cython.critical_section
    def propose_layout(self, bytes text):
        """Propose a layout, after `ask_layout` has returned True. Then ring the trainer's bell."""
        if <uint64_t>len(text) > self._ring.header.layout_capacity:
            raise ValueError(f"the text of a layout must have at most {self._ring.header.layout_capacity} bytes, got {len(text)}")
        if self._ring.header.layout_state != <uint32_t>(SHML_LAYOUT_ASKING + self.worker_id):
            raise RuntimeError("a layout may be proposed only after ask_layout() has returned True")
        memcpy(self._ring.layout, <const char *>text, len(text))
        self._ring.header.layout_nbytes = len(text)
        self._ring.header.layout_state = SHML_LAYOUT_PROPOSED


cdef class ChunkWriter:
    """A writer of a claimed chunk's samples: it reads them, and writes them into their rows or gathers them in a list.

    It takes a single Python call for each sample, because for small samples calls cost more than copying.

    Args:
        ring: the ring, with a claim.
        part: the rows; None if samples are only gathered.
        keys: keys of the batch's samples.
        row: row of the sample that has been begun.
        begin: begins a sample, like `WorkerRing.begin_row`; None for the ring's own.
        reseeder: seeds the global generators before a sample; None if they are not seeded, or seeded by `begin`.
        seed: the loader's seed, for `reseeder`.
        seed_rest: (left, seed, epoch, index, keys, row) -> None: seeds the generators that `reseeder` has not seeded.

    Attributes:
        row: row of the sample that has been begun; the chunk's end once all are written.
        misfit: the sample of `row` if it does not fit its place; then `fits` is False.
    """

    cdef WorkerRing _ring
    cdef Part _part
    cdef list _keys
    cdef object _begin, _seed_rest
    cdef Reseeder _reseeder
    cdef uint64_t _seed
    cdef int _end
    cdef readonly int row
    cdef readonly bint fits
    cdef readonly object misfit

    def __cinit__(self, WorkerRing ring not None, Part part, list keys not None, int row, *, begin=None,
                  Reseeder reseeder=None, uint64_t seed=0, seed_rest=None):
        if not ring._is_claimed or ring.end_row > len(keys):
            raise ValueError(f"the claim has rows {row} to {ring.end_row}, got {len(keys)} keys")
        self._ring, self._part, self._keys, self.row, self._end = ring, part, keys, row, ring.end_row
        self._begin, self._reseeder, self._seed, self._seed_rest = begin, reseeder, seed, seed_rest
        self.fits = True

    def fill(self, sample, source):
        """Write the sample that has been begun, then read and write the following ones.

        Stop before a sample that does not fit, or when the batch is no longer wanted.

        Args:
            sample: the sample that has been begun.
            source: returns the sample of a key as `source[key]`.
        """
        if self._part is None:
            raise ValueError("the batch has no memory for rows")
        while self._put(sample) and self.row < self._end:
            sample = source[self._keys[self.row]]

    def gather(self, sample, source):
        """Return the sample that has been begun and the following ones as a list, even if the batch is no longer wanted.

        Args:
            sample: the sample that has been begun.
            source: see `fill`.
        """
        cdef list read = [sample]
        self._begin_next()
        while self.row < self._end:
            read.append(source[self._keys[self.row]])
            self._begin_next()
        return read

    cdef bint _put(self, object sample) except -1:
        """Write the sample that has been begun, and begin the next one. Return False if it does not fit or is no longer wanted."""
        if not self._part.write(sample, self.row):
            self.fits, self.misfit = False, sample
            return False
        return self._begin_next()

    cdef bint _begin_next(self) except -1:
        """Begin the next sample, if there is one. Return False if it is no longer wanted."""
        self.row += 1
        if self.row >= self._end:
            return True
        cdef object key = self._keys[self.row]
        if self._begin is not None:
            return self._begin(self.row, key)
        cdef WorkerRing ring = self._ring
        cdef bint is_wanted = ring._begin(self.row, key)
        cdef int left
        if self._reseeder is not None:
            left = self._reseeder.seed(self._seed, <uint64_t>ring.epoch, ring._own_index(), self._keys, self.row)
            if left:
                self._seed_rest(left, self._seed, ring.epoch, ring._own_index(), self._keys, self.row)
        return is_wanted
