/* A ring that several ranks of a node read: what the ranks report to each other about its slots.
 *
 *   header | slot records | rank records | holds: one word for each rank and slot
 *
 * The leader (rank 0 here) is the ring's trainer. Followers publish nothing: they read the owner words of the batch they expect,
 * lease its slot in their own memory, and write only their own record and their own holds. Each word has one writer.
 *
 * A slot's *ticket* is round << 40 | the number of batches ordered over the life of the ring. It is one word, so an old count
 * is never read with a new round. An order that is written again in its slot keeps its ticket. A batch that is ordered again
 * in another slot, because the leader was interrupted while it took the batch, gets no ticket: followers find the batch in its
 * first slot, and a ticket that no follower takes would keep its slot in use until they have passed a later one. A follower that
 * takes a batch first holds the slot and then raises its `next` above the ticket. The leader may reuse a free slot when each
 * follower has passed its ticket (or has moved on to a later round) and, *checked after that*, does not hold it. While a
 * follower has not passed a ticket, nothing in that slot changes except when the leader settles that same batch. Settling ends with
 * a new order number, which `what` holds together with the number of chunks, so words of two orders are never mistaken for one
 * order. tests/proof/sharing.py explores this, and share_race.c there runs it.
 *
 * A rank that is killed leaves its record unchanged. Nothing is cleared: the others stop where it stopped.
 */
#ifndef SHMLOAD_SHARE_H
#define SHMLOAD_SHARE_H

#include "lease.h"

#include <errno.h>

#define SHML_SHARE_MAGIC UINT64_C(0x324552414853484D) /* "MHSHARE2" read as bytes */
#define SHML_TICKET(round, count) ((uint64_t)(round) << 40 | (uint64_t)(count))
#define SHML_ROUND_OF(ticket) ((uint64_t)(ticket) >> 40)

typedef struct {
    uint64_t magic;     /* SHML_SHARE_MAGIC; written by the leader, at creation, after all other fields here */
    uint32_t num_ranks; /* ranks that share the ring, including the leader */
    uint32_t num_slots; /* number of slots of the ring */
    uint8_t reserved[48];
} shml_share_header;

typedef struct {
    shml_u64 ticket; /* of the newest batch ordered here, 0 before the first; written by the leader, after all other fields */
    shml_u64 what;   /* order << 16 | number of chunks, 0 while it is being rewritten; written by the leader */
    shml_u64 epoch;  /* of that batch, int64 as bits; written by the leader before the ticket, only while no ticket is valid */
    shml_u64 step;   /* of that batch, int64 as bits; written by the leader before the ticket; unchanged until all have passed it */
    uint8_t reserved[32];
} shml_share_slot;

enum { /* words of a rank's record; each is written by that rank only */
    SHML_REPORT_NEXT = 0,       /* the rank takes no batch with a smaller ticket any more */
    SHML_REPORT_ROUND = 1,      /* number of times it has begun to read at a new place; written after that place's words */
    SHML_REPORT_ENDED = 2,      /* batches that the rank took of the previous round */
    SHML_REPORT_EPOCH = 3,      /* of the first batch of this round, int64 as bits */
    SHML_REPORT_STEP = 4,       /* of that batch */
    SHML_REPORT_ODD = 3,        /* added to these three words in odd rounds: another rank may still read the words of the
                                   previous round while the next are written, but not of the one before that, because all
                                   ranks meet at each round */
    SHML_REPORT_COUNT = 8,      /* batches that the rank has taken of this round */
    SHML_REPORT_LEFT = 9,       /* number of the pass that the rank has left early, from 1, << 32 | batches of this round it
                                   had taken by then; 0 if none */
    SHML_REPORT_CLOSED = 10,    /* 1: the rank takes no batches any more */
    SHML_REPORT_WORDS = 16,     /* size of a record: two cache lines, so ranks do not share one */
};

enum { SHML_FILLING = 0, SHML_READY = 1, SHML_FAILED = 2 }; /* what a follower sees of a batch; see trainer.pyx */

typedef struct { /* one process's view */
    shml_share_header *header;
    shml_share_slot *slots;
    shml_u64 *reports;  /* SHML_REPORT_WORDS for each rank */
    shml_u32 *holds; /* 1 if that rank has leased that slot */
} shml_share;

static inline uint64_t shml_share_nbytes(uint32_t num_ranks, uint32_t num_slots) {
    return sizeof(shml_share_header) + num_slots * sizeof(shml_share_slot) +
           (uint64_t)num_ranks * (SHML_REPORT_WORDS * sizeof(shml_u64) + shml_round_up(num_slots * sizeof(shml_u32), SHML_ALIGN));
}

