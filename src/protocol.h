/* The slot protocol: how one trainer and many workers hand over chunks of rows.
 *
 * owner[c] = order << 16 | own, where order (48 bits) counts publications over the life of the ring and is never reused, so
 * that a compare-exchange from an earlier order cannot succeed; and own is
 *
 *     0            unclaimed, open to anyone
 *     0x4000 + w   unclaimed, reserved for worker w
 *     w + 1        claimed by worker w
 *     DONE         final: the rows are filled
 *     VOID         final: the rows are not filled; the order was abandoned, or must be ordered again in another form
 *     ERROR        final: the rows could not be read
 *     POISON       final: the trainer has given up the rows, because reading them crashed workers or took too long
 *
 * A chunk is claimed and its owner recorded by one compare-exchange, so a kill cannot lose work at any moment. "Ready" is derived
 * from the words, never stored. Only the trainer publishes, voids, recovers and re-opens, under Python's GIL and within one C call
 * each, so nothing can interrupt it between two words. Ringing a semaphore only makes its waiter check the words again.
 *
 * Orderings: publish, re-open and recover store with release; claim acquires; finish and the scan after it are seq_cst, because
 * with weaker orderings two workers finishing at the same time could each miss the other, and neither would ring (store buffering).
 */
#ifndef SHMLOAD_PROTOCOL_H
#define SHMLOAD_PROTOCOL_H

#include "events.h"
#include "layout.h"

#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SHML_OPEN = 0,
    SHML_RESERVED = 0x4000,
    SHML_POISON = 0xFFFC,
    SHML_ERROR = 0xFFFD,
    SHML_VOID = 0xFFFE,
    SHML_DONE = 0xFFFF,
};
#define SHML_ANYONE (-1)
#define SHML_ANY_SLOT (-2)

#define SHML_WORD(order, own) ((uint64_t)(order) << 16 | (uint64_t)(own))
#define SHML_ORDER_OF(word) ((uint64_t)(word) >> 16)
#define SHML_OWN_OF(word) ((uint32_t)((word) & 0xFFFF))

typedef struct { /* one process's view of a control block */
    shml_header *header;
    shml_worker *workers;
    shml_slot *slots;
    uint8_t *orders;
    uint8_t *texts;
    uint8_t *layout;
    uint8_t *events;
} shml_ring;

typedef struct { /* a worker's claim, between claim and finish */
    uint64_t order;
    uint32_t slot;
    uint32_t chunk;
} shml_claim;

typedef struct { /* a summary of the owner words of one slot */
    uint32_t num_open;    /* unclaimed */
    uint32_t num_claimed;
    uint32_t num_void;
    int32_t first_bad;    /* lowest chunk that ended in ERROR or POISON, -1 none */
    uint32_t bad_own;     /* SHML_ERROR or SHML_POISON */
} shml_status;

static inline int shml_is_final(uint64_t word) { return SHML_OWN_OF(word) >= SHML_POISON; }

static inline int shml_is_open(uint64_t word) {
    uint32_t own = SHML_OWN_OF(word);
    return own == SHML_OPEN || (own >= SHML_RESERVED && own < SHML_POISON);
}

static inline uint8_t *shml_order_area(const shml_ring *ring, uint32_t slot) {
    return ring->orders + (uint64_t)slot * ring->header->order_capacity;
}

static inline uint8_t *shml_text_area(const shml_ring *ring, uint32_t slot) {
    return ring->texts + (uint64_t)slot * ring->header->text_capacity;
}

/* Return the recorder of a worker; the number of workers gives the trainer's. */
static inline shml_recorder *shml_recorder_of(const shml_ring *ring, uint32_t owner) {
    return (shml_recorder *)(ring->events + owner * shml_recorder_nbytes((uint32_t)ring->header->events_per_ring));
}

/* Append an event that belongs to no order to an owner's recorder. */
static inline void shml_record_of_none(const shml_ring *ring, uint32_t owner, uint32_t kind, uint64_t begin_ns,
                                       uint64_t end_ns) {
    const uint64_t words[8] = {begin_ns, end_ns, 0, 0, 0, kind, 0, 0};
    shml_record(shml_recorder_of(ring, owner), (uint32_t)ring->header->events_per_ring, words);
}

