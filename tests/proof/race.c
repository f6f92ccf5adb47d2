/* Races the functions of src/protocol.h and src/lease.h: one trainer, three workers (race_worker.h) and one buffer, of which every
 * byte is compared.
 *
 *   race threads SECONDS SEED STATIC    workers and a user are threads: for ThreadSanitizer and AddressSanitizer
 *   race processes SECONDS SEED STATIC  workers are processes, killed with SIGKILL at random moments
 *
 * With threads, a worker "dies" by returning at a random named point while it holds a claim; it is joined, recovered and started
 * again. The join represents the death of a process. There are no sleeps and no semaphores, because either would order accesses that
 * only the protocol should order, and so hide races. A user thread compares each batch again at the end of its lease, and drops it.
 * ThreadSanitizer of gcc 12 does not model atomic_thread_fence; only shml_create has one, before any worker exists.
 *
 * -DPLANT=n plants a known bug:
 *   1 a bump frees slots although they are claimed        5 owner words are stored relaxed
 *   2 owner words are published before the order's fields 6 recovery skips draining slots
 *   3 a live worker is recovered                          7 slots are delivered without acquire
 *   4 a row is written after finish                       8 a dead worker is recovered after its replacement has started
 * Exit status: 0 success, 3 bytes differ or a claim was lost, 4 no progress for too long, 66 a report of a sanitizer.
 */
#define NUM_SLOTS 5
#include "race_worker.h"

#define MAX_HELD 2

typedef struct {
    shml_lease *lease;
    int64_t epoch, seq;
    uint32_t nrows;
} held_lease;

static int use_threads;
static _Atomic(held_lease *) mailbox;

/* ---------------------------------------------------------------- user: holds leases, compares, drops */

static void end_lease(held_lease *held) {
    check_rows(held->lease->slot, held->epoch, held->seq, held->nrows, "end of lease");
    shml_lease_drop(held->lease);
    free(held);
}

static void *user_thread(void *arg) {
    (void)arg;
    uint64_t rng = start_rng(7);
    held_lease *held[MAX_HELD];
    int n = 0;
    for (;;) {
        held_lease *got = n < MAX_HELD ? atomic_exchange_explicit(&mailbox, NULL, memory_order_acquire) : NULL;
        if (got) held[n++] = got;
        int closing = atomic_load(&tallied->closing) && !got;
        if (n && (closing || one_in(&rng, 3))) {
            int which = (int)(next_random(&rng) % (uint64_t)n);
            end_lease(held[which]);
            held[which] = held[--n];
        } else if (closing) {
            return NULL;
        } else if (!got) {
            sched_yield();
        }
    }
}

/* ---------------------------------------------------------------- trainer */

typedef struct {
    shml_local_ring *local_ring;
    uint64_t rng, order;
    int64_t epoch, next_order, next_deliver;
    int slot_of[NUM_SLOTS]; /* of batch next_deliver + i */
    int32_t failing_row[NUM_SLOTS];
    int num_ordered, num_held;
    held_lease *held[MAX_HELD];
    pthread_t threads[NUM_WORKERS];
    pid_t pids[NUM_WORKERS];
    uint64_t lives;
    uint64_t batches, kills, hits, draining_hits, bumps, errors, reopened, repacks, poisoned, grown;
    double moved_s;
} trainer;

static void start_worker(trainer *t, uint32_t w) {
    uint64_t life = ++t->lives;
    atomic_store_explicit(&tallied->exited[w], 0, memory_order_relaxed);
    if (use_threads) {
        if (pthread_create(&t->threads[w], NULL, worker_thread, (void *)(uintptr_t)(life * NUM_WORKERS + w))) abort();
        return;
    }
    t->pids[w] = fork();
    if (t->pids[w] < 0) abort();
    if (t->pids[w] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        live(w, life);
        _exit(0);
    }
}

static void write_words(uint32_t slot, uint64_t order, int reserved) {
#if PLANT == 5
    shml_slot *s = &ring.slots[slot];
    atomic_store_explicit(&s->err, 0, memory_order_relaxed);
    atomic_store_explicit(&s->repack, 0, memory_order_relaxed);
    for (uint32_t c = 0; c < SHML_MAX_CHUNKS; c++)
        atomic_store_explicit(&s->owner[c],
                              c < s->nchunks ? SHML_WORD(order, reserved < 0 ? SHML_OPEN : SHML_RESERVED + reserved)
                                             : SHML_WORD(0, SHML_VOID),
                              memory_order_relaxed);
    atomic_store_explicit(&ring.header->last_order, order, memory_order_relaxed);
#else
    shml_publish(&ring, slot, order, reserved);
#endif
}

