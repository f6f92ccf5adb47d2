/* An explicit-state model of the slot protocol at the level of single shared accesses; every interleaving is explored.
 *
 * model.py treats each action of the trainer as one step and leaves out static mode, errors and repacking. Here the trainer's steps
 * are single shared accesses, too, chunks have several rows, and everything is included: static mode, poison, early stop, errors with
 * re-opening, repacking, semaphores with timed and untimed waits. Any step of a worker may be its last (kill), a death is seen
 * arbitrarily late, leases are held forever or end in any order, and a bump may come between any two actions of the trainer.
 *
 * `check` has the invariants, which are tested in every state. A state in which only the environment can move must be complete, and
 * the graph must have no cycle: then the ring terminates under any scheduler, fair or not.
 *
 * Some steps are larger than one access: writing an order's fields; "are all words final?" (sound, because words only move towards
 * final); a worker's check before it sleeps; error text. In free mode a scan yields any word that is open now, which includes every
 * real scan; in static mode it reads word after word. Memory is sequentially consistent; race.c tests memory ordering.
 *
 * bells=0: workers and trainer look whenever there is something to see, so every post may be lost and waits are timed.
 * bells=1: semaphores are modeled; with timed=0 waits have no timeout, and one missing post is a deadlock.
 *
 *   cc -O2 accesses.c -o accesses && ./accesses W=2 S=2 C=2 B=3 kills=1 bumps=1
 *   ./accesses W=2 S=2 C=1 B=2 bumps=1 bug=free_at_bump trace=1                     a planted bug, with the steps that lead to it
 *
 * `options` below has the names and defaults of all parameters. The last line of output is "<verdict> states=<n> depth=<n>", with
 * a verdict of holds, violation, stuck or cycle; the exit status is 0, 3, 4 or 5.
 *
 * Runs by hand, in addition to test_accesses.py (one core, about a million states and 80 MB per second; each holds and terminates):
 *
 *   W S C R B  kills bumps  with                             states
 *   2 2 2 2 3  1     1                                        3,806,958
 *   2 2 2 2 3  2     1                                       12,187,543
 *   2 2 2 2 2  1     2                                        7,448,724
 *   2 3 2 1 2  1     1                                        3,262,934
 *   3 2 2 1 2  1     1                                        8,585,123
 *   2 3 1 2 4  2     1      static                            6,192,415
 *   2 2 2 2 2  2     1      poison                           27,469,128
 *   2 2 2 1 2  1     1      fail=1 odd=2 poison early         3,867,934
 *   2 2 2 2 2  1     1      fail=1 odd=2                      2,272,267
 *   2 2 1 1 2  1     1      static, bells, untimed            2,327,762
 *   2 1 2 1 2  1     1      bells, timed, one post lost       3,001,589
 *   2 2 1 1 3  1     1      static, bells, untimed            9,136,864
 *   2 2 1 2 2  1     1      bells, timed, two posts lost      7,221,509
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_W = 3, MAX_S = 3, MAX_C = 2, MAX_R = 2, MAX_ORDER = 15 };

static struct options {
    long W, S, C, R, B;      /* workers, slots, chunks per batch, rows per chunk, batches per generation */
    long kills, bumps, lost; /* how often the environment may kill a worker, abandon the epoch, lose a post */
    long bells, timed;       /* semaphores are modeled; waits have a timeout */
    long is_static;          /* one chunk per batch, batch i for worker i mod W */
    long poison;             /* two deaths over one row give up its chunk */
    long early;              /* workers compare generations between rows */
    long fail, odd;          /* bit masks over the chunks of batch 0: those that fail; those with a sample without fixed rows */
    long trace;
} o = {.W = 2, .S = 2, .C = 2, .R = 2, .B = 3, .timed = 1};

#define BUGS(X) \
    X(none) \
    X(worker_moves_state)        /* filling -> ready by a worker, in a state word without the order */ \
    X(ticket_then_claim)         /* chunks are assigned by an atomic ticket, and the claim is recorded afterwards */ \
    X(remaining_counter)         /* "all done" is a counter, decremented after DONE */ \
    X(words_without_order)       /* owner words do not carry the order, indices are read before the claim */ \
    X(free_at_bump)              /* a bump frees slots, claims or not */ \
    X(void_by_store)             /* a bump stores VOID instead of exchanging it */ \
    X(recover_live)              /* a stopped worker is treated as dead */ \
    X(respawn_first)             /* the replacement starts before the claim is taken back */ \
    X(recover_skips_draining)    /* recovery visits only ordered slots */ \
    X(recover_keeps_err)         /* recovery leaves the dead worker's mark on the text area */ \
    X(words_before_fields)       /* owner words are published before indices */ \
    X(no_copy_out)               /* the last slot is leased like any other */ \
    X(bell_only_when_all_done)   /* a void word keeps the last finisher from posting */ \
    X(error_first_come)          /* the chunk that failed first is reported */ \
    X(void_counts_as_done)       /* a chunk without fixed rows counts as filled */ \
    X(repack_by_mark_only)       /* `repack` alone decides, though recovery of another chunk may have cleared it */ \
    X(blame_by_order)            /* `now` is believed if its order fits, whatever chunk it is of */ \
    X(static_ignores_last_order) /* a static scan takes words that are not announced yet */ \
    X(static_shared_bell)        /* static workers wait on one semaphore */ \
    X(look_then_empty)           /* the trainer clears its bell after its last look */ \
    X(awaits_after_look)         /* the trainer announces its slot after its last look at it */ \
    X(awaits_nothing_if_unpublished) /* without a slot it sleeps for none instead of any */ \
    X(sleep_on_next_only)        /* after clearing the bell, the trainer looks only at the next batch */ \
    X(deaths_ring_nothing)       /* a death does not wake the trainer */
