/* Helpers: workers of the node's other ranks, which fill chunks of this ring when their own ring has none.
 *
 * A helper has a worker record here, like the workers of the ring's own pool, and claims and finishes as they do. But it is not a
 * child of this trainer, and may die at any moment. So the trainer must watch the helper's process before the helper may claim. Two
 * words of the record ensure this:
 *
 *     visitor    0 ──helper──▶ identity ───────────────────────────────────▶ 0  the trainer, once the process is gone
 *     accepted   0 ─────────────────trainer, which watches it──▶ identity ──▶ 0  and its claims are recovered
 *
 * An identity contains a process id and its start time, so a process id that the kernel has reused is not mistaken for the helper.
 * One compare-exchange from 0 gives a record to one helper. If the helper dies, its replacement waits until the trainer has cleared
 * the record. A helper that dies before it is accepted has claimed nothing. tests/proof/helpers.py explores all interleavings.
 */
#ifndef SHMLOAD_HELPERS_H
#define SHMLOAD_HELPERS_H

#include "protocol.h"

/* Request admission as worker w; may be called again. Return 1 if the helper is admitted and may claim. */
static inline int shml_request(const shml_ring *ring, uint32_t w, uint64_t identity) {
    shml_worker *record = &ring->workers[w];
    uint64_t none = 0;
    atomic_thread_fence(memory_order_seq_cst); /* between is_waiting and the last check: see shml_num_idle */
    if (atomic_load_explicit(&record->accepted, memory_order_acquire) == identity) return 1;
    atomic_compare_exchange_strong_explicit(&record->visitor, &none, identity, memory_order_acq_rel, memory_order_relaxed);
    return atomic_load_explicit(&record->accepted, memory_order_acquire) == identity;
}

/* Return the identity of the helper that waits for admission as worker w; 0 if none does. */
static inline uint64_t shml_requests(const shml_ring *ring, uint32_t w) {
    uint64_t visitor = atomic_load_explicit(&ring->workers[w].visitor, memory_order_acquire);
    return visitor == atomic_load_explicit(&ring->workers[w].accepted, memory_order_relaxed) ? 0 : visitor;
}

/* Admit a helper. The trainer must already watch its process. */
static inline void shml_accept(const shml_ring *ring, uint32_t w, uint64_t identity) {
    atomic_store_explicit(&ring->workers[w].accepted, identity, memory_order_release);
}

/* Clear the record for the next helper. Call this only after the process has ended, and after shml_recover. */
static inline void shml_release(const shml_ring *ring, uint32_t w) {
    atomic_store_explicit(&ring->workers[w].accepted, 0, memory_order_relaxed);
    atomic_store_explicit(&ring->workers[w].visitor, 0, memory_order_release);
}

/* Return the number of workers of the ring's own pool that sleep until there is an order. Because of the fence, a trainer that has
 * published before sees the sleeping worker, or the worker sees the order in its last check before it sleeps. */
static inline uint32_t shml_num_idle(const shml_ring *ring) {
    uint32_t num_idle = 0;
    atomic_thread_fence(memory_order_seq_cst);
    for (uint64_t w = 0; w < ring->header->num_workers && w < atomic_load(&ring->header->num_wanted); w++)
        num_idle += atomic_load_explicit(&ring->workers[w].is_waiting, memory_order_relaxed) != 0;
    return num_idle;
}

/* Return the number of unclaimed chunks. */
static inline uint32_t shml_num_open(const shml_ring *ring) {
    uint32_t num_open = 0;
    for (uint32_t s = 0; s < ring->header->num_slots; s++)
        num_open += shml_inspect(ring, s).num_open;
    return num_open;
}

#endif