/* Orders batch `seq` in a held slot, or again in a slot whose order has ended. */
static void publish(trainer *t, uint32_t slot, int64_t seq, int is_packed, int may_fail) {
    shml_slot *s = &ring.slots[slot];
    shml_place *place = &t->local_ring->places[slot];
    int is_static = (int)ring.header->is_static;
    uint32_t nrows = 1 + (uint32_t)(seq * 7 % MAX_ROWS);
    uint32_t nchunks = is_packed || is_static ? 1 : 1 + (uint32_t)(next_random(&t->rng) % 4);
    if (nchunks > nrows) nchunks = nrows;
    place->reserved = is_static ? (int32_t)(seq % NUM_WORKERS) : SHML_ANYONE;
    place->order = ++t->order;
    place->state = SHML_ORDERED;
#if PLANT == 2
    s->nchunks = nchunks;
    write_words(slot, t->order, place->reserved);
    sched_yield();
#endif
    int64_t *indices = (int64_t *)shml_order_area(&ring, slot);
    for (uint32_t row = 0; row < nrows; row++) indices[row] = index_at(t->epoch, seq, row);
    t->failing_row[slot] = -1;
    if (may_fail && one_in(&t->rng, 4)) {
        for (uint32_t row = 0; row < nrows; row++)
            if (one_in(&t->rng, 2)) {
                indices[row] |= FAILS;
                if (t->failing_row[slot] < 0) t->failing_row[slot] = (int32_t)row;
            }
    } else if (may_fail && one_in(&t->rng, 12)) {
        indices[next_random(&t->rng) % nrows] |= RAGGED;
    }
    s->order_nbytes = nrows * 8;
    s->epoch = t->epoch;
    s->step = seq;
    s->nrows = nrows;
    s->nchunks = nchunks;
    s->form = is_packed ? SHML_FORM_PACKED : SHML_FORM_ROWS;
    s->payload_nbytes = is_packed ? 0 : SLOT_NBYTES;
    s->generation = atomic_load(&ring.header->generation);
    s->state = SHML_ORDERED;
#if PLANT != 2
    write_words(slot, t->order, place->reserved);
#endif
}

static void bump(trainer *t) {
    atomic_fetch_add(&ring.header->generation, 1);
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++)
        if (t->local_ring->places[slot].state == SHML_ORDERED) {
            shml_void(&ring, slot);
            t->local_ring->places[slot].state = SHML_DRAINING;
        }
    t->num_ordered = 0;
    t->epoch++;
    t->next_order = t->next_deliver = 0;
    t->bumps++;
}

static void drain(trainer *t) {
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        if (t->local_ring->places[slot].state != SHML_DRAINING) continue;
        shml_status status = shml_inspect(&ring, slot);
        if (status.num_open) abort();
        if (PLANT != 1 && status.num_claimed) continue;
        shml_local_ring_push_free(t->local_ring, slot);
    }
}

static void grant(trainer *t) {
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        shml_slot *s = &ring.slots[slot];
        int32_t state = t->local_ring->places[slot].state;
        if ((state != SHML_ORDERED && state != SHML_DRAINING) || atomic_load(&s->need_nbytes) == 0) continue;
        s->payload_nbytes = SLOT_NBYTES;
        atomic_fetch_add(&s->payload_version, 1);
        atomic_store(&s->need_nbytes, 0);
        t->grown++;
    }
}