#define NAME(x) BUG_##x,
enum bug { BUGS(NAME) NUM_BUGS };
#undef NAME
#define NAME(x) #x,
static const char *const bug_names[] = {BUGS(NAME)};
static enum bug bug;
#define PLANTED(x) (bug == BUG_##x)

/* ---------------------------------------------------------------- one state, 64 bytes */

enum { FREE, ORDERED, LEASED, DRAINING };
enum { OPEN = 0, CLAIMED = 1 /* + w */, RESERVED = 4 /* + w */, POISON = 12, ERROR, VOID, DONE };
#define WORD(order, own) ((uint8_t)((order) << 4 | (own)))
#define ORDER_OF(word) ((unsigned)(word) >> 4)
#define OWN_OF(word) ((unsigned)(word) & 15)

typedef struct {
    uint32_t state : 2, batch : 3, order : 4;  /* private to the trainer */
    uint32_t blamed : 3;                       /* private: row + 1 of the last death, or 0 */
    uint32_t fields : 4, gen : 2, packed : 1;  /* shared: the order that the plain fields describe */
    uint32_t err : 2, text : 2, repack : 4;    /* shared: chunk + 1 that owns the text; chunk + 1 of the text; order */
    uint32_t ready : 1, ticket : 2, left : 2;  /* planted bugs only */
    uint8_t word[MAX_C];
    uint8_t row[MAX_C];                        /* a nibble per row: the order it was filled for, or 0 */
} slot_t;

enum { W_LOOK, W_WAIT, W_SCAN, W_PREREAD, W_CAS, /* claimed: */ W_FIELDS, W_CHECK, W_NOW, W_ROW, W_ERR, W_TEXT, W_REPACK, W_FINISH,
       /* not claimed any more: */ W_LEFT, W_READY, W_FINAL, W_AWAITED, W_POST, W_DEAD };

typedef struct {
    uint64_t pc : 5, slot : 2, chunk : 2, order : 4; /* the claim, or the result of a scan */
    uint64_t fields : 4, gen : 2, packed : 1;        /* as read from the order */
    uint64_t row : 3, own : 4;                       /* own: the value with which it will finish */
    uint64_t at : 3, newest : 4;                     /* static scan */
    uint64_t now_order : 4, now_row : 3;             /* shared: worker record */
} worker_t;

enum { T_TOP, T_WORD, T_LAST, T_FIELDS, T_RING, T_POST, T_VOID, T_VOID_CAS, T_REC, T_REC_CAS, T_RESPAWN, T_REOPEN, T_AWAIT, T_EMPTY, T_LOOK,
       T_ASLEEP };
enum { NOTHING_AWAITED, ANY_AWAITED = 7 /* slot + 1 between */ };

typedef struct {
    uint64_t pc : 4, slot : 2, chunk : 2, w : 2, tmp : 2, own : 4, want : 2; /* where the trainer is */
    uint64_t next : 3, published : 3, orders : 4;                           /* batches delivered and published; orders ever */
    uint64_t last_order : 4, gen : 2, ready : 2;                            /* shared: header, the trainer's bell */
    uint64_t kills : 2, bumps : 2, lost : 2;                                /* left to the environment */
    uint64_t bell0 : 2, bell1 : 2, bell2 : 2;                               /* shared: workers' bells; bell0 is common to all */
    uint64_t awaited : 3;                                                   /* shared: header, the slot that the trainer sleeps for */
    uint64_t pad;
} trainer_t;

typedef struct {
    slot_t slot[MAX_S];
    worker_t worker[MAX_W];
    trainer_t t;
} state_t;
_Static_assert(sizeof(state_t) == 64, "a state is one cache line");

static const char *failed; /* the violated invariant */
static void require(int holds, const char *what) {
    if (!holds && !failed) failed = what;
}

static int is_final(unsigned word) { return OWN_OF(word) >= POISON; }
static int is_open(unsigned word) { return OWN_OF(word) == OPEN || (OWN_OF(word) >= RESERVED && OWN_OF(word) < POISON); }
static int num_chunks(const slot_t *s) { return s->packed ? 1 : (int)o.C; }

static int all_final(const slot_t *s) {
    for (int c = 0; c < num_chunks(s); c++)
        if (!is_final(s->word[c])) return 0;
    return 1;
}

static int all_done(const slot_t *s) {
    for (int c = 0; c < num_chunks(s); c++)
        if (OWN_OF(s->word[c]) != DONE) return 0;
    return 1;
}

static unsigned row_of(const slot_t *s, int row) { return s->row[row / o.R] >> (row % o.R * 4) & 15; }
static void set_row(slot_t *s, int row, unsigned order) {
    int shift = (int)(row % o.R * 4);
    s->row[row / o.R] = (uint8_t)((s->row[row / o.R] & ~(15 << shift)) | order << shift);
}

static void clear_slot(slot_t *s) { /* the content of a free slot is never read again, so all free slots are one state */
    memset(s, 0, sizeof *s);
    for (int c = 0; c < MAX_C; c++) s->word[c] = WORD(0, VOID);
}

static void free_slot(slot_t *s) {
    require(all_final(s), "a slot with an open or a claimed word is freed");
    clear_slot(s);
}

static unsigned open_own(const slot_t *s) { return o.is_static ? RESERVED + s->batch % o.W : OPEN; }

static int is_open_to(const state_t *x, int w, int slot, int chunk) {
    unsigned word = x->slot[slot].word[chunk];
    if (o.is_static && ORDER_OF(word) > x->t.last_order && !PLANTED(static_ignores_last_order)) return 0;
    return OWN_OF(word) == OPEN || OWN_OF(word) == RESERVED + (unsigned)w;
}

