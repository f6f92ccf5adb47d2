"""A worker's end of a ring: claim a chunk of rows, say which row is being decoded, write it, finish.

A claim ends in exactly one finish. Everything an order says is read after the claim: only then it cannot change.
"""

include "ring.pxi"

from cpython.long cimport PyLong_CheckExact
from libc.string cimport memcpy

from shmload._core.rows cimport Part
from shmload._core.twister cimport Reseeder

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1

import os

DONE = SHML_DONE
VOID = SHML_VOID
ERROR = SHML_ERROR
# What a worker waits for while it holds a claim.
ROOM = SHML_EVENT_ROOM
LAYOUT = SHML_EVENT_LAYOUT

cdef int64_t num_begun = 0  # samples, by all rings of this process
cdef uint64_t IDLE_NS = 1_000_000_000  # a wait for orders is reported in pieces of this length, so that a stats reader need not wait, too


cdef class WorkerRing:
    """One worker's view of the control block.

    Between `claim` and `finish` the attributes describe the claim: `slot`, `chunk`, `order`, rows `first_row` to `end_row` of
    `nrows`, `epoch`, `step`, and whether it `is_packed` (then one chunk is the whole batch).

    Of the sample begun last: its `index`, `begun`, a number that no other beginning of this process has (0: none of this claim),
    and while one sample is being read its `key` and `row` (None, -1).

    `is_held_up`, once set, has `claim` wait until the trainer has seen to what was claimed last and has failed: its batch comes first,
    if it is ordered anew.
    """

    cdef shml_ring _ring
    cdef shml_claim _claim
    cdef object _control
    cdef uint64_t _claimed_ns
    cdef uint64_t _idle_ns  # since when it has waited for orders; 0: it does not
    cdef bint _is_claimed
    cdef readonly int worker_id
    cdef readonly int slot, chunk, first_row, end_row, nrows, nchunks
    cdef readonly int64_t epoch, step, index
    cdef readonly uint64_t order
    cdef readonly bint is_packed, is_pickled
    cdef readonly object key
    cdef readonly int row
    cdef readonly int64_t begun
    cdef public bint is_held_up

    def __cinit__(self, control, uint32_t worker_id):
        cdef shml_header *header = <shml_header *><uintptr_t>control.address
        if header.magic != SHML_MAGIC or header.abi != SHML_ABI:
            raise ValueError(f"this is no control block of layout version {SHML_ABI}: it says {header.abi}")
        if header.total_nbytes > control.nbytes or worker_id >= header.num_workers:
            raise ValueError(f"worker {worker_id} does not fit a control block of {header.num_workers} workers, "
                             f"{control.nbytes} bytes")
        self._control = control
        self.worker_id = worker_id
        shml_view(&self._ring, header)

    def announce(self, uint64_t begun_ns=0):
        """Says that this process is up and ready for orders.

        Args:
            begun_ns: CLOCK_MONOTONIC when it began, for stats readers; 0: not known. A process is no older than its ring.
        """
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        cdef uint64_t now = shml_now_ns()
        me.pid = os.getpid()
        me.started_ns = now
        if begun_ns:
            begun_ns = min(now, max(begun_ns, <uint64_t>self._ring.header.owner_start_ns))
            shml_record_of_none(&self._ring, self.worker_id, SHML_EVENT_START, begun_ns, now)

    @property
    def is_closing(self):
        """Whether the trainer wants workers to leave."""
        return bool(self._ring.header.is_closing)

    @property
    def is_wanted(self):
        """Whether the trainer wants this worker to go on."""
        return not self._ring.header.is_closing and <uint64_t>self.worker_id < self._ring.header.num_wanted

    def request(self, uint64_t ticket):
        """As a helper: asks to be let in, also while it has asked already. Returns whether it is, and may claim (helpers.h)."""
        return shml_request(&self._ring, self.worker_id, ticket) == 1

    def waiting(self, bint on):
        """Notes for stats readers whether this worker waits for orders."""
        self._ring.workers[self.worker_id].is_waiting = on
        cdef uint64_t now
        if self._idle_ns == 0:
            self._idle_ns = shml_now_ns() if on else 0
        elif not on:
            now = shml_now_ns()
            if now - self._idle_ns >= IDLE_NS:
                self._end_idle(now)
                self._idle_ns = now  # it looks, and most likely waits on

    cdef void _end_idle(self, uint64_t now):
        shml_record_of_none(&self._ring, self.worker_id, SHML_EVENT_IDLE, self._idle_ns, now)
        self._idle_ns = 0

    def waited(self, uint32_t kind, uint64_t begin_ns):
        """Notes for stats readers that this worker, holding a claim, has waited from then until now.

        Args:
            kind: ROOM or LAYOUT.
            begin_ns: of CLOCK_MONOTONIC.
        """
        self._record()
        self._note(kind, begin_ns, shml_now_ns(), 0)

    cdef void _note(self, uint32_t kind, uint64_t begin_ns, uint64_t end_ns, uint32_t own):
        shml_record_of_slot(&self._ring, self.worker_id, kind, begin_ns, end_ns, self._claim.order, self._claim.slot,
                            self._claim.chunk, self.end_row - self.first_row, own)

    def claim(self, uint32_t num_left=0):
        """Claims the oldest chunk open to this worker; False if there is none now.

        Args:
            num_left: so many of the oldest open orders are left to others.
        """
        if self._is_claimed:
            raise RuntimeError("a worker holds at most one claim: finish it first")
        cdef int found
        if self.is_held_up:
            found = shml_take_failed(&self._ring, self.worker_id, self.epoch, self.step, &self._claim)
            if found < 0:
                return False
            self.is_held_up = False
            if found:
                self._read_claim()
                return True
        with nogil:
            found = shml_take_claim_behind(&self._ring, self.worker_id, num_left, &self._claim)
        if found:
            self._read_claim()
        return bool(found)

    cdef int _read_claim(self) except -1:
        """Takes in what the claimed order says."""
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
    def batch(self):
        """The number of the claimed batch within its epoch, for people: where an order makes the batches, a step is a place in it."""
        cdef int64_t stride = max(self._ring.header.step_stride, 1)
        return (self.step + stride - 1) // stride

    cdef shml_slot *_record(self) except NULL:
        if not self._is_claimed:
            raise RuntimeError("there is no claim")
        return &self._ring.slots[self._claim.slot]

    @property
    def order_path(self):
        """Segment that holds the order's bytes; empty if the order area does."""
        return <bytes>(<const char *>self._record().order_path)

    @property
    def order_nbytes(self):
        """Length of the order's bytes."""
        return self._record().order_nbytes

    def order_bytes(self):
        """A copy of the order's bytes: the whole batch's int64 indices, or their pickle."""
        cdef shml_slot *record = self._record()
        return (<const char *>shml_order_area(&self._ring, self._claim.slot))[:record.order_nbytes]

    def begin_row(self, int row, key):
        """Says which row this worker is about to decode: it gets the blame if the process dies.

        Args:
            key: of its sample, whose `index` it becomes; -1 if it is no integer of 64 bits.
        Returns:
            whether somebody waits for the claimed order.
        """
        return self._begin(row, key)

    cdef bint _begin(self, int row, object key) except -1:
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        cdef int has_overflown = 0
        global num_begun
        num_begun += 1
        self.key, self.row, self.begun = key, row, num_begun
        self.index = PyLong_AsLongLongAndOverflow(key, &has_overflown) if PyLong_CheckExact(key) else -1
        me.index = <uint64_t>self.index  # -1, too, if it has overflown
        me.since_ns = shml_now_ns()
        me.row = <uint64_t>row
        me.now = self._claim.order << 16 | <uint64_t>(row & 0xFFFF)
        return self._ring.header.generation == self._record().generation

    def end_sample(self):
        """Says that no one sample is being read: what goes wrong now is none's in particular."""
        self.key, self.row = None, -1

    def end_rows(self):
        """Says that no row is being decoded: what a death or a delay comes from now is no sample."""
        cdef shml_worker *me = &self._ring.workers[self.worker_id]
        me.since_ns = 0
        me.now = 0

    @property
    def is_abandoned(self):
        """Whether nobody waits for the claimed order any more: finish it with VOID."""
        return self._ring.header.generation != self._record().generation

    @property
    def is_suspect(self):
        """Whether a worker has died over the claimed order."""
        return self._record().num_lost > 0

    @property
    def payload(self):
        """(version, path, offset, nbytes) of the claimed slot's payload; an empty path before there is one."""
        cdef shml_slot *record = self._record()
        return record.payload_version, <bytes>(<const char *>record.payload_path), record.payload_offset, record.payload_nbytes

    @property
    def payload_version(self):
        """Grows when the claimed slot's payload changes."""
        return self._record().payload_version

    def need(self, uint64_t nbytes):
        """Asks the trainer for a payload of this size for the claimed slot."""
        self._record().need_nbytes = nbytes

    @property
    def is_granted(self):
        """Whether the trainer has answered `need`."""
        return self._record().need_nbytes == 0

    @property
    def used_nbytes(self):
        """Payload bytes of the claimed order's packed batch, once it is written; else 0."""
        return self._record().used_nbytes

    def set_used(self, uint64_t nbytes):
        """Says how many payload bytes a packed batch takes. The order must be one chunk: the batch has one writer."""
        cdef shml_slot *record = self._record()
        if record.nchunks != 1:
            raise ValueError(f"a packed batch is written by one worker; this order is divided among {record.nchunks} chunks")
        record.used_nbytes = nbytes

    def write_note(self, bytes note):
        """Sends a note along with the claimed order's batch, at most `text_capacity` bytes. The order must be one chunk."""
        cdef shml_slot *record = self._record()
        if record.nchunks != 1 or <uint64_t>len(note) > self._ring.header.text_capacity:
            raise ValueError(f"a note has at most {self._ring.header.text_capacity} bytes and goes with an order of one chunk; "
                             f"got {len(note)} bytes and {record.nchunks} chunks")
        memcpy(shml_text_area(&self._ring, self._claim.slot), <const char *>note, len(note))
        record.note_nbytes = len(note)

    def ask_repack(self):
        """Asks that the claimed order be done again as one packed chunk; finish with VOID then."""
        self._record().repack = self._claim.order

    def write_error(self, bytes text):
        """Leaves the error of the claimed chunk for the trainer if no other chunk's stands there; finish with ERROR then.

        Returns:
            whether the text was written; at most the text area's size of it is.
        """
        cdef shml_slot *record = self._record()
        if not shml_win_error(&self._ring, &self._claim):
            return False
        cdef uint64_t nbytes = min(<uint64_t>len(text), self._ring.header.text_capacity)
        memcpy(shml_text_area(&self._ring, self._claim.slot), <const char *>text, nbytes)
        record.text_nbytes = nbytes
        return True

    @property
    def text_capacity(self):
        """Bytes an error text may have."""
        return self._ring.header.text_capacity

    def finish(self, uint32_t own, *, uint64_t num_foreign=0, uint64_t num_irregular=0):
        """Ends the claim with DONE, VOID or ERROR. Returns whether the trainer sleeps for it: its bell must be rung then."""
        self._record()
        cdef uint64_t now = shml_now_ns()
        self._note(SHML_EVENT_CHUNK, self._claimed_ns, now, own)
        shml_count_finish(&self._ring.workers[self.worker_id], now - self._claimed_ns,
                          self.end_row - self.first_row if own == SHML_DONE else 0, num_foreign, num_irregular)
        cdef int all_final = shml_finish(&self._ring, &self._claim, self.worker_id, own)
        if all_final < 0:
            os.abort()  # someone else owns rows this process was writing: nothing here can be trusted any more
        self._is_claimed = False
        if all_final:
            shml_wake(&self._ring)
        return all_final == 1 and shml_is_awaited(&self._ring, self._claim.slot) == 1

    def pace_of(self, uint32_t worker_id):
        """(chunks done so far, nanoseconds they took) of any worker of the ring."""
        if worker_id >= self._ring.header.num_workers:
            raise ValueError(f"there is no worker {worker_id} of {self._ring.header.num_workers}")
        cdef shml_worker *worker = &self._ring.workers[worker_id]
        return worker.num_chunks, worker.busy_ns

    def count_fetch(self, uint64_t nbytes, *, bint is_remote, bytes node, uint32_t num_actors):
        """Tells stats readers of bytes that a Ray actor has sent: from another node or not, where it is, how many there
        have been."""
        shml_count_fetch(&self._ring.workers[self.worker_id], nbytes, is_remote, node[:11], num_actors)

    # ------------------------------------------------------------ layout

    @property
    def has_layout(self):
        """Whether the trainer has settled the layout."""
        return self._ring.header.layout_state == SHML_LAYOUT_READY

    @property
    def is_packed_only(self):
        """Whether samples have no fixed rows, so that there is no use in trying."""
        return bool(self._ring.header.is_packed)

    @property
    def layout_capacity(self):
        """Bytes a layout text may have."""
        return self._ring.header.layout_capacity

    @property
    def layout_text(self):
        """The settled layout text."""
        return (<const char *>self._ring.layout)[:self._ring.header.layout_nbytes]

    def ask_layout(self):
        """Asks to be the one who describes the layout; False if another worker is. If True, `propose_layout` must follow."""
        return bool(shml_ask_layout(&self._ring, self.worker_id))

    def give_up_layout(self):
        """Lets another worker describe the layout, after `ask_layout` has said True and no proposal follows."""
        if self._ring.header.layout_state == <uint32_t>(SHML_LAYOUT_ASKING + self.worker_id):
            self._ring.header.layout_state = SHML_LAYOUT_NONE

    def propose_layout(self, bytes text):
        """Offers a layout, after `ask_layout` has said True. Ring the trainer's bell then."""
        if <uint64_t>len(text) > self._ring.header.layout_capacity:
            raise ValueError(f"a layout has at most {self._ring.header.layout_capacity} bytes of text, got {len(text)}")
        if self._ring.header.layout_state != <uint32_t>(SHML_LAYOUT_ASKING + self.worker_id):
            raise RuntimeError("ask_layout() has not said True")
        memcpy(self._ring.layout, <const char *>text, len(text))
        self._ring.header.layout_nbytes = len(text)
        self._ring.header.layout_state = SHML_LAYOUT_PROPOSED