/* Append an event of the slot's present or last order, whose plain fields must not change during the call. */
static inline void shml_record_of_slot(const shml_ring *ring, uint32_t owner, uint32_t kind, uint64_t begin_ns, uint64_t end_ns,
                                       uint64_t order, uint32_t slot, uint32_t place, uint32_t nrows, uint64_t amount) {
    const shml_slot *s = &ring->slots[slot];
    const uint64_t words[8] = {
        begin_ns, end_ns, order, (uint64_t)s->epoch, (uint64_t)s->step,
        kind | (uint64_t)slot << 32, place | (uint64_t)nrows << 32, amount,
    };
    shml_record(shml_recorder_of(ring, owner), (uint32_t)ring->header->events_per_ring, words);
}

/* Return the first row of a chunk; chunk = nchunks gives the end. Rows are spread as evenly as whole rows allow. */
static inline uint32_t shml_first_row(uint32_t nrows, uint32_t nchunks, uint32_t chunk) {
    return (uint32_t)((uint64_t)nrows * chunk / nchunks);
}

/* ---------------------------------------------------------------- creation */

static inline uint64_t shml_round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* Return the size of a control block in bytes; unless `h` is NULL, also write the offsets and capacities to it. */
static inline uint64_t shml_plan(shml_header *h, uint32_t num_slots, uint32_t num_workers, uint64_t order_capacity,
                                 uint64_t text_capacity, uint64_t layout_capacity) {
    uint64_t at = sizeof(shml_header);
    uint64_t workers = at;
    at = shml_round_up(at + (uint64_t)num_workers * sizeof(shml_worker), SHML_ALIGN);
    uint64_t slots = at;
    at += (uint64_t)num_slots * sizeof(shml_slot);
    uint64_t orders = at;
    order_capacity = shml_round_up(order_capacity, SHML_ALIGN);
    at += num_slots * order_capacity;
    uint64_t texts = at;
    text_capacity = shml_round_up(text_capacity, SHML_ALIGN);
    at += num_slots * text_capacity;
    uint64_t layout = at;
    layout_capacity = shml_round_up(layout_capacity, SHML_ALIGN);
    uint64_t events = at + layout_capacity;
    at = shml_round_up(events + (num_workers + UINT64_C(1)) * shml_recorder_nbytes(SHML_EVENTS_PER_RING), 4096);
    if (h) {
        h->num_slots = num_slots;
        h->num_workers = num_workers;
        h->total_nbytes = at;
        h->workers_offset = workers;
        h->slots_offset = slots;
        h->orders_offset = orders;
        h->order_capacity = order_capacity;
        h->texts_offset = texts;
        h->text_capacity = text_capacity;
        h->layout_offset = layout;
        h->layout_capacity = layout_capacity;
        h->events_offset = events;
        h->events_per_ring = SHML_EVENTS_PER_RING;
    }
    return at;
}

/* Set the pointers of a view to the parts of the control block at `base`. */
static inline void shml_view(shml_ring *ring, void *base) {
    uint8_t *b = (uint8_t *)base;
    shml_header *h = (shml_header *)base;
    ring->header = h;
    ring->workers = (shml_worker *)(b + h->workers_offset);
    ring->slots = (shml_slot *)(b + h->slots_offset);
    ring->orders = b + h->orders_offset;
    ring->texts = b + h->texts_offset;
    ring->layout = b + h->layout_offset;
    ring->events = b + h->events_offset;
}