/* Settles a batch whose words are all final. Returns 1 if it is delivered, 0 if the trainer must wait for it again. */
static int settle(trainer *t, uint32_t slot, shml_status status) {
    shml_slot *s = &ring.slots[slot];
    shml_place *place = &t->local_ring->places[slot];
    if (status.first_bad >= 0 && status.bad_own == SHML_POISON) {
        t->poisoned++;
        publish(t, slot, t->next_deliver, 0, 0);
    } else if (atomic_load(&s->repack) == place->order || status.num_void) {
        t->repacks++;
        publish(t, slot, t->next_deliver, 1, 0);
    } else if (status.first_bad >= 0) {
        if (atomic_load(&s->err) != SHML_WORD(place->order, status.first_bad + 1)) {
            shml_reopen(&ring, slot, (uint32_t)status.first_bad, place->reserved);
            t->reopened++;
            return 0;
        }
        const int64_t *text = (const int64_t *)shml_text_area(&ring, slot);
        if (text[0] != t->failing_row[slot] || text[1] != index_at(t->epoch, t->next_deliver, (uint32_t)text[0])) {
            fprintf(stderr, "error text: row %ld, expected %d\n", (long)text[0], t->failing_row[slot]);
            atomic_fetch_add(&tallied->differences, 1);
        }
        t->errors++;
        publish(t, slot, t->next_deliver, 0, 0);
    } else {
        return 1;
    }
    return 0;
}

static void deliver(trainer *t) {
    while (t->num_ordered) {
        uint32_t slot = (uint32_t)t->slot_of[0];
        if (use_threads ? atomic_load_explicit(&mailbox, memory_order_relaxed) != NULL : t->num_held == MAX_HELD) return;
        shml_status status = shml_inspect(&ring, slot);
#if PLANT == 7
        status = (shml_status){0, 0, 0, -1, 0};
        for (uint32_t c = 0; c < ring.slots[slot].nchunks; c++) {
            uint64_t word = atomic_load_explicit(&ring.slots[slot].owner[c], memory_order_relaxed);
            if (SHML_OWN_OF(word) != SHML_DONE) status.num_open++;
        }
        if (status.num_open) status = shml_inspect(&ring, slot);
#endif
        if (status.num_open || status.num_claimed || !settle(t, slot, status)) return;
        held_lease *held = malloc(sizeof(held_lease));
        *held = (held_lease){shml_lease_begin(t->local_ring, slot), t->epoch, t->next_deliver, ring.slots[slot].nrows};
        check_rows(slot, held->epoch, held->seq, held->nrows, "delivery");
        if (use_threads) atomic_store_explicit(&mailbox, held, memory_order_release);
        else t->held[t->num_held++] = held;
        t->next_deliver++;
        t->num_ordered--;
        memmove(t->slot_of, t->slot_of + 1, sizeof(int) * (size_t)t->num_ordered);
        t->batches++;
        t->moved_s = now_s();
    }
}

static void recover(trainer *t, uint32_t w) {
    int poison = one_in(&t->rng, 10);
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        shml_place *place = &t->local_ring->places[slot];
        uint32_t own = poison ? SHML_POISON : place->reserved < 0 ? SHML_OPEN : (uint32_t)(SHML_RESERVED + place->reserved);
        if (place->state == SHML_DRAINING) own = SHML_VOID;
        if (PLANT == 6 && place->state == SHML_DRAINING) continue;
        if (shml_recover(&ring, slot, w, own) >= 0) {
            t->hits++;
            t->draining_hits += place->state == SHML_DRAINING;
        }
    }
    atomic_store(&ring.workers[w].now, 0);
}

static void reap(trainer *t, uint32_t w) {
    if (use_threads) {
        pthread_join(t->threads[w], NULL);
    } else {
        kill(t->pids[w], SIGKILL);
        if (waitpid(t->pids[w], NULL, 0) != t->pids[w]) abort();
    }
}

/* Returns whether a word names w at this moment. */
static int holds_claim(uint32_t w) {
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++)
        for (uint32_t c = 0; c < ring.slots[slot].nchunks; c++)
            if (SHML_OWN_OF(atomic_load_explicit(&ring.slots[slot].owner[c], memory_order_relaxed)) == w + 1) return 1;
    return 0;
}

static void replace(trainer *t, uint32_t w) {
    if (!use_threads && one_in(&t->rng, 2)) /* half of the kills wait for a claim, the others happen at any moment */
        for (int i = 0; i < 200 && !holds_claim(w); i++) sched_yield();
    if (!use_threads && one_in(&t->rng, 3)) bump(t);
    reap(t, w);
    t->kills++;
#if PLANT == 8
    start_worker(t, w);
    for (int i = 0; i < 20; i++) sched_yield();
    recover(t, w);
#else
    recover(t, w);
    start_worker(t, w);
#endif
}

