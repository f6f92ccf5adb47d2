/* The common part of race.c and share_race.c: one ring in the memory of one process, rows whose bytes follow from their index, and
 * workers that fill them with the functions of src/protocol.h. Includers define NUM_SLOTS first, and PLANT, which each documents.
 */
#ifndef RACE_WORKER_H
#define RACE_WORKER_H

#define _GNU_SOURCE
#include "lease.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef PLANT
#define PLANT 0
#endif
#ifndef ROW_WORDS
#define ROW_WORDS 16
#endif
#define NUM_WORKERS 3
#define MAX_ROWS 16
#define ROW_NBYTES (ROW_WORDS * 8)
#define SLOT_NBYTES (MAX_ROWS * ROW_NBYTES)
#define FAILS (INT64_C(1) << 62) /* flags of an index: decoding this row fails; this row has no fixed place */
#define RAGGED (INT64_C(1) << 61)
#define INDEX_OF(index) ((index) & ~(FAILS | RAGGED))

enum { DIE_BEFORE_CLAIM, DIE_AFTER_CLAIM, DIE_IN_ROW, DIE_IN_NEED, DIE_IN_TEXT, DIE_BEFORE_FINISH, DIE_AFTER_FINISH, NUM_DEATHS };

typedef struct { /* counters in shared memory, incremented relaxed by any thread or process */
    _Atomic uint64_t differences, lost, unordered, closing;
    _Atomic int exited[NUM_WORKERS];
} tally;

static shml_ring ring;
static shml_map *map;
static tally *tallied;
static int dies_at_points; /* workers are threads that return at a named point while they hold a claim */
static uint64_t rng_seed;

static uint64_t next_random(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x >> 11;
}
static int one_in(uint64_t *x, uint64_t n) { return next_random(x) % n == 0; }