static int sees_work(const state_t *x, int w) {
    for (int s = 0; s < o.S; s++)
        for (int c = 0; c < o.C; c++)
            if (is_open_to(x, w, s, c)) return 1;
    return 0;
}

static unsigned bell_of(const trainer_t *t, int w) { return w == 0 ? t->bell0 : w == 1 ? t->bell1 : t->bell2; }
static void set_bell(trainer_t *t, int w, unsigned n) {
    if (n > 3) n = 3;
    if (w == 0) t->bell0 = n & 3;
    else if (w == 1) t->bell1 = n & 3;
    else t->bell2 = n & 3;
}
static int bell_number(int w) { return o.is_static && !PLANTED(static_shared_bell) ? w : 0; }

/* ---------------------------------------------------------------- successors */

typedef struct {
    state_t state;
    const char *what;
    int who; /* worker, slot, or -1 */
} step_t;

static step_t steps[64];
static int num_steps, num_own; /* all steps; those of the trainer or workers */

static state_t *step(const state_t *x, const char *what, int who) {
    step_t *n = &steps[num_steps++];
    n->state = *x;
    n->what = what;
    n->who = who;
    return &n->state;
}

/* ---------------------------------------------------------------- worker */

static void begin_row(worker_t *me) { me->pc = o.poison ? W_NOW : W_ROW; }

static int fails_here(const slot_t *s, const worker_t *me) {
    if (s->batch != 0 || !o.fail) return 0;
    long at = me->packed ? me->row : me->chunk * o.R + me->row;
    return at % o.R == o.R - 1 && (o.fail >> (at / o.R) & 1);
}

static void require_claim(const slot_t *s, const worker_t *me, int w) {
    unsigned word = s->word[me->chunk];
    require(OWN_OF(word) == CLAIMED + (unsigned)w && (ORDER_OF(word) == me->order || PLANTED(words_without_order)),
            "a worker goes on with a chunk whose word does not name it");
    require(s->state == ORDERED || s->state == DRAINING, "a worker writes into a slot that is free or leased");
}