/* Write a new control block into zeroed memory of shml_plan() bytes. Every owner word begins as (0, VOID). */
static inline void shml_create(shml_ring *ring, void *base, uint32_t num_slots, uint32_t num_workers, uint64_t order_capacity,
                               uint64_t text_capacity, uint64_t layout_capacity) {
    shml_header *h = (shml_header *)base;
    shml_plan(h, num_slots, num_workers, order_capacity, text_capacity, layout_capacity);
    h->abi = SHML_ABI;
    h->num_wanted = num_workers;
    shml_view(ring, base);
    for (uint32_t s = 0; s < num_slots; s++)
        for (uint32_t c = 0; c < SHML_MAX_CHUNKS; c++)
            atomic_store_explicit(&ring->slots[s].owner[c], SHML_WORD(0, SHML_VOID), memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    h->magic = SHML_MAGIC;
}

/* ---------------------------------------------------------------- trainer's operations */

/* Publish the order that the caller has written into the slot's plain fields; all fields become visible before any word.
 * `reserved` is the only worker that may claim it, or SHML_ANYONE. */
static inline void shml_publish(shml_ring *ring, uint32_t slot, uint64_t order, int reserved) {
    shml_slot *s = &ring->slots[slot];
    uint64_t own = reserved < 0 ? SHML_OPEN : (uint64_t)(SHML_RESERVED + reserved);
    atomic_store_explicit(&s->err, 0, memory_order_relaxed);
    atomic_store_explicit(&s->repack, 0, memory_order_relaxed);
    atomic_store_explicit(&s->need_nbytes, 0, memory_order_relaxed);
    atomic_store_explicit(&s->used_nbytes, 0, memory_order_relaxed);
    atomic_store_explicit(&s->note_nbytes, 0, memory_order_relaxed);
    atomic_store_explicit(&s->num_lost, 0, memory_order_relaxed);
    for (uint32_t c = 0; c < s->nchunks; c++)
        atomic_store_explicit(&s->owner[c], SHML_WORD(order, own), memory_order_release);
    for (uint32_t c = s->nchunks; c < SHML_MAX_CHUNKS; c++) {
        /* A word of an earlier order with more chunks is final, but not part of this order. */
        atomic_store_explicit(&s->owner[c], SHML_WORD(0, SHML_VOID), memory_order_relaxed);
    }
    atomic_store_explicit(&ring->header->last_order, order, memory_order_release);
}

/* Return the owner word of a chunk. */
static inline uint64_t shml_owner(const shml_slot *slot, uint32_t chunk) {
    return atomic_load_explicit((shml_u64 *)&slot->owner[chunk], memory_order_acquire);
}

/* Summarize the slot's words, each read with acquire. Words only move toward final (only the trainer resets them), so reading one
 * after the other is sound. */
static inline shml_status shml_inspect(const shml_ring *ring, uint32_t slot) {
    const shml_slot *s = &ring->slots[slot];
    shml_status status = {0, 0, 0, -1, 0};
    for (uint32_t c = 0; c < s->nchunks; c++) {
        uint64_t word = shml_owner(s, c);
        uint32_t own = SHML_OWN_OF(word);
        if (own == SHML_DONE) continue;
        if (own == SHML_VOID) status.num_void++;
        else if (own == SHML_ERROR || own == SHML_POISON) {
            if (status.first_bad < 0) {
                status.first_bad = (int32_t)c;
                status.bad_own = own;
            }
        } else if (shml_is_open(word)) status.num_open++;
        else status.num_claimed++;
    }
    return status;
}

/* Make unclaimed chunks final, and leave claimed ones to their workers. A plain store would erase a claim made in between. */
static inline void shml_void(shml_ring *ring, uint32_t slot) {
    shml_slot *s = &ring->slots[slot];
    for (uint32_t c = 0; c < s->nchunks; c++) {
        uint64_t word = atomic_load_explicit(&s->owner[c], memory_order_relaxed);
        if (shml_is_open(word))
            atomic_compare_exchange_strong_explicit(&s->owner[c], &word, SHML_WORD(SHML_ORDER_OF(word), SHML_VOID),
                                                    memory_order_acq_rel, memory_order_relaxed);
    }
}

/* Turn chunks that ended in ERROR into VOID, because they will not be ordered again. Their worker may be waiting for that
 * (shml_take_failed). */
static inline void shml_give_up(shml_ring *ring, uint32_t slot) {
    shml_slot *s = &ring->slots[slot];
    for (uint32_t c = 0; c < s->nchunks; c++) {
        uint64_t word = atomic_load_explicit(&s->owner[c], memory_order_relaxed);
        if (SHML_OWN_OF(word) == SHML_ERROR)
            atomic_store_explicit(&s->owner[c], SHML_WORD(SHML_ORDER_OF(word), SHML_VOID), memory_order_release);
    }
}

/* Recover worker w's claim in this slot. Call this only after its process is dead and reaped, because a stopped worker that wakes
 * up would write into rows that belong to another. `own` is the new value of the word: OPEN, a reservation, VOID or POISON.
 * Return the recovered chunk, or -1 if there is none. Each call recovers at most one chunk; a worker number that stands for a Ray
 * actor may have several claims. */
static inline int32_t shml_recover(shml_ring *ring, uint32_t slot, uint32_t w, uint32_t own) {
    shml_slot *s = &ring->slots[slot];
    for (uint32_t c = 0; c < s->nchunks; c++) {
        uint64_t word = atomic_load_explicit(&s->owner[c], memory_order_acquire);
        if (SHML_OWN_OF(word) != w + 1) continue;
        uint64_t order = SHML_ORDER_OF(word);
        uint64_t mine = SHML_WORD(order, c + 1);
        /* Release, because the next winner of `err`, in a chunk claimed long ago, overwrites the dead worker's partial text. */
        atomic_compare_exchange_strong_explicit(&s->err, &mine, 0, memory_order_acq_rel, memory_order_relaxed);
        uint64_t asked = order;
        if (own != SHML_VOID && own != SHML_POISON)
            atomic_compare_exchange_strong_explicit(&s->repack, &asked, 0, memory_order_relaxed, memory_order_relaxed);
        atomic_store_explicit(&s->need_nbytes, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&s->num_lost, 1, memory_order_relaxed); /* visible to the worker that claims the chunk released below */
        if (atomic_compare_exchange_strong_explicit(&s->owner[c], &word, SHML_WORD(order, own), memory_order_acq_rel,
                                                    memory_order_relaxed))
            return (int32_t)c;
    }
    return -1;
}

/* Announce the slot for which the trainer is about to sleep (SHML_ANY_SLOT for any, -1 when it is awake). The trainer must check
 * the slot again before it sleeps, because a worker that finished earlier did not ring. The fence, and the total order of seq_cst
 * in shml_finish and shml_is_awaited, ensure that one of the two sees the other. */
static inline void shml_await(shml_ring *ring, int64_t slot) {
    uint64_t awaited = slot == SHML_ANY_SLOT ? UINT64_MAX : (uint64_t)(slot + 1);
    atomic_store_explicit(&ring->header->awaited, awaited, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Open a chunk again that ended in ERROR while the text area had another chunk's error, so that it fails with its own text. */
static inline void shml_reopen(shml_ring *ring, uint32_t slot, uint32_t chunk, int reserved) {
    shml_slot *s = &ring->slots[slot];
    uint64_t order = SHML_ORDER_OF(atomic_load_explicit(&s->owner[chunk], memory_order_relaxed));
    uint64_t own = reserved < 0 ? SHML_OPEN : (uint64_t)(SHML_RESERVED + reserved);
    atomic_store_explicit(&s->err, 0, memory_order_relaxed);
    atomic_store_explicit(&s->owner[chunk], SHML_WORD(order, own), memory_order_release);
}

/* Add to a word that only this process writes: a load and a store, without a locked instruction. */
static inline void shml_count(shml_u64 *counter, uint64_t more) {
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + more, memory_order_relaxed);
}

/* ---------------------------------------------------------------- worker's operations */

/* Record a claim for stats readers. Relaxed, because the exchange of shml_finish publishes it in any case. */
static inline void shml_count_claim(shml_worker *me, uint64_t now_ns) {
    atomic_store_explicit(&me->since_ns, now_ns, memory_order_relaxed);
    atomic_store_explicit(&me->claimed_ns, now_ns, memory_order_relaxed);
}

static inline void shml_count_finish(
    shml_worker *me, uint64_t busy_ns, uint64_t num_samples, uint64_t num_foreign, uint64_t num_irregular
) {
    shml_count(&me->busy_ns, busy_ns);
    atomic_store_explicit(&me->claimed_ns, 0, memory_order_relaxed);
    shml_count(&me->num_chunks, 1);
    shml_count(&me->num_samples, num_samples);
    shml_count(&me->num_foreign, num_foreign);
    shml_count(&me->num_irregular, num_irregular);
}

/* Record bytes sent by the worker's Ray actor for stats readers; `node` has 11 characters at most. */
static inline void shml_count_fetch(shml_worker *me, uint64_t nbytes, int is_remote, const char *node, uint32_t num_actors) {
    shml_count(&me->nbytes_fetched, nbytes);
    shml_count(&me->nbytes_remote, is_remote ? nbytes : 0);
    atomic_store_explicit(&me->num_actors, num_actors, memory_order_relaxed);
    strncpy(me->node, node, sizeof me->node);
}

/* Find the oldest chunk open to worker w whose order is later than `after`. Return its word and fill `claim`, or return
 * UINT64_MAX. Helpers, whose numbers follow the worker pool's, skip orders that have crashed a worker: the ring's own pool finds
 * the sample that causes it, so that it does not crash one helper after another. In a static ring, orders newer than
 * `last_order` are ignored, because a scan overtaken by two publications could take the later batch first and break per-worker
 * random streams. */
static inline uint64_t shml_find_open(const shml_ring *ring, uint32_t w, uint64_t after, shml_claim *claim) {
    const shml_header *h = ring->header;
    uint64_t reserved = SHML_RESERVED + (uint64_t)w;
    uint64_t num_wanted = atomic_load_explicit((shml_u64 *)&h->num_wanted, memory_order_relaxed);
    uint64_t newest = UINT64_MAX;
    if (h->is_static) newest = atomic_load_explicit((shml_u64 *)&h->last_order, memory_order_acquire);
    uint64_t best = UINT64_MAX;
    for (uint32_t s = 0; s < h->num_slots; s++) {
        const shml_slot *slot = &ring->slots[s];
        for (uint32_t c = 0; c < SHML_MAX_CHUNKS; c++) {
            uint64_t word = atomic_load_explicit((shml_u64 *)&slot->owner[c], memory_order_relaxed);
            uint64_t order = SHML_ORDER_OF(word);
            if (c > 0 && order == 0) break; /* beyond nchunks */
            uint64_t own = SHML_OWN_OF(word);
            if ((own != SHML_OPEN && own != reserved) || order > newest || order <= after) continue;
            if (w >= num_wanted && atomic_load_explicit((shml_u64 *)&slot->num_lost, memory_order_relaxed)) continue;
            if (best == UINT64_MAX || order < SHML_ORDER_OF(best)) {
                best = word;
                claim->order = order;
                claim->slot = s;
                claim->chunk = c;
            }
        }
    }
    return best;
}

/* Claim the oldest chunk open to worker w after the `num_left` oldest open orders, which are left to others. Return 1 and fill
 * `claim`, or return 0 if no chunk is open now. */
static inline int shml_take_claim(const shml_ring *ring, uint32_t w, uint32_t num_left, shml_claim *claim) {
    for (;;) {
        uint64_t best = shml_find_open(ring, w, 0, claim);
        for (uint32_t left = num_left; left > 0 && best != UINT64_MAX; left--)
            best = shml_find_open(ring, w, SHML_ORDER_OF(best), claim);
        if (best == UINT64_MAX) return 0;
        if (atomic_compare_exchange_strong_explicit(&ring->slots[claim->slot].owner[claim->chunk], &best,
                                                    SHML_WORD(claim->order, w + 1), memory_order_acquire,
                                                    memory_order_relaxed))
            return 1;
    }
}

/* Claim again worker w's batch that ended in ERROR, once the trainer has ordered the batch again in its slot, reserved for w. Only
 * w may claim it, so the plain fields do not change. In torch mode, w must fill it before the later batches, whose order numbers
 * are smaller. Return 1 and fill `claim`, 0 if the trainer has dropped the batch, -1 if it has not handled the error yet. */
static inline int shml_take_failed(const shml_ring *ring, uint32_t w, int64_t epoch, int64_t step, shml_claim *claim) {
    shml_slot *s = &ring->slots[claim->slot];
    uint64_t word = atomic_load_explicit(&s->owner[claim->chunk], memory_order_acquire);
    if (word == SHML_WORD(claim->order, SHML_ERROR)) return -1;
    if (SHML_OWN_OF(word) != SHML_RESERVED + w || s->epoch != epoch || s->step != step) return 0;
    uint64_t order = SHML_ORDER_OF(word);
    if (!atomic_compare_exchange_strong_explicit(&s->owner[claim->chunk], &word, SHML_WORD(order, w + 1), memory_order_acquire,
                                                 memory_order_relaxed))
        return 0;
    claim->order = order;
    return 1;
}

/* Claim worker w's oldest open batch that precedes this step. The replacement of a worker that died with a failed batch does not know
 * of it, and may wait for the repair of a later one, while the trainer waits for the earlier. Return 1 and fill `claim`, or 0. */
static inline int shml_take_earlier(const shml_ring *ring, uint32_t w, int64_t epoch, int64_t step, shml_claim *claim) {
    shml_claim found = {0};
    uint64_t word = shml_find_open(ring, w, 0, &found);
    for (; word != UINT64_MAX; word = shml_find_open(ring, w, found.order, &found)) {
        shml_slot *s = &ring->slots[found.slot];
        atomic_thread_fence(memory_order_acquire); /* the word was read relaxed; only w may claim it, so the plain fields stay */
        if (SHML_OWN_OF(word) != SHML_RESERVED + w || s->epoch > epoch || (s->epoch == epoch && s->step >= step)) continue;
        if (!atomic_compare_exchange_strong_explicit(&s->owner[found.chunk], &word, SHML_WORD(found.order, w + 1),
                                                     memory_order_acquire, memory_order_relaxed))
            continue;
        *claim = found;
        return 1;
    }
    return 0;
}

/* Call this before finishing with ERROR. Return 1 if this worker may write the slot's text area, because no other chunk's error is
 * there. */
static inline int shml_win_error(const shml_ring *ring, const shml_claim *claim) {
    uint64_t none = 0;
    return atomic_compare_exchange_strong_explicit(&ring->slots[claim->slot].err, &none,
                                                   SHML_WORD(claim->order, claim->chunk + 1), memory_order_acq_rel,
                                                   memory_order_relaxed);
}

/* End a claim with DONE, VOID or ERROR. Return 1 if every chunk of the slot is now final (see shml_is_awaited), 0 if not, -1 if the
 * claim no longer belonged to this worker, which cannot happen to a live worker: abort. */
static inline int shml_finish(const shml_ring *ring, const shml_claim *claim, uint32_t w, uint32_t own) {
    shml_slot *s = &ring->slots[claim->slot];
    uint32_t nchunks = s->nchunks; /* plain, and unchanged only until the exchange below */
    uint64_t word = SHML_WORD(claim->order, w + 1);
    if (!atomic_compare_exchange_strong_explicit(&s->owner[claim->chunk], &word, SHML_WORD(claim->order, own),
                                                 memory_order_seq_cst, memory_order_relaxed))
        return -1;
    for (uint32_t c = 0; c < nchunks; c++)
        if (!shml_is_final(atomic_load_explicit(&s->owner[c], memory_order_seq_cst))) return 0;
    return 1;
}

/* Return whether the trainer sleeps for this slot, which has just become final. Only then must its bell be rung. */
static inline int shml_is_awaited(const shml_ring *ring, uint32_t slot) {
    uint64_t awaited = atomic_load_explicit((shml_u64 *)&ring->header->awaited, memory_order_seq_cst);
    return awaited == (uint64_t)slot + 1 || awaited == UINT64_MAX;
}

/* Wake the ranks that sleep until this ring changes (share.h). A worker calls this when it has made a slot final. The total order
 * of seq_cst ensures that it sees the sleeper, or that the sleeper, which checks again, sees the change. */
static inline void shml_wake(const shml_ring *ring) {
    shml_header *header = ring->header;
    if (atomic_load_explicit(&header->num_sleepers, memory_order_seq_cst) == 0) return;
    atomic_fetch_add_explicit(&header->num_rings, 1, memory_order_seq_cst);
    syscall(SYS_futex, (uint32_t *)&header->num_rings, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Become the worker that describes the layout, before it is known. Return 1 if w may write the layout text; w then stores
 * SHML_LAYOUT_PROPOSED and waits. If the worker dies in between, the trainer resets the state. */
static inline int shml_ask_layout(const shml_ring *ring, uint32_t w) {
    uint32_t none = SHML_LAYOUT_NONE;
    return atomic_compare_exchange_strong(&ring->header->layout_state, &none, SHML_LAYOUT_ASKING + w);
}

#endif
