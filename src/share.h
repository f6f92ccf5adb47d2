/* A ring that several ranks of a node read: what they report to each other about its slots.
 *
 *   header | slot records | rank records | holds: one word for each rank and slot
 *
 * The leader (rank 0 here) is the ring's trainer. Followers publish nothing: they look at the owner words of the batch they expect,
 * lease its slot in memory of their own, and write only their own record and their own holds. Each word has one writer.
 *
 * A slot's *ticket* is generation << 40 | a count of the batches that were ordered over the life of the ring. It is one word, so that an
 * old count is never read with a new generation. An order that is written again in its slot keeps it. A batch that is ordered again
 * elsewhere, as the leader was interrupted while it took it, gets none: followers find it where it was first, and a ticket that none of
 * them takes would keep its slot until they have passed a later one. A follower that takes a batch first holds the slot and then raises
 * its `next` above the ticket. The leader may use a free slot again when each follower has passed its ticket (or has gone on to a later
 * generation) and, *looked at after that*, does not hold it. While a follower has not passed a ticket, nothing in that slot changes but
 * by the leader's settling of that same batch; and that ends with a new order number, which `what` holds together with the number of
 * chunks, so that words of two orders are never taken for one. tests/proof/sharing.py explores this, and share_race.c there runs it.
 *
 * A rank that is killed leaves its record as it was. Nothing is cleared: the others stop where it stopped.
 */
#ifndef SHMLOAD_SHARE_H
#define SHMLOAD_SHARE_H

#include "lease.h"

#include <errno.h>

#define SHML_SHARE_MAGIC UINT64_C(0x324552414853484D) /* "MHSHARE2" read as bytes */
#define SHML_TICKET(generation, count) ((uint64_t)(generation) << 40 | (uint64_t)(count))
#define SHML_GENERATION_OF(ticket) ((uint64_t)(ticket) >> 40)

typedef struct {
    uint64_t magic;     /* SHML_SHARE_MAGIC; leader, last at creation, as all here */
    uint32_t num_ranks; /* that share the ring, the leader included */
    uint32_t num_slots; /* of the ring */
    uint8_t reserved[48];
} shml_share_header;

typedef struct {
    shml_u64 ticket; /* of the batch that was ordered here last, 0: none yet; leader, after everything else */
    shml_u64 what;   /* order << 16 | number of chunks, 0 while it is written anew; leader */
    shml_u64 epoch;  /* of that batch, int64 as bits; leader, before the ticket, and not again while it stands */
    shml_u64 step;   /* the same */
    uint8_t reserved[32];
} shml_share_slot;

enum { /* words of a rank's record; each written by that rank alone */
    SHML_REPORT_NEXT = 0,       /* it takes no batch with a smaller ticket any more */
    SHML_REPORT_GENERATION = 1, /* from 1: counts the places at which it has begun to read; reported after what it says of that place */
    SHML_REPORT_ENDED = 2,      /* batches it had taken of the generation before */
    SHML_REPORT_EPOCH = 3,      /* of the first batch of this generation, int64 as bits */
    SHML_REPORT_STEP = 4,       /* of that batch */
    SHML_REPORT_ODD = 3,        /* further on these three are those of odd generations: another rank may be reading the ones of before
                                 while the next are written, but not of two before, as all meet at each generation */
    SHML_REPORT_COUNT = 8,      /* batches it has taken of this generation */
    SHML_REPORT_LEFT = 9,       /* the pass that it has left before its end, from 1, << 32 | batches of this generation it had taken by
                                 then; 0: none */
    SHML_REPORT_CLOSED = 10,    /* 1: it takes nothing any more */
    SHML_REPORT_WORDS = 16,     /* a record's size: two cache lines, so ranks do not share one */
};

enum { SHML_FILLING = 0, SHML_READY = 1, SHML_FAILED = 2 }; /* what a follower sees of a batch; FILLING, READY, FAILED of trainer.pyx */

typedef struct { /* one process's view */
    shml_share_header *header;
    shml_share_slot *slots;
    shml_u64 *reports;  /* SHML_REPORT_WORDS of each rank */
    shml_u32 *holds; /* 1: that rank has leased that slot */
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

/* How many slots a rank may have leased at a time, the one that it is just given included: if none keeps more, one slot at least
 * is nobody's, and goes on to the batch that the slowest rank needs. */
static inline uint32_t shml_share_lendable(const shml_share *share) {
    return (share->header->num_slots - 1) / share->header->num_ranks + 1;
}

/* ---------------------------------------------------------------- leader */

/* Whether every follower is done with what is in a slot. Next before hold: a follower sets them the other way round. */
static inline int shml_share_is_passed(const shml_share *share, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    uint64_t generation = SHML_GENERATION_OF(ticket);
    if (ticket == 0) return 1;
    for (uint32_t rank = 1; rank < share->header->num_ranks; rank++) {
        if (atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), memory_order_acquire) <= ticket &&
            atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_GENERATION), memory_order_acquire) <= generation)
            return 0;
        if (atomic_load_explicit(shml_hold(share, rank, slot), memory_order_acquire)) return 0;
    }
    return 1;
}