static void worker_steps(const state_t *x, int w) {
    const worker_t *me = &x->worker[w];
    const slot_t *s = &x->slot[me->slot];
    state_t *n;
    switch (me->pc) {
    case W_LOOK:
        if (o.is_static) {
            if (!o.bells && !sees_work(x, w)) break;
            n = step(x, "begins a scan", w);
            n->worker[w].pc = W_SCAN;
            n->worker[w].at = 0;
            n->worker[w].order = 0;
            n->worker[w].newest = PLANTED(static_ignores_last_order) ? MAX_ORDER : x->t.last_order;
            break;
        }
        if (PLANTED(ticket_then_claim)) {
            for (int i = 0; i < o.S; i++)
                if (x->slot[i].state == ORDERED && x->slot[i].ticket < num_chunks(&x->slot[i]) &&
                    ORDER_OF(x->slot[i].word[x->slot[i].ticket]) == x->slot[i].order) {
                    n = step(x, "takes a ticket", w);
                    n->worker[w].slot = i & 3;
                    n->worker[w].chunk = n->slot[i].ticket++;
                    n->worker[w].order = x->slot[i].order;
                    n->worker[w].pc = W_CAS;
                }
            break;
        }
        for (int i = 0; i < o.S; i++)
            for (int c = 0; c < o.C; c++)
                if (is_open_to(x, w, i, c)) {
                    n = step(x, "picks an open word", w);
                    n->worker[w].slot = i & 3;
                    n->worker[w].chunk = c & 3;
                    n->worker[w].order = ORDER_OF(x->slot[i].word[c]) & 15;
                    n->worker[w].pc = PLANTED(words_without_order) ? W_PREREAD : W_CAS;
                }
        if (o.bells && !sees_work(x, w)) step(x, "sees nothing", w)->worker[w].pc = W_WAIT;
        break;
    case W_WAIT:
        if (bell_of(&x->t, bell_number(w))) {
            n = step(x, "is woken", w);
            set_bell(&n->t, bell_number(w), bell_of(&x->t, bell_number(w)) - 1);
            n->worker[w].pc = W_LOOK;
        } else if (o.timed && sees_work(x, w)) {
            step(x, "wakes by itself", w)->worker[w].pc = W_LOOK;
        }
        break;
    case W_SCAN: {
        n = step(x, "scans a word", w);
        worker_t *after = &n->worker[w];
        unsigned word = x->slot[me->at].word[0], order = ORDER_OF(word);
        if (OWN_OF(word) == RESERVED + (unsigned)w && order <= me->newest && (me->order == 0 || order < me->order)) {
            after->order = order & 15;
            after->slot = me->at & 3;
            after->chunk = 0;
        }
        if (++after->at < o.S) break;
        after->pc = after->order ? W_CAS : o.bells ? W_WAIT : W_LOOK;
        after->at = after->newest = 0;
        break;
    }
    case W_PREREAD:
        n = step(x, "reads fields before it claims", w);
        n->worker[w].fields = s->fields;
        n->worker[w].packed = s->packed;
        n->worker[w].gen = s->gen;
        n->worker[w].pc = W_CAS;
        break;
    case W_CAS: {
        unsigned word = s->word[me->chunk];
        n = step(x, "claims", w);
        worker_t *after = &n->worker[w];
        int fits = is_open(word) && (PLANTED(words_without_order) || ORDER_OF(word) == me->order);
        if (!fits) {
            after->pc = W_LOOK;
            break;
        }
        n->slot[me->slot].word[me->chunk] = WORD(ORDER_OF(word), CLAIMED + w);
        for (int i = 0; i < o.S && o.is_static; i++)
            require(!(OWN_OF(x->slot[i].word[0]) == RESERVED + (unsigned)w && ORDER_OF(x->slot[i].word[0]) < me->order),
                    "a static worker takes a later order first");
        after->row = 0;
        if (PLANTED(words_without_order)) begin_row(after);
        else after->pc = W_FIELDS;
        break;
    }
    case W_FIELDS:
        n = step(x, "reads its order", w);
        require_claim(s, me, w);
        n->worker[w].fields = s->fields;
        n->worker[w].packed = s->packed;
        n->worker[w].gen = s->gen;
        begin_row(&n->worker[w]);
        if (!s->packed && s->batch == 0 && (o.odd >> me->chunk & 1)) n->worker[w].pc = W_REPACK;
        break;
    case W_CHECK:
        n = step(x, "compares generations", w);
        if (x->t.gen != me->gen) {
            n->worker[w].own = VOID;
            n->worker[w].pc = W_FINISH;
        } else {
            begin_row(&n->worker[w]);
        }
        break;
    case W_NOW:
        n = step(x, "says which row", w);
        n->worker[w].now_order = me->order;
        n->worker[w].now_row = (me->packed ? me->row : me->chunk * o.R + me->row) & 7;
        n->worker[w].pc = W_ROW;
        break;
    case W_ROW:
        require_claim(s, me, w);
        if (fails_here(s, me)) {
            n = step(x, "fails", w);
            n->worker[w].own = ERROR;
            n->worker[w].pc = W_ERR;
            break;
        }
        n = step(x, "fills a row", w);
        set_row(&n->slot[me->slot], (int)(me->packed ? me->row : me->chunk * o.R + me->row), me->fields);
        n->worker[w].row = (me->row + 1) & 7;
        if (me->row + 1 == (me->packed ? o.C * o.R : o.R)) {
            n->worker[w].own = DONE;
            n->worker[w].pc = W_FINISH;
        } else if (o.early) {
            n->worker[w].pc = W_CHECK;
        } else {
            begin_row(&n->worker[w]);
        }
        break;
    case W_ERR:
        n = step(x, "reaches for the text area", w);
        n->worker[w].pc = W_FINISH;
        if (s->err == 0) {
            n->slot[me->slot].err = (me->chunk + 1) & 3;
            n->worker[w].pc = W_TEXT;
        }
        break;
    case W_TEXT:
        n = step(x, "writes its error", w);
        require_claim(s, me, w);
        n->slot[me->slot].text = (me->chunk + 1) & 3;
        n->worker[w].pc = W_FINISH;
        break;
    case W_REPACK:
        n = step(x, "asks for one packed chunk", w);
        n->slot[me->slot].repack = me->order;
        n->worker[w].own = VOID;
        n->worker[w].pc = W_FINISH;
        break;
    case W_FINISH:
        n = step(x, "finishes", w);
        require_claim(s, me, w);
        n->slot[me->slot].word[me->chunk] = WORD(ORDER_OF(s->word[me->chunk]), me->own);
        n->worker[w].pc = PLANTED(remaining_counter) ? W_LEFT : o.bells || PLANTED(worker_moves_state) ? W_FINAL : W_LOOK;
        break;
    case W_LEFT:
        n = step(x, "counts down", w);
        if (s->order == me->order && s->left) n->slot[me->slot].left--;
        n->worker[w].pc = o.bells ? W_FINAL : W_LOOK;
        break;
    case W_FINAL: {
        int rings = PLANTED(bell_only_when_all_done) ? all_done(s) : all_final(s);
        n = step(x, "looks whether all is final", w);
        n->worker[w].pc = !rings ? W_LOOK : PLANTED(worker_moves_state) ? W_READY : W_AWAITED;
        break;
    }
    case W_AWAITED:
        n = step(x, "looks whether the slot is slept for", w);
        n->worker[w].pc = x->t.awaited == ANY_AWAITED || x->t.awaited == me->slot + 1u ? W_POST : W_LOOK;
        break;
    case W_READY:
        n = step(x, "moves the state to ready", w);
        if (s->state == ORDERED) n->slot[me->slot].ready = 1;
        n->worker[w].pc = o.bells ? W_POST : W_LOOK;
        break;
    case W_POST:
        n = step(x, "rings", w);
        if (x->t.ready < 3) n->t.ready++;
        n->worker[w].pc = W_LOOK;
        break;
    default:
        break;
    }
}

/* Forgets what a worker no longer needs, so that states that differ only in that are one. */
static void tidy(state_t *x) {
    for (int w = 0; w < o.W; w++) {
        worker_t *me = &x->worker[w];
        unsigned pc = me->pc;
        int is_alive = 0; /* `now` has a meaning only while its order is in a slot */
        for (int i = 0; i < o.S; i++) is_alive |= x->slot[i].state == ORDERED && x->slot[i].order == me->now_order;
        if (!is_alive) me->now_order = me->now_row = 0;
        if (pc >= W_FINAL || pc <= W_WAIT) {
            worker_t kept = {.pc = pc, .now_order = me->now_order, .now_row = me->now_row};
            if (pc == W_FINAL || pc == W_READY || pc == W_AWAITED) kept.slot = me->slot;
            *me = kept;
        } else if (pc == W_CAS && !PLANTED(words_without_order)) {
            me->fields = me->gen = me->packed = me->row = me->own = 0;
        }
    }
}

/* ---------------------------------------------------------------- trainer */

static int may_act(const state_t *x, int only_next) {
    const trainer_t *t = &x->t;
    for (int i = 0; i < o.S; i++) {
        const slot_t *s = &x->slot[i];
        if (s->state == ORDERED && s->batch == t->next && all_final(s)) return 1;
        if (only_next) continue;
        if (s->state == DRAINING && all_final(s)) return 1;
        if (s->state == FREE && t->published < o.B) return 1;
    }
    for (int w = 0; w < o.W; w++)
        if (x->worker[w].pc == W_DEAD && (!PLANTED(deaths_ring_nothing) || t->pc != T_ASLEEP)) return 1;
    return 0;
}

