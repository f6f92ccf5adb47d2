# Cython declarations of the C side of a ring; included by trainer.pyx, filler.pyx, peer_status.pyx and stats_reader.pyx. layout.h
# explains the fields. Words that are _Atomic in C are read and written here like plain fields, because C11 makes each such access
# sequentially consistent.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

cdef extern from "lease.h" nogil:
    ctypedef struct shml_header:
        uint64_t magic
        uint32_t abi, num_slots, num_workers, is_static
        uint64_t total_nbytes, order_capacity, text_capacity, layout_capacity
        int64_t owner_pid, owner_start_ns
        uint64_t events_offset, events_per_ring
        uint64_t last_order
        uint32_t generation, layout_state, is_packed, is_closing
        uint64_t layout_nbytes
        uint64_t batches, samples, nbytes, wait_ns, num_waits, num_copied_out, num_grown, num_restarts
        uint64_t waiting_since_ns, awaited, num_wanted
        uint32_t num_sleepers, num_rings
        uint64_t workers_offset, slots_offset, orders_offset, texts_offset, layout_offset
        uint32_t rank, world_size, step_stride
        uint64_t num_bad_samples, epoch, step, num_steps
        char *dataset_name
        char *read_path
    ctypedef struct shml_worker:
        uint64_t now, row, pid, started_ns, since_ns, index, is_waiting, busy_ns, num_chunks, num_samples, num_foreign
        uint64_t num_restarts, claimed_ns, nbytes_fetched, nbytes_remote, num_irregular
        uint32_t num_actors
        char *node
    ctypedef struct shml_slot:
        int64_t epoch, step, ordered_ns
        uint32_t generation, nrows, nchunks, order_kind, form, state
        uint64_t order_nbytes, err, repack, need_nbytes, text_nbytes, used_nbytes, note_nbytes, num_lost
        uint64_t payload_version, payload_offset, payload_nbytes
        char *payload_path
        char *order_path
    ctypedef struct shml_ring:
        shml_header *header
        shml_worker *workers
        shml_slot *slots
        uint8_t *layout
    ctypedef struct shml_claim:
        uint64_t order
        uint32_t slot, chunk
    ctypedef struct shml_status:
        uint32_t num_open, num_claimed, num_void
        int32_t first_bad
        uint32_t bad_own
    ctypedef struct shml_map:
        uint8_t *base
        size_t nbytes
    ctypedef struct shml_lease:
        uint32_t slot
        uint8_t *base
        uint64_t nbytes
        int is_private
    ctypedef struct shml_place:
        uint64_t order, offset, nbytes, leased_ns, released_ns
        shml_map *map
        int32_t state, reserved
        shml_lease lease
    ctypedef struct shml_local_ring:
        uint32_t num_slots, num_usable, num_free, num_leased, num_pending_copies
        int32_t *pending_copies
        int32_t *free_list
        shml_place *places
        int refs, poison
    ctypedef struct shml_recorder:
        uint64_t head
    ctypedef struct dl_managed:
        int64_t *shape
        void (*deleter)(dl_managed *)

    enum:
        SHML_ABI, SHML_ANYONE, SHML_ANY_SLOT, SHML_MAX_CHUNKS, SHML_MAX_WORKERS, SHML_PATH_NBYTES, SHML_NAME_NBYTES
        SHML_OPEN, SHML_RESERVED, SHML_POISON, SHML_ERROR, SHML_VOID, SHML_DONE
        SHML_FREE, SHML_HELD, SHML_ORDERED, SHML_LEASED, SHML_DRAINING, SHML_PARKED, SHML_PENDING_COPIES
        SHML_LAYOUT_NONE, SHML_LAYOUT_PROPOSED, SHML_LAYOUT_READY, SHML_LAYOUT_ASKING
        SHML_ORDER_INT64, SHML_ORDER_PICKLED, SHML_FORM_ROWS, SHML_FORM_PACKED
    enum:
        SHML_EVENT_CHUNK, SHML_EVENT_IDLE, SHML_EVENT_ROOM, SHML_EVENT_LAYOUT, SHML_EVENT_START
        SHML_EVENT_WAIT, SHML_EVENT_DELIVER, SHML_EVENT_PUBLISH, SHML_EVENT_LEASE, SHML_EVENT_ABANDON
    const uint64_t SHML_MAGIC

    void shml_count_claim(shml_worker *me, uint64_t now_ns)
    void shml_count_finish(shml_worker *me, uint64_t busy_ns, uint64_t num_samples, uint64_t num_foreign, uint64_t num_irregular)
    void shml_count_fetch(shml_worker *me, uint64_t nbytes, int is_remote, const char *node, uint32_t num_actors)
    uint64_t shml_plan(shml_header *h, uint32_t slots, uint32_t workers, uint64_t order, uint64_t text, uint64_t layout)
    void shml_create(shml_ring *ring, void *base, uint32_t slots, uint32_t workers, uint64_t order, uint64_t text,
                     uint64_t layout)
    void shml_view(shml_ring *ring, void *base)
    uint32_t shml_first_row(uint32_t nrows, uint32_t nchunks, uint32_t chunk)
    uint8_t *shml_order_area(const shml_ring *ring, uint32_t slot)
    uint8_t *shml_text_area(const shml_ring *ring, uint32_t slot)
    shml_recorder *shml_recorder_of(const shml_ring *ring, uint32_t owner)
    uint64_t shml_now_ns()
    void shml_record_of_none(const shml_ring *ring, uint32_t owner, uint32_t kind, uint64_t begin_ns, uint64_t end_ns)
    void shml_record_of_slot(const shml_ring *ring, uint32_t owner, uint32_t kind, uint64_t begin_ns, uint64_t end_ns,
                             uint64_t order, uint32_t slot, uint32_t place, uint32_t nrows, uint64_t amount)

    void shml_publish(shml_ring *ring, uint32_t slot, uint64_t order, int reserved)
    uint64_t shml_owner(const shml_slot *slot, uint32_t chunk)
    shml_status shml_inspect(const shml_ring *ring, uint32_t slot)
    void shml_void(shml_ring *ring, uint32_t slot)
    void shml_await(shml_ring *ring, int64_t slot)
    void shml_give_up(shml_ring *ring, uint32_t slot)
    int32_t shml_recover(shml_ring *ring, uint32_t slot, uint32_t w, uint32_t own)
    void shml_reopen(shml_ring *ring, uint32_t slot, uint32_t chunk, int reserved)

    int shml_take_failed(const shml_ring *ring, uint32_t w, int64_t epoch, int64_t step, shml_claim *claim)
    int shml_take_earlier(const shml_ring *ring, uint32_t w, int64_t epoch, int64_t step, shml_claim *claim)
    int shml_take_claim(const shml_ring *ring, uint32_t w, uint32_t num_left, shml_claim *claim)
    int shml_is_awaited(const shml_ring *ring, uint32_t slot)
    int shml_win_error(const shml_ring *ring, const shml_claim *claim)
    int shml_finish(const shml_ring *ring, const shml_claim *claim, uint32_t w, uint32_t own)
    int shml_ask_layout(const shml_ring *ring, uint32_t w)
    void shml_wake(const shml_ring *ring)

    shml_map *shml_map_keep(shml_map *map)
    void shml_map_drop(shml_map *map)
    shml_local_ring *shml_local_ring_new(uint32_t num_slots, uint32_t num_usable)
    void shml_local_ring_keep(shml_local_ring *local_ring)
    void shml_local_ring_drop(shml_local_ring *local_ring)
    void shml_local_ring_close(shml_local_ring *local_ring)
    void shml_local_ring_push_free(shml_local_ring *local_ring, uint32_t slot)
    void shml_local_ring_pull_free(shml_local_ring *local_ring, uint32_t slot)
    uint32_t shml_local_ring_collect(shml_local_ring *local_ring)
    int shml_local_ring_await_copies(shml_local_ring *local_ring, void (*ended)(void *, uint32_t) noexcept nogil, void *context)
    int shml_local_ring_copies_done(shml_local_ring *local_ring, uint32_t slot)
    shml_lease *shml_lease_begin(shml_local_ring *local_ring, uint32_t slot)
    int shml_lease_try_keep(shml_lease *lease)
    int shml_lease_make_private(shml_lease *lease)
    void shml_lease_drop(shml_lease *lease)
    dl_managed *shml_dl_new(shml_lease *lease, uint64_t offset, uint8_t code, uint8_t bits, int32_t ndim)

cdef extern from "helpers.h" nogil:
    int shml_request(const shml_ring *ring, uint32_t w, uint64_t identity)
    uint64_t shml_requests(const shml_ring *ring, uint32_t w)
    void shml_accept(const shml_ring *ring, uint32_t w, uint64_t identity)
    void shml_release(const shml_ring *ring, uint32_t w)
    uint32_t shml_num_idle(const shml_ring *ring)
    uint32_t shml_num_open(const shml_ring *ring)
