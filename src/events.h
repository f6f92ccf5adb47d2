/* The flight recorder: the latest actions of every worker and of the trainer, with begin and end, in one small ring of events each.
 *
 *   header.events_offset: recorder of worker 0 | of worker 1 | ... | of the trainer (the last one)
 *   a recorder:           shml_recorder | events_per_ring x shml_event
 *
 * It is always on. A recorder has one writer, its owner, which never waits and never reads: it overwrites its oldest event. Any
 * process may read at the same time, also through a read-only mapping.
 *
 * It is a seqlock whose sequence is the number of events written (Boehm, "Can Seqlocks Get Along With Programming Language Memory
 * Models?", MSPC 2012). While event n is being written, `head` is n, and event n takes the place of event n - capacity. So a reader
 * copies the events it wants, reads `head` again, and drops every event whose place may have been overwritten during the copy. The
 * words are relaxed atomics, which costs nothing and avoids undefined behavior. The writer's fence orders the words of event n
 * after the head that says n; the reader's fence orders its copies before its second read of the head.
 */
#ifndef SHMLOAD_EVENTS_H
#define SHMLOAD_EVENTS_H

#include "layout.h"

#include <string.h>

/* Kinds of events (the low 16 bits of shml_event.what). */
enum {
    SHML_EVENT_CHUNK = 1,    /* worker: filled a chunk; amount: its result (DONE, VOID, ERROR of protocol.h) */
    SHML_EVENT_IDLE = 2,     /* worker: waited for orders; no order number */
    SHML_EVENT_ROOM = 3,     /* worker, within a chunk: waited for a larger payload */
    SHML_EVENT_LAYOUT = 4,   /* worker, within a chunk: waited for the layout to be settled */
    SHML_EVENT_START = 5,    /* worker: from the start of its process until it was ready for orders; no order number */
    SHML_EVENT_WAIT = 16,    /* trainer: slept for a batch; no order number if it slept for any batch */
    SHML_EVENT_DELIVER = 17, /* trainer: from the lease of a slot until its batch was made; amount: bytes */
    SHML_EVENT_PUBLISH = 18, /* trainer: an order was opened to workers; an instant; place: its number of chunks */
    SHML_EVENT_LEASE = 19,   /* trainer: the program held the slot; written when the slot is collected */
    SHML_EVENT_ABANDON = 20, /* trainer: every order in progress was abandoned; an instant; no order number */
};

typedef struct {
    shml_u64 begin_ns; /* CLOCK_MONOTONIC */
    shml_u64 end_ns;   /* equal for an instant */
    shml_u64 order;    /* order number; if 0, epoch, step, slot, place and rows are undefined */
    shml_u64 epoch;    /* int64 as bits */
    shml_u64 step;     /* int64 as bits */
    shml_u64 what;     /* SHML_EVENT_* | slot << 32 */
    shml_u64 place;    /* chunk, or number of chunks, | rows << 32 */
    shml_u64 amount;   /* depends on `what` */
} shml_event;

typedef struct {
    shml_u64 head; /* events written since the ring was created; written by the owner, release */
    uint8_t reserved[56];
} shml_recorder;

static_assert(sizeof(shml_event) == 64, "an event is one cache line");
static_assert(sizeof(shml_recorder) == 64, "events begin at a cache line");

static inline uint64_t shml_recorder_nbytes(uint32_t capacity) {
    return sizeof(shml_recorder) + (uint64_t)capacity * sizeof(shml_event);
}

/* Append an event. Called by the owner only. `capacity` is a power of two, here and below. */
static inline void shml_record(shml_recorder *recorder, uint32_t capacity, const uint64_t words[8]) {
#ifndef SHML_WITHOUT_STATS /* benchmarks/stats.py measures their cost */
    uint64_t head = atomic_load_explicit(&recorder->head, memory_order_relaxed);
    shml_u64 *event = (shml_u64 *)((shml_event *)(recorder + 1) + (head & (capacity - 1)));
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < 8; i++) atomic_store_explicit(&event[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&recorder->head, head + 1, memory_order_release);
#endif
}

/* Copy the events numbered `since` or later that still exist to `out`, which has room for `capacity` of them. Return how many;
 * `*first` is the number of the first one: the events from `since` up to it were overwritten. */
static inline uint64_t shml_read_events(const shml_recorder *recorder, uint32_t capacity, uint64_t since, uint64_t *out,
                                        uint64_t *first) {
    uint64_t head = atomic_load_explicit((shml_u64 *)&recorder->head, memory_order_acquire);
    *first = since;
    if (since >= head) return 0;
    uint64_t begin = head - since > capacity ? head - capacity : since;
    for (uint64_t n = begin; n < head; n++) {
        shml_u64 *event = (shml_u64 *)((shml_event *)(recorder + 1) + (n & (capacity - 1)));
        for (int i = 0; i < 8; i++) out[(n - begin) * 8 + i] = atomic_load_explicit(&event[i], memory_order_relaxed);
    }
    atomic_thread_fence(memory_order_acquire);
    uint64_t now = atomic_load_explicit((shml_u64 *)&recorder->head, memory_order_relaxed);
    uint64_t whole = now >= capacity ? now - capacity + 1 : 0; /* the place of event now - capacity is being written */
    if (whole > head) whole = head;
    if (whole > begin) {
        memmove(out, out + (whole - begin) * 8, (head - whole) * 64);
        begin = whole;
    }
    *first = begin;
    return head - begin;
}

#endif