static int is_complete(const state_t *x) {
    if (x->t.next < o.B) return 0;
    for (int i = 0; i < o.S; i++)
        if (x->slot[i].state == DRAINING) return 0;
    for (int w = 0; w < o.W; w++)
        if (x->worker[w].pc == W_DEAD) return 0;
    return 1;
}

static void begin_publish(state_t *n, int i, unsigned batch, int packed) {
    slot_t *s = &n->slot[i];
    require(n->t.orders < MAX_ORDER, "the model has no more order numbers: make it smaller");
    unsigned blamed = s->state == ORDERED ? s->blamed : 0, order = (n->t.orders + 1) & 15;
    unsigned before = s->fields, gen_before = s->gen, packed_before = s->packed;
    require(all_final(s), "a slot with an open or a claimed word is published");
    s->state = ORDERED;
    s->batch = batch & 7;
    s->order = order & 15;
    s->blamed = blamed & 7;
    s->fields = order & 15;
    s->gen = n->t.gen;
    s->packed = packed & 1;
    s->err = s->text = s->repack = 0;
    s->ready = s->ticket = 0;
    s->left = num_chunks(s) & 3;
    memset(s->row, 0, sizeof s->row);
    n->t.orders = order & 15;
    n->t.slot = i & 3;
    n->t.chunk = 0;
    n->t.w = batch % o.W & 3;
    n->t.want = (o.is_static ? 1 : o.W < num_chunks(s) ? o.W : num_chunks(s)) & 3;
    n->t.pc = T_WORD;
    if (PLANTED(words_before_fields)) {
        s->fields = before & 15;
        s->gen = gen_before & 3;
        s->packed = packed_before & 1;
    }
}

/* Settles the next batch, whose words are all final: it is delivered, reported, repacked, or opened again. */
static void settle(const state_t *x, int i) {
    const slot_t *s = &x->slot[i];
    int bad = -1, num_void = 0, num_leased = 0;
    for (int c = num_chunks(s) - 1; c >= 0; c--) {
        unsigned own = OWN_OF(s->word[c]);
        if (own == ERROR || own == POISON) bad = c;
        num_void += own == VOID;
    }
    for (int j = 0; j < o.S; j++) num_leased += x->slot[j].state == LEASED;
    int must_repack = s->repack == s->order || (num_void && !PLANTED(repack_by_mark_only));
    if (PLANTED(void_counts_as_done)) must_repack = num_void = 0;
    if (bad >= 0 && OWN_OF(s->word[bad]) == POISON) {
        state_t *n = step(x, "reports a deadly row", i);
        require(o.poison, "poison without deaths");
        n->t.next++;
        free_slot(&n->slot[i]);
        return;
    }
    if (must_repack) {
        require(!s->packed, "a packed batch is repacked");
        begin_publish(step(x, "publishes the batch as one packed chunk", i), i, s->batch, 1);
        return;
    }
    if (bad >= 0) {
        if (PLANTED(error_first_come) && s->err) bad = s->err - 1;
        if (s->err != (unsigned)bad + 1) {
            state_t *n = step(x, "opens a failed chunk again", i);
            n->slot[i].err = n->slot[i].text = 0;
            n->t.slot = i & 3;
            n->t.chunk = bad & 3;
            n->t.pc = T_REOPEN;
            return;
        }
        require(s->text == (unsigned)bad + 1, "the error reported has another chunk's text, or none");
        require(s->packed || bad == __builtin_ctzl((unsigned long)o.fail), "the error reported is not the lowest");
        state_t *n = step(x, "reports an error", i);
        n->t.next++;
        free_slot(&n->slot[i]);
        return;
    }
    if (num_void) return; /* repack_by_mark_only: nothing decides what to do */
    for (int row = 0; row < o.C * o.R; row++)
        require(row_of(s, row) == s->order, "a batch is delivered with a row that was not filled for it");
    state_t *n = step(x, "delivers", i);
    n->t.next++;
    if (num_leased >= o.S - 1 && !PLANTED(no_copy_out)) free_slot(&n->slot[i]);
    else n->slot[i].state = LEASED;
}

static void trainer_verbs(const state_t *x) {
    const trainer_t *t = &x->t;
    for (int i = 0; i < o.S; i++) {
        const slot_t *s = &x->slot[i];
        if (s->state == DRAINING && all_final(s)) free_slot(&step(x, "drains", i)->slot[i]);
        if (s->state != ORDERED || s->batch != t->next) continue;
        if (PLANTED(worker_moves_state) ? s->ready : PLANTED(remaining_counter) ? s->left == 0 : all_final(s)) settle(x, i);
    }
    for (int i = 0; i < o.S; i++)
        if (x->slot[i].state == FREE && t->published < o.B) {
            state_t *n = step(x, "publishes", i);
            n->t.published++;
            begin_publish(n, i, t->published, 0);
            break;
        }
    for (int w = 0; w < o.W; w++) {
        int is_dead = x->worker[w].pc == W_DEAD;
        int is_mistaken = PLANTED(recover_live) && t->kills && x->worker[w].pc >= W_FIELDS && x->worker[w].pc <= W_FINISH;
        if (!is_dead && !is_mistaken) continue;
        state_t *n = step(x, is_dead ? "sees a death" : "takes a stopped worker for dead", w);
        n->t.pc = T_REC;
        n->t.w = w & 3;
        n->t.slot = 0;
        if (is_mistaken) n->t.kills--;
        if (PLANTED(respawn_first)) n->worker[w] = (worker_t){.pc = W_LOOK};
    }
}

