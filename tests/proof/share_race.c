/* Races the functions of src/share.h: a leader, its workers (race_worker.h) and two followers, all of them threads over one buffer, of
 * which every byte is compared. For ThreadSanitizer and AddressSanitizer, which see only the threads of one process.
 *
 *   share_race SECONDS SEED
 *
 * Leader and followers make the same calls as shmload/sharing, in the same order. A round has a number of batches that all ranks
 * know, and begins at one of a few steps, so that a position can recur while slots still have an older batch of it; the bytes of a batch
 * identify its round. Batches fail, are ordered again as packed ones, are ordered twice as after ^C, and workers die (race.c). A
 * rank keeps one batch at a time; another thread compares it again and drops it. As in race.c, waits only poll, because anything else
 * would hide races; but sometimes a follower sleeps, so that shml_sleep and shml_wake are raced, too.
 *
 * -DPLANT=n plants a known bug:
 *   1 a follower passes a batch before it holds it       4 a follower reads owner words without acquire
 *   2 the ticket is stored before the order              5 a follower releases its hold before the end of the lease
 *   3 a slot is reused although it is held               6 the start of a round is written after the round
 *   7 it is written into the words of the previous one   8 a batch that is ordered again gets a ticket
 * Exit status: 0 success, 3 bytes differ, 4 no progress for too long, 66 a report of a sanitizer.
 */
#define NUM_SLOTS 6
#include "race_worker.h"
#include "share.h"

#define NUM_FOLLOWERS 2
#define NUM_RANKS (1 + NUM_FOLLOWERS)
#define STALL_S (PLANT == 8 ? 2.0 : 10.0)

typedef struct { /* a batch that a rank keeps, until the user thread ends it */
    shml_lease *lease;
    int64_t round, step;
    uint32_t nrows;
} kept_batch;

typedef struct { /* a rank's position and its part of the ring */
    shml_share share;
    shml_local_ring *local_ring;
    uint32_t rank;
    uint64_t rng, round;
    int64_t count; /* batches taken of this round */
    _Atomic(kept_batch *) mailbox;
} member;

typedef struct {
    member *me;
    int64_t next_order; /* in this round: published, or in a slot of `slot_of` */
    int slot_of[64];    /* the slot of batch i of this round, or -1 if it must be ordered again */
    uint64_t order, num_ordered, lives;
    pthread_t workers[NUM_WORKERS];
    uint64_t failures, reopened, repacks, poisoned, grown, twice, kills;
} leader;

static member members[NUM_RANKS];
static _Atomic uint64_t num_taken, num_failed, num_sleeps;

/* All ranks know how many batches they take of a round, and at which step it begins. */
static int64_t goal_of(uint64_t round) { return 1 + (int64_t)(round * 37 % 23); }
static int64_t first_step_of(uint64_t round) { return (int64_t)(round % 3); }
static uint32_t nrows_of(int64_t step) { return 1 + (uint32_t)(step * 7 % MAX_ROWS); }
static int is_closing(void) { return (int)atomic_load_explicit(&tallied->closing, memory_order_relaxed); }
static void differs(const char *what) {
    if (atomic_fetch_add(&tallied->differences, 1) < 3) fprintf(stderr, "%s\n", what);
}

/* ---------------------------------------------------------------- any rank */

static void end_batch(kept_batch *kept) {
    check_rows(kept->lease->slot, kept->round, kept->step, kept->nrows, "end of lease");
    shml_lease_drop(kept->lease);
    free(kept);
}

/* Compares a leased batch and drops it, or passes it to the user thread if that has no batch of this rank. */
static void use_batch(member *me, uint32_t slot, int64_t step) {
    check_rows(slot, (int64_t)me->round, step, nrows_of(step), "delivery");
    kept_batch *kept = malloc(sizeof(kept_batch));
    *kept = (kept_batch){&me->local_ring->places[slot].lease, (int64_t)me->round, step, nrows_of(step)};
    kept_batch *none = NULL;
    if (me->local_ring->num_leased >= shml_share_lendable(&me->share) ||
        !atomic_compare_exchange_strong_explicit(&me->mailbox, &none, kept, memory_order_release, memory_order_relaxed))
        end_batch(kept);
}

