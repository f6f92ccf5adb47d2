/* Helpers: workers of the node's other ranks, that fill chunks of this ring when their own has none.
 *
 * A helper has a worker record here, as the worker pool's own have, and claims and finishes as they do. But it is nobody's child here, and may
 * die at any moment. So the trainer must have hold of its process before it claims anything:
 *
 *     visitor    0 ──helper──▶ ticket ───────────────────────────────────▶ 0   the trainer, once the process is gone
 *     accepted   0 ─────────────────trainer, which watches it──▶ ticket ──▶ 0  and its claims are taken back
 *
 * A ticket is a process id and its start time, so a number that the kernel has given away again is not mistaken. One exchange from 0
 * makes a record one helper's alone; whoever takes that worker's place waits until the trainer has cleared it. A helper that dies before it
 * is accepted has claimed nothing. Explored in tests/proof/helpers.py.
 */
#ifndef SHMLOAD_HELPERS_H
#define SHMLOAD_HELPERS_H

#include "protocol.h"

/* Asks to be let in under worker number w; also while it has asked already. Returns 1 if it is, and may claim. */
static inline int shml_request(const shml_ring *ring, uint32_t w, uint64_t ticket) {
    shml_worker *record = &ring->workers[w];
    uint64_t none = 0;
    atomic_thread_fence(memory_order_seq_cst); /* between "I sleep" and the last look: see shml_num_idle */
    if (atomic_load_explicit(&record->accepted, memory_order_acquire) == ticket) return 1;
    atomic_compare_exchange_strong_explicit(&record->visitor, &none, ticket, memory_order_acq_rel, memory_order_relaxed);
    return atomic_load_explicit(&record->accepted, memory_order_acquire) == ticket;
}

/* The ticket of a helper that waits to be let in; 0: none does. */
static inline uint64_t shml_requests(const shml_ring *ring, uint32_t w) {
    uint64_t visitor = atomic_load_explicit(&ring->workers[w].visitor, memory_order_acquire);
    return visitor == atomic_load_explicit(&ring->workers[w].accepted, memory_order_relaxed) ? 0 : visitor;
}

/* Lets in a helper whose end the trainer will see. */
static inline void shml_accept(const shml_ring *ring, uint32_t w, uint64_t ticket) {
    atomic_store_explicit(&ring->workers[w].accepted, ticket, memory_order_release);
}

/* Clears the record for the next. Only when the process has ended, and after shml_recover. */
static inline void shml_release(const shml_ring *ring, uint32_t w) {
    atomic_store_explicit(&ring->workers[w].accepted, 0, memory_order_relaxed);
    atomic_store_explicit(&ring->workers[w].visitor, 0, memory_order_release);
}

/* Workers of the ring's own worker pool that sleep until there is an order. The fence: who has published before sees whoever sleeps, or is
 * seen by whom looks once more before it does. */
static inline uint32_t shml_num_idle(const shml_ring *ring) {
    uint32_t num_idle = 0;
    atomic_thread_fence(memory_order_seq_cst);
    for (uint64_t w = 0; w < ring->header->num_workers && w < atomic_load(&ring->header->num_wanted); w++)
        num_idle += atomic_load_explicit(&ring->workers[w].is_waiting, memory_order_relaxed) != 0;
    return num_idle;
}

/* Chunks that nobody has claimed. */
static inline uint32_t shml_num_open(const shml_ring *ring) {
    uint32_t num_open = 0;
    for (uint32_t s = 0; s < ring->header->num_slots; s++)
        num_open += shml_inspect(ring, s).num_open;
    return num_open;
}

#endif