static uint64_t start_rng(uint64_t salt) {
    uint64_t x = (rng_seed + 1) * UINT64_C(0x9E3779B97F4A7C15) ^ (salt + 1) * UINT64_C(0xD1B54A32D192ED03);
    for (int i = 0; i < 8; i++) next_random(&x);
    return x;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t pattern(int64_t index, uint32_t k) { return (uint64_t)index * UINT64_C(0x9E3779B97F4A7C15) + k * UINT64_C(0xBF58476D1CE4E5B9); }
static int64_t index_at(int64_t epoch, int64_t seq, uint32_t row) { return epoch << 40 | (seq & 0xFFFFFFFF) << 8 | row; }
static uint64_t *row_at(uint32_t slot, uint32_t row) {
    return (uint64_t *)((uint8_t *)map->base + (uint64_t)slot * SLOT_NBYTES) + (uint64_t)row * ROW_WORDS;
}

static void check_rows(uint32_t slot, int64_t epoch, int64_t seq, uint32_t nrows, const char *when) {
    for (uint32_t row = 0; row < nrows; row++)
        for (uint32_t k = 0; k < ROW_WORDS; k++)
            if (row_at(slot, row)[k] != pattern(index_at(epoch, seq, row), k)) {
                if (atomic_fetch_add(&tallied->differences, 1) < 3)
                    fprintf(stderr, "%s: slot %u, epoch %ld, batch %ld, row %u, word %u\n", when, slot, (long)epoch, (long)seq, row, k);
                return;
            }
}

/* ---------------------------------------------------------------- worker */

/* Returns whether a thread dies at this point; processes are killed from outside. */
static int dies(uint64_t *rng, int point) {
    static const uint64_t rarity[NUM_DEATHS] = {4000, 60, 600, 4, 2, 60, 200};
    return dies_at_points && one_in(rng, rarity[point]);
}

static void finish(const shml_claim *claim, uint32_t w, uint32_t own) {
    int all_final = shml_finish(&ring, claim, w, own);
    if (all_final < 0) atomic_fetch_add(&tallied->lost, 1);
    if (all_final > 0) shml_wake(&ring);
}

/* Fills one chunk. Returns 0 if the worker died during it. */
static int work(const shml_claim *claim, uint32_t w, uint64_t *rng) {
    shml_slot *s = &ring.slots[claim->slot];
    if (dies(rng, DIE_AFTER_CLAIM)) return 0;
    const int64_t *indices = (const int64_t *)shml_order_area(&ring, claim->slot);
    uint32_t end = shml_first_row(s->nrows, s->nchunks, claim->chunk + 1);
    if (s->form == SHML_FORM_PACKED) {
        uint64_t needed = (uint64_t)s->nrows * ROW_NBYTES;
        uint64_t version = atomic_load(&s->payload_version);
        if (s->payload_nbytes < needed) {
            atomic_store(&s->need_nbytes, needed);
            if (dies(rng, DIE_IN_NEED)) return 0;
            while (atomic_load(&s->need_nbytes)) {
                if (atomic_load(&tallied->closing)) return 0;
                sched_yield();
            }
            if (s->payload_nbytes < needed || atomic_load(&s->payload_version) == version)
                atomic_fetch_add(&tallied->unordered, 1);
        }
        atomic_store(&s->used_nbytes, needed);
    }
    for (uint32_t row = shml_first_row(s->nrows, s->nchunks, claim->chunk); row < end; row++) {
        atomic_store(&ring.workers[w].now, claim->order << 16 | row);
        if (atomic_load_explicit(&ring.header->generation, memory_order_relaxed) != s->generation && !one_in(rng, 4)) {
            finish(claim, w, SHML_VOID); /* sometimes the hint is missed */
            return 1;
        }
        int64_t index = indices[row];
        if (index & FAILS) {
            if (shml_win_error(&ring, claim)) {
                int64_t *text = (int64_t *)shml_text_area(&ring, claim->slot);
                text[0] = row;
                if (dies(rng, DIE_IN_TEXT)) return 0;
                text[1] = INDEX_OF(index);
                atomic_store(&s->text_nbytes, 16);
            }
            finish(claim, w, SHML_ERROR);
            return 1;
        }
        if (index & RAGGED && s->form != SHML_FORM_PACKED) {
            atomic_store(&s->repack, claim->order);
            finish(claim, w, SHML_VOID);
            return 1;
        }
        uint64_t *to = row_at(claim->slot, row);
        for (uint32_t k = 0; k < ROW_WORDS; k++) {
            ((volatile uint64_t *)to)[k] = pattern(INDEX_OF(index), k);
            if (k != ROW_WORDS / 2) continue;
            if (dies(rng, DIE_IN_ROW)) return 0;
            if (!dies_at_points && one_in(rng, 8)) sched_yield(); /* yields the CPU with half a row written, so it can be killed there */
        }
    }
    if (dies(rng, DIE_BEFORE_FINISH)) return 0;
    finish(claim, w, SHML_DONE);
#if PLANT == 4
    row_at(claim->slot, end - 1)[0] = 0x44;
    sched_yield();
    row_at(claim->slot, end - 1)[1] = 0x44;
#endif
    return !dies(rng, DIE_AFTER_FINISH);
}

static void live(uint32_t w, uint64_t life) {
    uint64_t rng = start_rng(life * NUM_WORKERS + w + 100), newest = 0;
    shml_claim claim = {0, 0, 0};
    while (!atomic_load_explicit(&tallied->closing, memory_order_relaxed)) {
        if (dies(&rng, DIE_BEFORE_CLAIM)) break;
        if (!shml_take_claim(&ring, w, 0, &claim)) {
            sched_yield();
            continue;
        }
        if (ring.header->is_static) { /* oldest first, whatever has overtaken the scan */
            if (claim.order <= newest) atomic_fetch_add(&tallied->unordered, 1);
            newest = claim.order;
        }
        if (!work(&claim, w, &rng)) break;
    }
    atomic_store_explicit(&tallied->exited[w], 1, memory_order_relaxed); /* the join orders accesses, not this store */
}

static void *worker_thread(void *arg) {
    live((uint32_t)((uintptr_t)arg % NUM_WORKERS), (uintptr_t)arg / NUM_WORKERS);
    return NULL;
}

static void *shared_memory(size_t nbytes) {
    void *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) abort();
    return base;
}

#endif