static inline void shml_share_view(shml_share *share, void *base) {
    share->header = (shml_share_header *)base;
    share->slots = (shml_share_slot *)(share->header + 1);
    share->reports = (shml_u64 *)(share->slots + share->header->num_slots);
    share->holds = (shml_u32 *)(share->reports + (uint64_t)share->header->num_ranks * SHML_REPORT_WORDS);
}

static inline void shml_share_create(shml_share *share, void *base, uint32_t num_ranks, uint32_t num_slots) {
    shml_share_header *h = (shml_share_header *)base;
    h->num_ranks = num_ranks;
    h->num_slots = num_slots;
    shml_share_view(share, base);
    atomic_thread_fence(memory_order_release);
    h->magic = SHML_SHARE_MAGIC;
}

static inline shml_u64 *shml_report_word(const shml_share *share, uint32_t rank, uint32_t word) {
    return &share->reports[(uint64_t)rank * SHML_REPORT_WORDS + word];
}

static inline shml_u32 *shml_hold(const shml_share *share, uint32_t rank, uint32_t slot) {
    uint64_t stride = shml_round_up(share->header->num_slots * sizeof(shml_u32), SHML_ALIGN) / sizeof(shml_u32);
    return &share->holds[rank * stride + slot];
}

/* Return how many slots a rank may have leased at a time, including the one it is about to lease. If no rank keeps more, at
 * least one slot is free for the batch that the slowest rank needs. */
static inline uint32_t shml_share_lendable(const shml_share *share) {
    return (share->header->num_slots - 1) / share->header->num_ranks + 1;
}

/* ---------------------------------------------------------------- leader */

/* Return whether all followers are done with a slot's batch. Reads `next` before the hold: a follower writes them in reverse. */
static inline int shml_share_is_passed(const shml_share *share, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    uint64_t round = SHML_ROUND_OF(ticket);
    if (ticket == 0) return 1;
    for (uint32_t rank = 1; rank < share->header->num_ranks; rank++) {
        if (atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), memory_order_acquire) <= ticket &&
            atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_ROUND), memory_order_acquire) <= round)
            return 0;
        if (atomic_load_explicit(shml_hold(share, rank, slot), memory_order_acquire)) return 0;
    }
    return 1;
}

/* Call before and after shml_publish: the first invalidates what followers read of the slot's order, the second publishes the
 * new order. If `count` is 0, the batch gets no ticket (see the top of this file). */
static inline void shml_share_rewrites(const shml_share *share, uint32_t slot) {
    atomic_store_explicit(&share->slots[slot].what, 0, memory_order_seq_cst);
}

static inline void shml_share_wrote(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t order, uint64_t round,
                                    uint64_t count) {
    shml_share_slot *record = &share->slots[slot];
    atomic_store_explicit(&record->what, order << 16 | ring->slots[slot].nchunks, memory_order_release);
    if (count == 0) return;
    atomic_store_explicit(&record->epoch, (uint64_t)ring->slots[slot].epoch, memory_order_relaxed);
    atomic_store_explicit(&record->step, (uint64_t)ring->slots[slot].step, memory_order_relaxed);
    atomic_store_explicit(&record->ticket, SHML_TICKET(round, count), memory_order_release);
}

/* ---------------------------------------------------------------- followers */

/* Return the slot of a batch of a round, or -1 if it is not ordered yet. */
static inline int shml_share_find(const shml_share *share, uint32_t rank, uint64_t round, int64_t epoch, int64_t step) {
    uint64_t next = atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), memory_order_relaxed);
    for (uint32_t slot = 0; slot < share->header->num_slots; slot++) {
        shml_share_slot *record = &share->slots[slot];
        uint64_t ticket = atomic_load_explicit(&record->ticket, memory_order_acquire);
        if (ticket < next || SHML_ROUND_OF(ticket) != round) continue; /* from here on the slot belongs to this batch */
        if (atomic_load_explicit(&record->epoch, memory_order_relaxed) == (uint64_t)epoch &&
            atomic_load_explicit(&record->step, memory_order_relaxed) == (uint64_t)step)
            return (int)slot;
    }
    return -1;
}