cdef class ChunkWriter:
    """Writes the samples of a claimed chunk into their rows, or gathers them, one after another, and begins the one behind each.

    All of it is one call a sample: for small samples the calls cost more than the bytes.

    Args:
        part: of the rows; None: samples are only gathered.
        keys: of the batch's samples.
        row: of the sample that has been begun.
        begin: begins a sample, as `WorkerRing.begin_row`; None: this does.
        reseeder: seeds the global generators before a sample; None: nobody does, or `begin`.
        seed_rest: (left, seed, epoch, index, keys, row), for the generators that `reseeder` has left.

    Attributes:
        row: of the sample that has been begun; the chunk's last, plus 1, once all are written.
        misfit: the sample of `row`, where it is not of the kind that its place takes; then `fits` is False.
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
            raise ValueError(f"rows {row} to {ring.end_row} of a claim, given {len(keys)} keys")
        self._ring, self._part, self._keys, self.row, self._end = ring, part, keys, row, ring.end_row
        self._begin, self._reseeder, self._seed, self._seed_rest = begin, reseeder, seed, seed_rest
        self.fits = True

    def fill(self, sample, source):
        """Writes the sample that has been begun, and those behind it as they are read; ends before one that does not fit, or
        where nobody waits any more.

        Args:
            source: gives the sample of a key by `source[key]`.
        """
        if self._part is None:
            raise ValueError("there are no rows to write into")
        while self._put(sample) and self.row < self._end:
            sample = source[self._keys[self.row]]

    def gather(self, sample, source):
        """The sample that has been begun and those behind it, as a list, whether anybody waits or not. Nothing is written.

        Args:
            source: as of `fill`.
        """
        cdef list read = [sample]
        self._begin_next()
        while self.row < self._end:
            read.append(source[self._keys[self.row]])
            self._begin_next()
        return read

    cdef bint _put(self, object sample) except -1:
        """Writes the sample that has been begun, and begins the next one. False: that sample does not fit, or nobody waits."""
        if not self._part.write(sample, self.row):
            self.fits, self.misfit = False, sample
            return False
        return self._begin_next()

    cdef bint _begin_next(self) except -1:
        """Begins the sample behind the one that has been begun, if there is one. False: nobody waits for it any more."""
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
            left = self._reseeder.seed(self._seed, <uint64_t>ring.epoch, ring.index, self._keys, self.row)
            if left:
                self._seed_rest(left, self._seed, ring.epoch, ring.index, self._keys, self.row)
        return is_wanted