static void to_bells(trainer_t *t) { t->pc = o.bells ? T_RING : T_TOP; }

static void trainer_steps(const state_t *x) {
    const trainer_t *t = &x->t;
    state_t *n;
    int before = num_steps;
    switch (t->pc) {
    case T_TOP:
        trainer_verbs(x);
        if (num_steps == before && o.bells && !is_complete(x))
            step(x, "has nothing to do", -1)->t.pc = PLANTED(awaits_after_look) ? T_EMPTY : T_AWAIT;
        break;
    case T_WORD: {
        const slot_t *s = &x->slot[t->slot];
        n = step(x, "publishes a word", t->slot);
        n->slot[t->slot].word[t->chunk] = t->chunk < num_chunks(s) ? WORD(s->order, open_own(s)) : WORD(0, VOID);
        n->t.chunk++;
        if (n->t.chunk == o.C) n->t.pc = T_LAST;
        break;
    }
    case T_LAST:
        n = step(x, "announces the order", t->slot);
        n->t.last_order = x->slot[t->slot].order;
        if (PLANTED(words_before_fields)) n->t.pc = T_FIELDS;
        else to_bells(&n->t);
        break;
    case T_FIELDS:
        n = step(x, "writes the fields", t->slot);
        n->slot[t->slot].fields = x->slot[t->slot].order;
        n->slot[t->slot].gen = t->gen;
        to_bells(&n->t);
        break;
    case T_RING:
        n = step(x, "looks how often workers' bell was rung", -1);
        n->t.tmp = bell_of(t, bell_number(t->w)) & 3;
        n->t.pc = T_POST;
        break;
    case T_POST:
        n = step(x, "rings for workers", -1);
        if (t->want > t->tmp) set_bell(&n->t, bell_number(t->w), bell_of(t, bell_number(t->w)) + t->want - t->tmp);
        n->t.pc = T_TOP;
        break;
    case T_VOID: {
        int at = t->slot * MAX_C + t->chunk;
        while (at < o.S * MAX_C && !(x->slot[at / MAX_C].state == DRAINING && at % MAX_C < num_chunks(&x->slot[at / MAX_C]) &&
                                     is_open(x->slot[at / MAX_C].word[at % MAX_C])))
            at++;
        n = step(x, "looks for an open word to void", -1);
        if (at < o.S * MAX_C) {
            n->t.slot = at / MAX_C & 3;
            n->t.chunk = at % MAX_C & 3;
            n->t.pc = T_VOID_CAS;
            break;
        }
        n->t.pc = T_TOP;
        if (PLANTED(free_at_bump))
            for (int i = 0; i < o.S; i++)
                if (x->slot[i].state == DRAINING) n->slot[i].state = FREE;
        break;
    }
    case T_VOID_CAS: {
        unsigned word = x->slot[t->slot].word[t->chunk];
        n = step(x, "voids", t->slot);
        if (is_open(word) || PLANTED(void_by_store)) n->slot[t->slot].word[t->chunk] = WORD(ORDER_OF(word), VOID);
        n->t.pc = T_VOID;
        break;
    }
    case T_REC: {
        const worker_t *dead = &x->worker[t->w];
        n = step(x, "looks for the dead worker's claim", t->w);
        for (int i = t->slot; i < o.S; i++)
            for (int c = 0; c < o.C; c++) {
                slot_t *s = &n->slot[i];
                unsigned word = s->word[c];
                if (OWN_OF(word) != CLAIMED + (unsigned)t->w || (s->state == DRAINING && PLANTED(recover_skips_draining))) continue;
                n->t.slot = i & 3;
                n->t.chunk = c & 3;
                n->t.own = (s->state == DRAINING ? VOID : open_own(s)) & 15;
                if (o.poison && s->state == ORDERED && dead->now_order == ORDER_OF(word)) {
                    int is_mine = s->packed || dead->now_row / o.R == c;
                    if (PLANTED(blame_by_order)) require(is_mine, "a row outside the claim gets the blame");
                    if (is_mine && s->blamed == dead->now_row + 1u) n->t.own = POISON;
                    else if (is_mine) s->blamed = (dead->now_row + 1u) & 7;
                }
                if (s->err == (unsigned)c + 1 && !PLANTED(recover_keeps_err)) s->err = 0;
                if (n->t.own != VOID && n->t.own != POISON && s->repack == ORDER_OF(word)) s->repack = 0;
                n->t.pc = T_REC_CAS;
                return;
            }
        n->t.pc = T_RESPAWN;
        break;
    }
    case T_REC_CAS: {
        unsigned word = x->slot[t->slot].word[t->chunk];
        n = step(x, "takes the claim back", t->w);
        if (OWN_OF(word) == CLAIMED + (unsigned)t->w) n->slot[t->slot].word[t->chunk] = WORD(ORDER_OF(word), t->own);
        n->t.slot = (t->slot + 1) & 3;
        n->t.own = 0;
        n->t.pc = t->slot + 1 < o.S ? T_REC : T_RESPAWN;
        break;
    }
    case T_RESPAWN:
        n = step(x, "replaces the worker", t->w);
        if (x->worker[t->w].pc == W_DEAD) n->worker[t->w] = (worker_t){.pc = W_LOOK};
        n->t.want = 1;
        to_bells(&n->t);
        break;
    case T_REOPEN: {
        slot_t *s;
        n = step(x, "opens the word", t->slot);
        s = &n->slot[t->slot];
        s->word[t->chunk] = WORD(s->order, open_own(s));
        n->t.want = 1;
        n->t.w = s->batch % o.W & 3;
        to_bells(&n->t);
        break;
    }
    case T_AWAIT: {
        int at = -1;
        n = step(x, "says which slot it sleeps for", -1);
        for (int i = 0; i < o.S; i++)
            if (x->slot[i].state == ORDERED && x->slot[i].batch == t->next) at = i;
        n->t.awaited = at >= 0 ? (at + 1) & 7 : PLANTED(awaits_nothing_if_unpublished) ? NOTHING_AWAITED : ANY_AWAITED;
        n->t.pc = PLANTED(awaits_after_look) ? T_ASLEEP : PLANTED(look_then_empty) ? T_LOOK : T_EMPTY;
        break;
    }
    case T_EMPTY:
        n = step(x, "empties its bell", -1);
        n->t.ready = 0;
        n->t.pc = PLANTED(look_then_empty) ? T_ASLEEP : T_LOOK;
        break;
    case T_LOOK:
        n = step(x, "looks at everything once more", -1);
        n->t.pc = may_act(x, PLANTED(sleep_on_next_only)) ? T_TOP
                  : PLANTED(look_then_empty)              ? T_EMPTY
                  : PLANTED(awaits_after_look)            ? T_AWAIT
                                                          : T_ASLEEP;
        break;
    case T_ASLEEP: {
        int is_death = 0;
        for (int w = 0; w < o.W; w++) is_death |= x->worker[w].pc == W_DEAD && !PLANTED(deaths_ring_nothing);
        if (t->ready) {
            n = step(x, "is woken", -1);
            n->t.ready--;
            n->t.pc = T_TOP;
        } else if (is_death || (o.timed && may_act(x, 0))) {
            step(x, is_death ? "is woken by a death" : "wakes by itself", -1)->t.pc = T_TOP;
        }
        break;
    }
    default:
        break;
    }
    if (num_steps > before && steps[num_steps - 1].state.t.pc == T_TOP) {
        trainer_t *after = &steps[num_steps - 1].state.t;
        after->slot = after->chunk = after->w = after->tmp = after->own = after->want = 0;
        after->awaited = NOTHING_AWAITED; /* a little later in C, so there are more posts than here */
    }
}