/* Return the state of one order as shml_inspect does. If the slot is about to get another order, set `order` to 0. */
static inline shml_status shml_share_inspect(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t *order) {
    shml_status status = {0, 0, 0, -1, 0};
    uint64_t what = atomic_load_explicit((shml_u64 *)&share->slots[slot].what, memory_order_acquire);
    *order = what >> 16;
    for (uint32_t c = 0; c < (uint32_t)(what & 0xFFFF); c++) {
        uint64_t word = shml_owner(&ring->slots[slot], c);
        uint32_t own = SHML_OWN_OF(word);
        if (SHML_ORDER_OF(word) != *order) {
            *order = 0;
            return status;
        }
        if (own == SHML_DONE) continue;
        if (own == SHML_VOID) status.num_void++;
        else if (own == SHML_ERROR || own == SHML_POISON) {
            if (status.first_bad < 0) {
                status.first_bad = (int32_t)c;
                status.bad_own = own;
            }
        } else status.num_open++;
    }
    return status;
}

/* Return the state of a batch in the slot returned by shml_share_find. FILLING includes every state that the leader still has to
 * handle. `err` is read before and after the owner words: a chunk that failed while another chunk owned the error text fails
 * again after the leader has reopened it, and then owns `err` before its text is complete. Reading `err` twice prevents the word
 * of the first failure from being taken for the second. */
static inline int shml_share_look(const shml_share *share, const shml_ring *ring, uint32_t slot) {
    uint64_t order, err = atomic_load_explicit(&ring->slots[slot].err, memory_order_acquire);
    shml_status status = shml_share_inspect(share, ring, slot, &order);
    if (order == 0 || status.num_open) return SHML_FILLING;
    if (status.first_bad >= 0 && status.bad_own == SHML_POISON) return SHML_FAILED;
    if (status.num_void || atomic_load_explicit(&ring->slots[slot].repack, memory_order_acquire) == order) return SHML_FILLING;
    if (status.first_bad < 0) return SHML_READY;
    if (err != atomic_load_explicit(&ring->slots[slot].err, memory_order_acquire)) return SHML_FILLING;
    return err == SHML_WORD(order, status.first_bad + 1) ? SHML_FAILED : SHML_FILLING;
}

/* Lease a slot: hold it, and then pass its ticket. */
static inline void shml_share_take(const shml_share *share, uint32_t rank, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    atomic_store_explicit(shml_hold(share, rank, slot), 1, memory_order_relaxed);
    atomic_store_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), ticket + 1, memory_order_release);
}

/* Pass a slot's batch without a lease. */
static inline void shml_share_skip(const shml_share *share, uint32_t rank, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    atomic_store_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), ticket + 1, memory_order_release);
}

static inline void shml_share_let_go(const shml_share *share, uint32_t rank, uint32_t slot) {
    atomic_store_explicit(shml_hold(share, rank, slot), 0, memory_order_release);
}

/* Drop a slot's private pages, to which the program has written, so that the next batch becomes visible. Call before each lease. */
static inline void shml_renew(shml_place *place) {
    madvise((uint8_t *)place->map->base + place->offset, place->nbytes, MADV_DONTNEED);
}

/* ---------------------------------------------------------------- all ranks */

static inline uint64_t shml_share_reported(const shml_share *share, uint32_t rank, uint32_t word) {
    return atomic_load_explicit(shml_report_word(share, rank, word), memory_order_seq_cst);
}

static inline void shml_share_report(const shml_share *share, uint32_t rank, uint32_t word, uint64_t value) {
    atomic_store_explicit(shml_report_word(share, rank, word), value, memory_order_seq_cst);
}

/* Register a sleeper and set `seen` to the number of rings. The caller must check its condition once more before it sleeps. */
static inline void shml_begin_sleep(shml_header *header, uint32_t *seen) {
    atomic_fetch_add_explicit(&header->num_sleepers, 1, memory_order_seq_cst);
    *seen = atomic_load_explicit(&header->num_rings, memory_order_seq_cst);
}

static inline void shml_end_sleep(shml_header *header) {
    atomic_fetch_sub_explicit(&header->num_sleepers, 1, memory_order_seq_cst);
}

/* Sleep until shml_wake (protocol.h) has rung since `seen` was read, or until the timeout. Return 0, ETIMEDOUT, EAGAIN or EINTR. */
static inline int shml_sleep(shml_header *header, uint32_t seen, double timeout_s) {
    struct timespec most = {(time_t)timeout_s, (long)((timeout_s - (double)(time_t)timeout_s) * 1e9)};
    return syscall(SYS_futex, (uint32_t *)&header->num_rings, FUTEX_WAIT, seen, &most, NULL, 0) == 0 ? 0 : errno;
}

#endif