static void *user_thread(void *arg) {
    (void)arg;
    uint64_t rng = start_rng(7);
    for (int idle = 0; !idle || !is_closing(); sched_yield()) {
        idle = 1;
        for (uint32_t rank = 0; rank < NUM_RANKS; rank++) {
            if (!is_closing() && !one_in(&rng, 4)) continue;
            kept_batch *kept = atomic_exchange_explicit(&members[rank].mailbox, NULL, memory_order_acquire);
            if (kept) end_batch(kept);
            idle &= kept == NULL;
        }
    }
    return NULL;
}

/* Ends a round, as sharing/rank_group.py does. In the meantime the leader continues with its ring. */
static void tell_round(member *me, int64_t count_before) {
#if PLANT == 6
    shml_share_report(&me->share, me->rank, SHML_REPORT_ROUND, me->round);
    sched_yield();
#endif
    uint32_t odd = PLANT == 7 ? 0 : SHML_REPORT_ODD * (me->round & 1);
    shml_share_report(&me->share, me->rank, SHML_REPORT_ENDED + odd, (uint64_t)count_before);
    shml_share_report(&me->share, me->rank, SHML_REPORT_STEP + odd, (uint64_t)first_step_of(me->round));
    shml_share_report(&me->share, me->rank, SHML_REPORT_COUNT, 0);
    shml_share_report(&me->share, me->rank, SHML_REPORT_ROUND, me->round);
    shml_wake(&ring);
}

static int are_all_here(const member *me) {
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++)
        if (shml_share_reported(&me->share, rank, SHML_REPORT_ROUND) < me->round) return 0;
    return 1;
}

static void compare_places(const member *me) {
    uint32_t odd = PLANT == 7 ? 0 : SHML_REPORT_ODD * (me->round & 1);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++)
        if (shml_share_reported(&me->share, rank, SHML_REPORT_STEP + odd) != (uint64_t)first_step_of(me->round) ||
            shml_share_reported(&me->share, rank, SHML_REPORT_ENDED + odd) != (uint64_t)goal_of(me->round - 1))
            differs("a rank's place is not that of its round");
}

static void took(member *me) {
    shml_share_report(&me->share, me->rank, SHML_REPORT_COUNT, (uint64_t)++me->count);
}

/* ---------------------------------------------------------------- a follower */

static void end_hold(void *context, uint32_t slot) {
    member *me = context;
    shml_share_let_go(&me->share, me->rank, slot);
}

/* Checks that the text of the batch names the first failing row of the order. */
static void check_failure(member *me, uint32_t slot, int64_t step) {
    uint64_t order;
    shml_status status = shml_share_inspect(&me->share, &ring, slot, &order);
    if (status.bad_own == SHML_POISON) return;
    const int64_t *text = (const int64_t *)shml_text_area(&ring, slot);
    if (atomic_load(&ring.slots[slot].text_nbytes) != 16 || text[1] != index_at((int64_t)me->round, step, (uint32_t)text[0]))
        differs("a follower's error text is not that of its batch");
}

/* Leases and passes a batch, as FollowerRing.lease does. Returns 0 if its previous lease has not ended yet. */
static int take(member *me, uint32_t slot) {
    shml_local_ring_collect(me->local_ring);
    if (me->local_ring->places[slot].state != SHML_FREE) return 0;
    shml_local_ring_pull_free(me->local_ring, slot);
#if PLANT == 1
    shml_share_skip(&me->share, me->rank, slot);
    sched_yield();
#endif
    shml_share_take(&me->share, me->rank, slot);
    shml_lease_begin(me->local_ring, slot);
#if PLANT == 5
    shml_share_let_go(&me->share, me->rank, slot);
#endif
    return 1;
}

static int look(member *me, uint32_t slot) {
#if PLANT == 4
    for (uint32_t chunk = 0; chunk < SHML_MAX_CHUNKS; chunk++) {
        uint64_t word = atomic_load_explicit(&ring.slots[slot].owner[chunk], memory_order_relaxed);
        if (chunk && SHML_ORDER_OF(word) == 0) return SHML_READY;
        if (SHML_OWN_OF(word) != SHML_DONE) break;
    }
#endif
    return shml_share_look(&me->share, &ring, slot);
}

static void sleep_a_little(member *me, int64_t step) {
    uint32_t seen;
    shml_begin_sleep(ring.header, &seen);
    int slot = shml_share_find(&me->share, me->rank, me->round, 0, step);
    if (slot < 0 || shml_share_look(&me->share, &ring, (uint32_t)slot) == SHML_FILLING) shml_sleep(ring.header, seen, 2e-4);
    shml_end_sleep(ring.header);
    atomic_fetch_add_explicit(&num_sleeps, 1, memory_order_relaxed);
}