/* ---------------------------------------------------------------- the environment */

static void environment(const state_t *x) {
    const trainer_t *t = &x->t;
    for (int i = 0; i < o.S; i++)
        if (x->slot[i].state == LEASED) free_slot(&step(x, "lease ends of slot", i)->slot[i]);
    for (int w = 0; w < o.W; w++)
        if (t->kills && x->worker[w].pc != W_DEAD && !PLANTED(recover_live)) {
            state_t *n = step(x, "SIGKILL for worker", w);
            n->t.kills--;
            n->worker[w].pc = W_DEAD;
        }
    if (t->bumps && (t->pc == T_TOP || t->pc == T_ASLEEP)) {
        state_t *n = step(x, "bump", -1);
        n->t.bumps--;
        n->t.gen++;
        n->t.next = n->t.published = 0;
        n->t.slot = n->t.chunk = 0;
        n->t.awaited = NOTHING_AWAITED;
        n->t.pc = T_VOID;
        for (int i = 0; i < o.S; i++)
            if (x->slot[i].state == ORDERED) n->slot[i].state = DRAINING;
    }
    if (t->lost && t->ready) {
        state_t *n = step(x, "a post of the trainer's bell is lost", -1);
        n->t.lost--;
        n->t.ready--;
    }
    for (int w = 0; w < MAX_W; w++)
        if (t->lost && bell_of(t, w)) {
            state_t *n = step(x, "a post of a workers' bell is lost", w);
            n->t.lost--;
            set_bell(&n->t, w, bell_of(t, w) - 1);
        }
}

/* ---------------------------------------------------------------- invariants */

static void check(const state_t *x) {
    int num_leased = 0;
    for (int i = 0; i < o.S; i++) {
        const slot_t *s = &x->slot[i];
        num_leased += s->state == LEASED;
        for (int c = 0; c < o.C; c++) {
            unsigned own = OWN_OF(s->word[c]);
            if (is_final(s->word[c])) continue;
            require(s->state == ORDERED || s->state == DRAINING, "a free or leased slot has an open or a claimed word");
            require(ORDER_OF(s->word[c]) == s->order, "a word that is not final carries an order that its slot does not hold");
            if (own < CLAIMED || own >= RESERVED) continue;
            const worker_t *by = &x->worker[own - CLAIMED];
            int is_taken_back = x->t.w == own - CLAIMED && (x->t.pc == T_REC || x->t.pc == T_REC_CAS);
            int is_its = by->pc >= W_FIELDS && by->pc <= W_FINISH && by->slot == (unsigned)i && by->chunk == (unsigned)c;
            require(is_its || by->pc == W_DEAD || is_taken_back, "a claimed word whose claimant knows nothing of it");
        }
    }
    require(num_leased < o.S || PLANTED(no_copy_out), "every slot is leased");
    for (int w = 0; w < o.W; w++) {
        const worker_t *me = &x->worker[w];
        if (me->pc < W_FIELDS || me->pc > W_FINISH) continue;
        unsigned word = x->slot[me->slot].word[me->chunk];
        require(OWN_OF(word) == CLAIMED + (unsigned)w, "a live worker's claim was taken from it");
        require(ORDER_OF(word) == me->order || PLANTED(words_without_order), "a live worker's claim is of another order");
    }
}

/* ---------------------------------------------------------------- search: depth first; a cycle is an edge back to the path */

typedef struct {
    uint32_t id, at, first, end; /* its successors: todo[first..end) */
} frame_t;

enum { NEW, ON_PATH, BEHIND };
static state_t *states;
static uint8_t *colors;
static uint32_t *table, num_states, room, mask;
static frame_t *frames;
static uint32_t num_frames, frames_room, depth;
static struct {
    uint32_t id;
    int who;
    const char *what;
} *todo;
static uint32_t num_todo, todo_room;

