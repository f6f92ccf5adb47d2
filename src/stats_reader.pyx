"""Read a control block from outside: what the trainer and its workers have written to it, at one moment, as plain Python values.

Nothing is written and nothing is locked: the mapping may be read-only, and should be for another process's block. A block may be
any file with a matching name, so nothing in it is trusted before it has been checked against the mapping's length: sizes and
offsets must be those that a trainer of this version would have planned. They are then copied and never read again. layout.h
explains the words.

Each word is read atomically, but the words are read one after another while their owners continue. Where two must fit together (a
worker's sample and its start time; a slot and its order), they are read again until the one that is written last has not changed
during the read.
"""

include "ring.pxi"

from libc.string cimport memset

ABI = SHML_ABI

cdef int LOOKS = 4  # reads of words that must fit together; if the writer is faster than that, the figures are of two moments


cdef class StatsReader:
    """One control block, as any process that can read it sees it.

    Args:
        control: mapping of the whole file.
    Raises:
        ValueError: not a control block of this layout version, or its sizes and offsets do not fit it.
    """

    cdef object _control
    cdef shml_header *_header
    cdef shml_worker *_workers
    cdef shml_slot *_slots
    cdef readonly uint32_t num_slots, num_workers

    def __cinit__(self, control):
        cdef uint64_t nbytes = control.nbytes
        cdef shml_header *h = <shml_header *><uintptr_t>control.address
        cdef shml_header plan
        memset(&plan, 0, sizeof(plan))
        if nbytes < sizeof(shml_header):
            raise ValueError(f"the file is not a control block: it has {nbytes} bytes, fewer than the {sizeof(shml_header)} of a header")
        if h.magic != SHML_MAGIC:
            raise ValueError("the file is not a control block, or is still being created: it does not begin with SHMLOLD1")
        if h.abi != SHML_ABI:
            raise ValueError(f"the control block has layout version {h.abi}, and this shmload reads version {SHML_ABI}: use "
                             "the shmload that its trainer runs with")
        cdef uint32_t num_slots = h.num_slots, num_workers = h.num_workers
        cdef uint64_t order = h.order_capacity, text = h.text_capacity, layout = h.layout_capacity
        if (num_slots < 1 or num_slots > nbytes // sizeof(shml_slot) or num_workers > SHML_MAX_WORKERS or layout > nbytes
                or order > nbytes // num_slots or text > nbytes // num_slots):
            raise ValueError(f"the control block is damaged: {num_slots} slots with orders of {order} and texts of {text} bytes, "
                             f"{num_workers} workers and a layout of {layout} bytes do not fit its {nbytes} bytes")
        shml_plan(&plan, num_slots, num_workers, order, text, layout)
        if (plan.total_nbytes > nbytes or plan.total_nbytes != h.total_nbytes or plan.workers_offset != h.workers_offset
                or plan.slots_offset != h.slots_offset or plan.orders_offset != h.orders_offset
                or plan.texts_offset != h.texts_offset or plan.layout_offset != h.layout_offset or plan.order_capacity != order
                or plan.text_capacity != text or plan.layout_capacity != layout):
            raise ValueError(f"the control block is damaged: its offsets do not match {num_slots} slots and {num_workers} "
                             f"workers in {nbytes} bytes")
        self._control = control
        self._header = h
        self._workers = <shml_worker *>(<uint8_t *>h + plan.workers_offset)
        self._slots = <shml_slot *>(<uint8_t *>h + plan.slots_offset)
        self.num_slots = num_slots
        self.num_workers = num_workers

    def snapshot(self):
        """Return every word that stats readers understand, by its name in src/layout.h; `time_ns` is the time of the read, on
        CLOCK_MONOTONIC.

        Returns:
            the header's words, with `workers` and `slots`, a dict each. A slot's `claims` are (worker, first row, end row).
        Raises:
            ValueError: a slot's words are impossible: the block is damaged.
        Cost: about 1 us for each slot and worker.
        """
        cdef shml_header *h = self._header
        cdef uint64_t since = 0, waited = 0
        for _ in range(LOOKS):
            since = h.waiting_since_ns
            waited = h.wait_ns
            if since == h.waiting_since_ns:
                break
        return {
            "time_ns": shml_now_ns(), "owner_pid": h.owner_pid, "owner_start_ns": h.owner_start_ns,
            "num_slots": self.num_slots, "num_workers": self.num_workers, "num_wanted": h.num_wanted, "is_static": bool(h.is_static),
            "control_nbytes": self._control.nbytes, "generation": h.generation, "layout_state": h.layout_state,
            "is_packed": bool(h.is_packed), "is_closing": bool(h.is_closing), "batches": h.batches, "samples": h.samples,
            "nbytes": h.nbytes, "wait_ns": waited, "waiting_since_ns": since, "num_waits": h.num_waits,
            "num_copied_out": h.num_copied_out, "num_grown": h.num_grown, "num_restarts": h.num_restarts, "awaited": h.awaited,
            "num_bad_samples": h.num_bad_samples, "epoch": <int64_t>h.epoch, "step": <int64_t>h.step, "num_steps": h.num_steps,
            "step_stride": h.step_stride, "rank": h.rank, "world_size": h.world_size,
            "dataset_name": _text(h.dataset_name, SHML_NAME_NBYTES), "read_path": _text(h.read_path, 16),
            "workers": [self._worker(w) for w in range(self.num_workers)],
            "slots": [self._slot(s) for s in range(self.num_slots)],
        }

    cdef dict _worker(self, uint32_t worker):
        cdef shml_worker *r = &self._workers[worker]
        cdef uint64_t now = 0, since = 0, claimed = 0, busy = 0
        cdef int64_t index = 0
        for _ in range(LOOKS):
            now, claimed = r.now, r.claimed_ns
            since, index, busy = r.since_ns, <int64_t>r.index, r.busy_ns
            if now == r.now and claimed == r.claimed_ns and since == r.since_ns:
                break
        return {"now": now, "pid": r.pid, "started_ns": r.started_ns, "since_ns": since, "index": index,
                "is_waiting": bool(r.is_waiting), "busy_ns": busy, "claimed_ns": claimed, "num_chunks": r.num_chunks,
                "num_samples": r.num_samples, "num_foreign": r.num_foreign, "num_irregular": r.num_irregular, "num_restarts": r.num_restarts,
                "nbytes_fetched": r.nbytes_fetched, "nbytes_remote": r.nbytes_remote, "num_actors": r.num_actors,
                "node": _text(r.node, 12)}

    cdef dict _slot(self, uint32_t slot):
        cdef shml_slot *r = &self._slots[slot]
        cdef dict found = {}
        cdef uint64_t first
        for _ in range(LOOKS):
            first = shml_owner(r, 0)
            found = self._slot_once(slot, first >> 16)
            if shml_owner(r, 0) >> 16 == first >> 16:
                break
        return found

    cdef dict _slot_once(self, uint32_t slot, uint64_t order):
        cdef shml_slot *r = &self._slots[slot]
        cdef uint32_t state = r.state, nrows = r.nrows, nchunks = r.nchunks
        cdef uint32_t num_open = 0, num_claimed = 0, num_final = 0, own
        cdef uint64_t word
        if state > SHML_PARKED or nchunks > SHML_MAX_CHUNKS:
            raise ValueError(f"the control block is damaged: slot {slot} has state {state} and {nchunks} chunks")
        claims = []
        for chunk in range(nchunks):
            word = shml_owner(r, chunk)
            own = word & 0xFFFF
            if word >> 16 != order:
                continue  # it is being published
            if own >= SHML_POISON:
                num_final += 1
            elif own == SHML_OPEN or own >= SHML_RESERVED:
                num_open += 1
            else:
                num_claimed += 1
                if own <= self.num_workers:
                    claims.append((own - 1, shml_first_row(nrows, nchunks, chunk), shml_first_row(nrows, nchunks, chunk + 1)))
        return {"state": state, "order": order, "epoch": r.epoch, "step": r.step, "nrows": nrows, "num_chunks": nchunks,
                "num_open": num_open, "num_claimed": num_claimed, "num_final": num_final, "num_lost": r.num_lost,
                "ordered_ns": r.ordered_ns, "claims": claims, "payload_path": _text(r.payload_path, SHML_PATH_NBYTES),
                "payload_offset": r.payload_offset, "payload_nbytes": r.payload_nbytes}


cdef str _text(const char *at, size_t capacity):
    cdef size_t nbytes = 0
    while nbytes < capacity and at[nbytes] != 0:
        nbytes += 1
    return at[:nbytes].decode("utf-8", "replace")