static void order(trainer *t) {
    shml_local_ring_collect(t->local_ring);
    while (t->local_ring->num_free && t->num_ordered < NUM_SLOTS) {
        uint32_t slot = (uint32_t)t->local_ring->free_list[--t->local_ring->num_free];
        publish(t, slot, t->next_order++, 0, 1);
        t->slot_of[t->num_ordered++] = (int)slot;
    }
}

static int run(trainer *t, double seconds) {
    double end_s = now_s() + seconds;
    double stall_s = PLANT == 6 ? 1.0 : 10.0; /* plant 6 must stall; the others must show more than a stall */
    double next_kill_s = 0;
    int code = 0;
    t->moved_s = now_s();
    for (uint32_t w = 0; w < NUM_WORKERS; w++) start_worker(t, w);
    pthread_t user;
    if (use_threads && pthread_create(&user, NULL, user_thread, NULL)) abort();
    while (now_s() < end_s) {
        drain(t);
        order(t);
        grant(t);
        deliver(t);
        if (one_in(&t->rng, 200)) bump(t);
        if (use_threads) {
            for (uint32_t w = 0; w < NUM_WORKERS; w++)
                if (atomic_load_explicit(&tallied->exited[w], memory_order_relaxed)) replace(t, w);
            if (PLANT == 3 && one_in(&t->rng, 50)) recover(t, (uint32_t)(next_random(&t->rng) % NUM_WORKERS));
        } else {
            if (now_s() > next_kill_s) {
                replace(t, (uint32_t)(next_random(&t->rng) % NUM_WORKERS));
                next_kill_s = now_s() + 1e-6 * (double)(next_random(&t->rng) % 1500);
            }
            if (t->num_held && one_in(&t->rng, 2)) {
                uint64_t which = next_random(&t->rng) % (uint64_t)t->num_held;
                end_lease(t->held[which]);
                t->held[which] = t->held[--t->num_held];
            }
        }
        if (now_s() - t->moved_s > stall_s) {
            fprintf(stderr, "stall: no batch for %.0f s\n", stall_s);
            code = 4;
            break;
        }
        if (PLANT && atomic_load(&tallied->differences) + atomic_load(&tallied->lost)) break;
        sched_yield();
    }
    atomic_store(&tallied->closing, 1);
    for (uint32_t w = 0; w < NUM_WORKERS; w++) reap(t, w);
    if (use_threads) pthread_join(user, NULL);
    while (t->num_held) end_lease(t->held[--t->num_held]);
    shml_local_ring_drop(t->local_ring);
    return code;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    use_threads = dies_at_points = strcmp(argv[1], "threads") == 0;
    rng_seed = strtoull(argv[3], NULL, 10);
    uint64_t nbytes = shml_plan(NULL, NUM_SLOTS, NUM_WORKERS, MAX_ROWS * 8, 16, 64);
    shml_create(&ring, shared_memory(nbytes), NUM_SLOTS, NUM_WORKERS, MAX_ROWS * 8, 16, 64);
    ring.header->is_static = (uint32_t)atoi(argv[4]);
    tallied = shared_memory(sizeof(tally));
    map = malloc(sizeof(shml_map));
    map->base = shared_memory(NUM_SLOTS * SLOT_NBYTES);
    map->nbytes = NUM_SLOTS * SLOT_NBYTES;
    atomic_store(&map->refs, 1);
    trainer t = {.local_ring = shml_local_ring_new(NUM_SLOTS, NUM_SLOTS), .rng = start_rng(0)};
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        t.local_ring->places[slot].map = shml_map_keep(map);
        t.local_ring->places[slot].offset = (uint64_t)slot * SLOT_NBYTES;
        t.local_ring->places[slot].nbytes = SLOT_NBYTES;
    }
    int code = run(&t, atof(argv[2]));
    shml_map_drop(map);
    munmap(ring.header, nbytes);
    uint64_t differences = atomic_load(&tallied->differences), lost = atomic_load(&tallied->lost);
    uint64_t unordered = atomic_load(&tallied->unordered);
    printf("batches=%lu kills=%lu hits=%lu draining_hits=%lu bumps=%lu errors=%lu reopened=%lu repacks=%lu poisoned=%lu grown=%lu "
           "differences=%lu lost=%lu unordered=%lu\n",
           t.batches, t.kills, t.hits, t.draining_hits, t.bumps, t.errors, t.reopened, t.repacks, t.poisoned, t.grown, differences,
           lost, unordered);
    return code ? code : differences || lost || unordered ? 3 : 0;
}