static void follow(member *me) {
    int64_t step = first_step_of(me->round) + me->count;
    int slot = shml_share_find(&me->share, me->rank, me->round, 0, step);
    int found = slot < 0 ? SHML_FILLING : look(me, (uint32_t)slot);
    if (found == SHML_FILLING) {
        if (one_in(&me->rng, 64)) sleep_a_little(me, step);
        else sched_yield();
        return;
    }
    if (found == SHML_FAILED) {
        check_failure(me, (uint32_t)slot, step);
        shml_share_skip(&me->share, me->rank, (uint32_t)slot);
        atomic_fetch_add_explicit(&num_failed, 1, memory_order_relaxed);
    } else {
        shml_slot *record = &ring.slots[slot];
        if (record->payload_nbytes != SLOT_NBYTES || (record->form == SHML_FORM_PACKED) != (atomic_load(&record->used_nbytes) > 0))
            differs("a follower's payload is not that of its batch");
        if (!take(me, (uint32_t)slot)) return;
        use_batch(me, (uint32_t)slot, step);
        atomic_fetch_add_explicit(&num_taken, 1, memory_order_relaxed);
    }
    took(me);
}

static void *follower_thread(void *arg) {
    member *me = arg;
    while (!is_closing()) {
        if (me->count < goal_of(me->round)) {
            follow(me);
            continue;
        }
        int64_t count = me->count;
        me->count = 0;
        me->round++;
        tell_round(me, count);
        while (!are_all_here(me) && !is_closing()) sched_yield();
        if (!is_closing()) compare_places(me);
    }
    return NULL;
}

/* ---------------------------------------------------------------- the leader */

static void start_worker(leader *l, uint32_t w) {
    atomic_store_explicit(&tallied->exited[w], 0, memory_order_relaxed);
    if (pthread_create(&l->workers[w], NULL, worker_thread, (void *)(uintptr_t)(++l->lives * NUM_WORKERS + w))) abort();
}

static void replace(leader *l, uint32_t w) {
    pthread_join(l->workers[w], NULL);
    int poison = one_in(&l->me->rng, 10);
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        int is_draining = l->me->local_ring->places[slot].state == SHML_DRAINING;
        shml_recover(&ring, slot, w, is_draining ? SHML_VOID : poison ? SHML_POISON : SHML_OPEN);
    }
    l->kills++;
    start_worker(l, w);
}

/* Orders batch `i` of this round in a free slot, or again, as a packed one, in its own slot. */
static void publish(leader *l, uint32_t slot, int64_t i, int is_rewritten) {
    member *me = l->me;
    shml_slot *record = &ring.slots[slot];
    shml_place *place = &me->local_ring->places[slot];
    int64_t step = first_step_of(me->round) + i;
    int64_t *indices = (int64_t *)shml_order_area(&ring, slot);
    uint32_t nrows = nrows_of(step), nchunks = is_rewritten ? 1 : 1 + (uint32_t)(next_random(&me->rng) % 4);
    int is_new = !is_rewritten && (i == l->next_order || PLANT == 8);
#if PLANT == 2
    if (is_new) {
        atomic_store(&me->share.slots[slot].step, (uint64_t)step);
        atomic_store(&me->share.slots[slot].ticket, SHML_TICKET(me->round, l->num_ordered + 1));
        sched_yield();
    }
#endif
    for (uint32_t row = 0; row < nrows; row++) {
        indices[row] = index_at((int64_t)me->round, step, row);
        if (!is_rewritten && step % 5 == 4 && row % 3 == 1) indices[row] |= FAILS; /* a failing row fails in each order */
        if (!is_rewritten && step % 7 == 3 && row == nrows / 2) indices[row] |= RAGGED;
    }
    record->order_nbytes = nrows * 8;
    record->epoch = 0;
    record->step = step;
    record->nrows = nrows;
    record->nchunks = nchunks < nrows ? nchunks : nrows;
    record->form = is_rewritten ? SHML_FORM_PACKED : SHML_FORM_ROWS;
    record->payload_nbytes = is_rewritten ? 0 : SLOT_NBYTES;
    record->generation = atomic_load(&ring.header->generation);
    place->reserved = SHML_ANYONE;
    place->order = ++l->order;
    place->state = SHML_ORDERED;
    shml_share_rewrites(&me->share, slot);
    shml_publish(&ring, slot, l->order, SHML_ANYONE);
    shml_share_wrote(&me->share, &ring, slot, l->order, me->round, is_new ? ++l->num_ordered : 0);
    l->slot_of[i] = (int)slot;
}