/* Around shml_publish: what followers knew of the slot's order is no more; then what it is now. `count` 0: no ticket, see above. */
static inline void shml_share_rewrites(const shml_share *share, uint32_t slot) {
    atomic_store_explicit(&share->slots[slot].what, 0, memory_order_seq_cst);
}

static inline void shml_share_wrote(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t order, uint64_t generation,
                                    uint64_t count) {
    shml_share_slot *record = &share->slots[slot];
    atomic_store_explicit(&record->what, order << 16 | ring->slots[slot].nchunks, memory_order_release);
    if (count == 0) return;
    atomic_store_explicit(&record->epoch, (uint64_t)ring->slots[slot].epoch, memory_order_relaxed);
    atomic_store_explicit(&record->step, (uint64_t)ring->slots[slot].step, memory_order_relaxed);
    atomic_store_explicit(&record->ticket, SHML_TICKET(generation, count), memory_order_release);
}

/* ---------------------------------------------------------------- followers */

/* The slot of a batch of a generation, -1: it is not ordered yet. */
static inline int shml_share_find(const shml_share *share, uint32_t rank, uint64_t generation, int64_t epoch, int64_t step) {
    uint64_t next = atomic_load_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), memory_order_relaxed);
    for (uint32_t slot = 0; slot < share->header->num_slots; slot++) {
        shml_share_slot *record = &share->slots[slot];
        uint64_t ticket = atomic_load_explicit(&record->ticket, memory_order_acquire);
        if (ticket < next || SHML_GENERATION_OF(ticket) != generation) continue; /* from here on it stays this batch's */
        if (atomic_load_explicit(&record->epoch, memory_order_relaxed) == (uint64_t)epoch &&
            atomic_load_explicit(&record->step, memory_order_relaxed) == (uint64_t)step)
            return (int)slot;
    }
    return -1;
}

/* What shml_inspect says of one order, 0 also where it is about to be another: `order` 0. */
static inline shml_status shml_share_inspect(const shml_share *share, const shml_ring *ring, uint32_t slot, uint64_t *order) {
    shml_status status = {0, 0, 0, -1, 0};
    uint64_t what = atomic_load_explicit((shml_u64 *)&share->slots[slot].what, memory_order_acquire);
    *order = what >> 16;
    for (uint32_t c = 0; c < (uint32_t)(what & 0xFFFF); c++) {
        uint64_t word = atomic_load_explicit((shml_u64 *)&ring->slots[slot].owner[c], memory_order_acquire);
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

/* How a batch stands in the slot that shml_share_find gave. FILLING is also what its leader has yet to see to.
 * `err` is read on both sides of the words: a chunk that failed while the text was another's fails again when the leader has opened it
 * again, and wins `err` before its text is whole; its word of before must not be taken for the end of that. */
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

/* Leases a slot: holds it, and then passes its ticket. */
static inline void shml_share_take(const shml_share *share, uint32_t rank, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    atomic_store_explicit(shml_hold(share, rank, slot), 1, memory_order_relaxed);
    atomic_store_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), ticket + 1, memory_order_release);
}

/* Passes a slot's batch without a lease. */
static inline void shml_share_skip(const shml_share *share, uint32_t rank, uint32_t slot) {
    uint64_t ticket = atomic_load_explicit(&share->slots[slot].ticket, memory_order_relaxed);
    atomic_store_explicit(shml_report_word(share, rank, SHML_REPORT_NEXT), ticket + 1, memory_order_release);
}

static inline void shml_share_let_go(const shml_share *share, uint32_t rank, uint32_t slot) {
    atomic_store_explicit(shml_hold(share, rank, slot), 0, memory_order_release);
}

/* Gives a slot's private pages up, in which the program has written: the next batch is to be seen. Before each lease. */
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

/* One more that sleeps; `seen` is what it has seen of rings. Then it looks once more before it does. */
static inline void shml_begin_sleep(shml_header *header, uint32_t *seen) {
    atomic_fetch_add_explicit(&header->num_sleepers, 1, memory_order_seq_cst);
    *seen = atomic_load_explicit(&header->num_rings, memory_order_seq_cst);
}

static inline void shml_end_sleep(shml_header *header) {
    atomic_fetch_sub_explicit(&header->num_sleepers, 1, memory_order_seq_cst);
}

/* Sleeps until shml_wake (protocol.h) has rung since `seen` was read, or that long; 0, ETIMEDOUT, EAGAIN or EINTR. */
static inline int shml_sleep(shml_header *header, uint32_t seen, double timeout_s) {
    struct timespec most = {(time_t)timeout_s, (long)((timeout_s - (double)(time_t)timeout_s) * 1e9)};
    return syscall(SYS_futex, (uint32_t *)&header->num_rings, FUTEX_WAIT, seen, &most, NULL, 0) == 0 ? 0 : errno;
}

#endif