static void *grown(void *p, size_t nbytes) {
    p = realloc(p, nbytes);
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(2);
    }
    return p;
}

static uint64_t hash_of(const state_t *x) {
    uint64_t words[8], h = UINT64_C(0x9E3779B97F4A7C15);
    memcpy(words, x, sizeof words);
    for (int i = 0; i < 8; i++) {
        h = (h ^ words[i]) * UINT64_C(0xBF58476D1CE4E5B9);
        h ^= h >> 29;
    }
    return h;
}

static void insert(uint32_t id) {
    uint64_t at = hash_of(&states[id]) & mask;
    while (table[at]) at = (at + 1) & mask;
    table[at] = id + 1;
}

static void make_room(void) {
    room = room ? room * 2 : 1 << 16;
    states = grown(states, (size_t)room * sizeof *states);
    colors = grown(colors, room);
    mask = room * 2 - 1;
    free(table);
    table = calloc((size_t)mask + 1, sizeof *table);
    if (!table) exit(2);
    for (uint32_t id = 0; id < num_states; id++) insert(id);
}

static uint32_t number_of(const state_t *x) {
    if (num_states == room) make_room();
    for (uint64_t at = hash_of(x) & mask; table[at]; at = (at + 1) & mask)
        if (memcmp(&states[table[at] - 1], x, sizeof *x) == 0) return table[at] - 1;
    states[num_states] = *x;
    colors[num_states] = NEW;
    insert(num_states);
    return num_states++;
}

static int end(const char *verdict, const char *why, int code) {
    if (o.trace)
        for (uint32_t f = 0; f + 1 < num_frames; f++)
            printf("%4u  %2d %s\n", f + 1, todo[frames[f].at - 1].who, todo[frames[f].at - 1].what);
    if (why) printf("%s\n", why);
    printf("%s states=%u depth=%u\n", verdict, num_states, depth);
    return code;
}

/* Enters a state: checks its invariants and computes its successors. Returns 0 or an exit status. */
static int enter(uint32_t id) {
    state_t x = states[id];
    if (num_frames == frames_room) frames = grown(frames, sizeof *frames * (frames_room = frames_room ? frames_room * 2 : 1024));
    frame_t *frame = &frames[num_frames++];
    *frame = (frame_t){id, num_todo, num_todo, num_todo};
    if (num_frames > depth) depth = num_frames;
    colors[id] = ON_PATH;
    num_steps = 0;
    check(&x);
    for (int w = 0; w < o.W; w++) worker_steps(&x, w);
    trainer_steps(&x);
    num_own = num_steps;
    environment(&x);
    if (failed) return end("violation", failed, 3);
    if (num_own == 0 && !is_complete(&x)) return end("stuck", "nobody can move, and batches are missing", 4);
    for (int i = 0; i < num_steps; i++) {
        tidy(&steps[i].state);
        if (num_todo == todo_room) todo = grown(todo, sizeof *todo * (todo_room = todo_room ? todo_room * 2 : 8192));
        todo[num_todo].id = number_of(&steps[i].state);
        todo[num_todo].who = steps[i].who;
        todo[num_todo++].what = steps[i].what;
    }
    frame->end = num_todo;
    return 0;
}

static int explore(void) {
    state_t first;
    memset(&first, 0, sizeof first);
    for (int i = 0; i < MAX_S; i++) clear_slot(&first.slot[i]);
    first.t.kills = (uint64_t)o.kills & 3;
    first.t.bumps = (uint64_t)o.bumps & 3;
    first.t.lost = (uint64_t)o.lost & 3;
    int code = enter(number_of(&first));
    while (!code && num_frames) {
        frame_t *frame = &frames[num_frames - 1];
        if (frame->at == frame->end) {
            colors[frame->id] = BEHIND;
            num_todo = frame->first;
            num_frames--;
            continue;
        }
        uint32_t id = todo[frame->at++].id;
        if (colors[id] == ON_PATH) return end("cycle", "steps that lead back to where they began", 5);
        if (colors[id] == NEW) code = enter(id);
    }
    return code ? code : end("holds", NULL, 0);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        long *value, most;
    } parameters[] = {
        {"W", &o.W, MAX_W},       {"S", &o.S, MAX_S},         {"C", &o.C, MAX_C},         {"R", &o.R, MAX_R},
        {"B", &o.B, 6},           {"kills", &o.kills, 3},     {"bumps", &o.bumps, 3},     {"lost", &o.lost, 3},
        {"bells", &o.bells, 1},   {"timed", &o.timed, 1},     {"static", &o.is_static, 1}, {"poison", &o.poison, 1},
        {"early", &o.early, 1},   {"fail", &o.fail, 3},       {"odd", &o.odd, 3},         {"trace", &o.trace, 1},
    };
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        int known = 0;
        if (value) *value++ = 0;
        for (size_t p = 0; value && p < sizeof parameters / sizeof *parameters; p++)
            if (strcmp(argv[i], parameters[p].name) == 0) {
                *parameters[p].value = strtol(value, NULL, 10);
                known = *parameters[p].value >= 0 && *parameters[p].value <= parameters[p].most;
            }
        for (int b = 0; value && strcmp(argv[i], "bug") == 0 && b < NUM_BUGS; b++)
            if (strcmp(value, bug_names[b]) == 0) {
                bug = (enum bug)b;
                known = 1;
            }
        if (!known || !o.W || !o.S || !o.C || !o.R || !o.B || (o.is_static && o.C > 1)) {
            fprintf(stderr, "unknown or out of range: %s (static=1 comes after C=1)\n", argv[i]);
            return 2;
        }
    }
    return explore();
}