static int is_passed(member *me, uint32_t slot) {
#if PLANT == 3
    for (uint32_t rank = 1; rank < NUM_RANKS; rank++) {
        uint64_t ticket = atomic_load(&me->share.slots[slot].ticket);
        if (ticket && shml_share_reported(&me->share, rank, SHML_REPORT_NEXT) <= ticket) return 0;
    }
    return 1;
#endif
    return shml_share_is_passed(&me->share, slot);
}

/* Publishes batches to be ordered again, and the next ones, while there are slots. */
static void order(leader *l) {
    shml_local_ring *local_ring = l->me->local_ring;
    shml_local_ring_collect(local_ring);
    for (uint32_t at = local_ring->num_free; at-- > 0;) {
        uint32_t slot = (uint32_t)local_ring->free_list[at];
        int64_t i = l->me->count;
        while (i < l->next_order && l->slot_of[i] >= 0) i++;
        if (i >= 64 || !is_passed(l->me, slot)) continue;
        shml_local_ring_pull_free(local_ring, slot);
        publish(l, slot, i, 0);
        if (i == l->next_order) l->next_order++;
    }
}

static void grant(leader *l) {
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        shml_slot *record = &ring.slots[slot];
        int32_t state = l->me->local_ring->places[slot].state;
        if ((state != SHML_ORDERED && state != SHML_DRAINING) || atomic_load(&record->need_nbytes) == 0) continue;
        record->payload_nbytes = SLOT_NBYTES;
        atomic_fetch_add(&record->payload_version, 1);
        atomic_store(&record->need_nbytes, 0);
        l->grown++;
    }
}

/* Settles a slot whose words are all final. Returns 1 if its batch can be leased, -1 if it has failed, 0 to wait again. */
static int settle(leader *l, uint32_t slot, shml_status status) {
    shml_slot *record = &ring.slots[slot];
    if (status.first_bad >= 0 && status.bad_own == SHML_POISON) {
        l->poisoned++;
        return -1;
    }
    if (status.num_void || atomic_load(&record->repack) == l->me->local_ring->places[slot].order) {
        publish(l, slot, l->me->count, 1);
        l->repacks++;
        return 0;
    }
    if (status.first_bad < 0) return 1;
    if (atomic_load(&record->err) == SHML_WORD(l->me->local_ring->places[slot].order, status.first_bad + 1)) {
        l->failures++;
        return -1;
    }
    shml_reopen(&ring, slot, (uint32_t)status.first_bad, SHML_ANYONE);
    l->reopened++;
    return 0;
}

static void deliver(leader *l) {
    member *me = l->me;
    int slot = me->count < l->next_order ? l->slot_of[me->count] : -1;
    if (slot < 0) return;
    shml_status status = shml_inspect(&ring, (uint32_t)slot);
    if (status.num_open || status.num_claimed) return;
    int found = settle(l, (uint32_t)slot, status);
    if (found < 0) {
        shml_local_ring_push_free(me->local_ring, (uint32_t)slot);
        took(me);
    } else if (found > 0) {
        shml_lease_begin(me->local_ring, (uint32_t)slot);
        use_batch(me, (uint32_t)slot, first_step_of(me->round) + me->count);
        if (one_in(&me->rng, 20)) { /* ^C before it was counted: it is ordered again, after the earlier orders */
            l->slot_of[me->count] = -1;
            l->twice++;
        } else {
            took(me);
        }
    }
}

static void drain(leader *l) {
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        if (l->me->local_ring->places[slot].state != SHML_DRAINING) continue;
        shml_status status = shml_inspect(&ring, slot);
        if (!status.num_open && !status.num_claimed) shml_local_ring_push_free(l->me->local_ring, slot);
    }
}

static void abandon(leader *l) {
    atomic_fetch_add(&ring.header->generation, 1);
    for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
        if (l->me->local_ring->places[slot].state != SHML_ORDERED) continue;
        shml_void(&ring, slot);
        l->me->local_ring->places[slot].state = SHML_DRAINING;
    }
    l->me->round++;
    l->next_order = l->me->count = 0;
}

static int lead(leader *l, double seconds) {
    member *me = l->me;
    double end_s = now_s() + seconds, moved_s = now_s();
    uint64_t moved = 0;
    int is_beginning = 0;
    for (uint32_t w = 0; w < NUM_WORKERS; w++) start_worker(l, w);
    for (; now_s() < end_s; sched_yield()) {
        drain(l);
        if (!is_beginning && me->count == goal_of(me->round)) {
            abandon(l);
            is_beginning = 1;
            if (one_in(&me->rng, 2)) order(l); /* before its report or after */
            tell_round(me, goal_of(me->round - 1));
        }
        order(l);
        grant(l);
        for (uint32_t w = 0; w < NUM_WORKERS; w++)
            if (atomic_load_explicit(&tallied->exited[w], memory_order_relaxed)) replace(l, w);
        if (is_beginning && are_all_here(me)) {
            compare_places(me);
            is_beginning = 0;
        }
        if (!is_beginning) deliver(l);
        uint64_t now = atomic_load_explicit(&num_taken, memory_order_relaxed) + atomic_load_explicit(&num_failed, memory_order_relaxed);
        if (now != moved) moved_s = now_s();
        moved = now;
        if (now_s() - moved_s > STALL_S) {
            fprintf(stderr, "stall: no batch for %.0f s\n", STALL_S);
            return 4;
        }
        if (PLANT && atomic_load_explicit(&tallied->differences, memory_order_relaxed)) break;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    rng_seed = strtoull(argv[2], NULL, 10);
    dies_at_points = 1;
    shml_create(&ring, shared_memory(shml_plan(NULL, NUM_SLOTS, NUM_WORKERS, MAX_ROWS * 8, 16, 64)), NUM_SLOTS, NUM_WORKERS,
                MAX_ROWS * 8, 16, 64);
    tallied = shared_memory(sizeof(tally));
    map = malloc(sizeof(shml_map));
    *map = (shml_map){shared_memory(NUM_SLOTS * SLOT_NBYTES), NUM_SLOTS * SLOT_NBYTES, 1};
    void *words = shared_memory(shml_share_nbytes(NUM_RANKS, NUM_SLOTS));
    shml_share_create(&members[0].share, words, NUM_RANKS, NUM_SLOTS);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++) {
        member *me = &members[rank];
        me->rank = rank;
        me->rng = start_rng(rank);
        me->round = 1;
        me->share.header = words;
        shml_share_view(&me->share, words);
        me->local_ring = shml_local_ring_new(NUM_SLOTS, NUM_SLOTS);
        for (uint32_t slot = 0; slot < NUM_SLOTS; slot++) {
            me->local_ring->places[slot].map = shml_map_keep(map);
            me->local_ring->places[slot].offset = (uint64_t)slot * SLOT_NBYTES;
            me->local_ring->places[slot].nbytes = SLOT_NBYTES;
        }
        if (rank) {
            me->local_ring->ended = end_hold;
            me->local_ring->context = me;
        }
        shml_share_report(&me->share, rank, SHML_REPORT_ROUND, 1);
    }
    pthread_t followers[NUM_FOLLOWERS], user;
    for (int f = 0; f < NUM_FOLLOWERS; f++)
        if (pthread_create(&followers[f], NULL, follower_thread, &members[1 + f])) abort();
    if (pthread_create(&user, NULL, user_thread, NULL)) abort();
    leader l = {.me = &members[0]};
    int code = lead(&l, atof(argv[1]));
    atomic_store(&tallied->closing, 1);
    for (uint32_t w = 0; w < NUM_WORKERS; w++) pthread_join(l.workers[w], NULL);
    for (int f = 0; f < NUM_FOLLOWERS; f++) pthread_join(followers[f], NULL);
    pthread_join(user, NULL);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++) {
        kept_batch *kept = atomic_load(&members[rank].mailbox);
        if (kept) end_batch(kept);
        shml_local_ring_close(members[rank].local_ring);
        shml_local_ring_drop(members[rank].local_ring);
    }
    shml_map_drop(map);
    uint64_t differences = atomic_load(&tallied->differences), lost = atomic_load(&tallied->lost);
    uint64_t unordered = atomic_load(&tallied->unordered);
    printf("taken=%lu failed=%lu rounds=%lu failures=%lu reopened=%lu repacks=%lu poisoned=%lu grown=%lu twice=%lu kills=%lu "
           "sleeps=%lu differences=%lu lost=%lu unordered=%lu\n",
           atomic_load(&num_taken), atomic_load(&num_failed), members[0].round, l.failures, l.reopened, l.repacks, l.poisoned,
           l.grown, l.twice, l.kills, atomic_load(&num_sleeps), differences, lost, unordered);
    return code ? code : differences || lost || unordered ? 3 : 0;
}
