/* The control block: every word that trainer, workers and stats readers share.
 *
 *   header | worker records | slot records | orders | texts | layout text | events (events.h)
 *
 * The payload (the batches themselves) is in separate segments; a slot record contains the segment and the offset in it.
 * All integers are little-endian and naturally aligned. A field's comment contains its meaning and unit; then its writer.
 * Increase SHML_ABI when the meaning, size or place of a field changes, because `shmload top` and the crash replay read these words
 * from other processes.
 */
#ifndef SHMLOAD_LAYOUT_H
#define SHMLOAD_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SHML_MAGIC UINT64_C(0x31444C4F4C4D4853) /* "SHMLOLD1" read as bytes */
#define SHML_ABI 6u
#define SHML_MAX_CHUNKS 64u
#define SHML_MAX_WORKERS 16000u /* own = w + 1 stays below the reservations at 0x4000 */
#define SHML_PATH_NBYTES 128u
#define SHML_NAME_NBYTES 24u
#define SHML_ALIGN 64u
#define SHML_EVENTS_PER_RING 512u /* 32 KiB: a worker's last 100 ms at 5,000 chunks a second */

typedef _Atomic uint64_t shml_u64;
typedef _Atomic uint32_t shml_u32;

/* State of the slots' layout (header.layout_state). */
enum {
    SHML_LAYOUT_NONE = 0,     /* no sample has been seen */
    SHML_LAYOUT_PROPOSED = 1, /* a worker has written the layout text and waits for the payload */
    SHML_LAYOUT_READY = 2,    /* the layout is settled, and the payload exists */
    SHML_LAYOUT_ASKING = 16,  /* + w: worker w is writing the layout text */
};

/* Encoding of an order's bytes (slot.order_kind). */
enum {
    SHML_ORDER_INT64 = 0,  /* nrows int64 indices in the order area */
    SHML_ORDER_PICKLED = 1, /* order_nbytes bytes of pickle: a sampler's keys that are not integers */
};

/* Format of the batch in the payload (slot.form). */
enum {
    SHML_FORM_ROWS = 0,   /* fixed rows in the settled layout; any worker may fill any chunk */
    SHML_FORM_PACKED = 1, /* one worker packs the whole batch: meta, then arrays */
};

typedef struct {
    uint64_t magic;             /* SHML_MAGIC, written last at creation; trainer */
    uint32_t abi;               /* SHML_ABI; trainer */
    uint32_t num_slots;         /* trainer */
    uint32_t num_workers;       /* worker records, not running processes: those of the pool, then those of helpers; trainer */
    uint32_t is_static;         /* 1: batch i belongs to worker i mod n and orders are taken oldest first; trainer */
    uint64_t total_nbytes;      /* size of the control block; trainer */
    uint64_t workers_offset;    /* bytes from the header's start, like all offsets here; trainer */
    uint64_t slots_offset;
    uint64_t orders_offset;
    uint64_t order_capacity;    /* bytes of order area per slot */
    uint64_t texts_offset;
    uint64_t text_capacity;     /* bytes of text area per slot: the first error of the order it holds, or a note */
    uint64_t layout_offset;
    uint64_t layout_capacity;   /* bytes */
    int64_t owner_pid;          /* trainer's pid in its own namespace, for people; the flock shows ownership; trainer */
    int64_t owner_start_ns;     /* CLOCK_MONOTONIC at creation; trainer */
    uint64_t events_offset;     /* of worker 0's recorder (events.h); the trainer's follows the workers'; trainer */
    uint64_t events_per_ring;   /* number of events in a recorder, a power of two; trainer */
    uint8_t reserved0[128];     /* to 256 */
    shml_u64 last_order;        /* newest fully published order; trainer */
    shml_u32 generation;        /* counts abandoned epochs: a hint that lets workers stop early; trainer */
    shml_u32 layout_state;      /* SHML_LAYOUT_*; asking worker, trainer */
    shml_u32 is_packed;         /* 1: samples have no fixed rows, so workers pack all batches; trainer */
    shml_u32 is_closing;        /* 1: workers leave; trainer */
    uint64_t layout_nbytes;     /* bytes of layout text; the asking worker before PROPOSED */
    shml_u64 batches;           /* delivered; trainer, relaxed, like all counters below */
    shml_u64 samples;           /* delivered */
    shml_u64 nbytes;            /* delivered, bytes */
    shml_u64 wait_ns;           /* time that the trainer waited for batches */
    shml_u64 num_waits;         /* next() calls that had to wait */
    shml_u64 num_copied_out;    /* batches copied to private memory because the program holds too many slots */
    shml_u64 num_grown;         /* slots that got a larger segment */
    shml_u64 num_restarts;      /* workers replaced */
    uint64_t reserved1;
    shml_u64 waiting_since_ns;  /* CLOCK_MONOTONIC when the trainer began to wait; 0 if it does not wait */
    shml_u64 awaited;           /* slot + 1 for which the trainer sleeps, UINT64_MAX for any, 0 if it is awake; trainer */
    shml_u64 num_wanted;        /* workers of this number and above leave when they have finished their claim; trainer */
    shml_u32 num_sleepers;      /* other ranks that sleep until a batch is ready (share.h); these ranks */
    shml_u32 num_rings;         /* a futex that counts their wake-ups; the process that wakes them */
    uint8_t reserved2[32];      /* to 424 */
    uint32_t rank;              /* this and the following fields are only for stats readers; trainer, before the first order */
    uint32_t world_size;        /* trainer, before the first order */
    shml_u64 num_bad_samples;   /* samples that could not be read and were skipped or replaced; trainer */
    shml_u64 epoch;             /* of the newest delivered batch, int64 as bits; trainer */
    shml_u64 step;              /* of the newest delivered batch, int64 as bits; trainer */
    shml_u64 num_steps;         /* batches of the newest pass, 0 if not known; trainer */
    shml_u32 step_stride;       /* difference between the steps of successive orders; the world size for an order of batches; trainer */
    char dataset_name[SHML_NAME_NBYTES]; /* type of the dataset, NUL-terminated; trainer, before the first order */
    char read_path[16];         /* the dataset's method that reads samples, NUL-terminated; trainer, before the first order */
} shml_header;

typedef struct {
    shml_u64 now;           /* order << 16 | low bits of the row being decoded, which is blamed for a death; that worker */
    shml_u64 pid;           /* 0: not started; that worker */
    shml_u64 started_ns;    /* CLOCK_MONOTONIC when it was ready for orders; that worker */
    shml_u64 since_ns;      /* CLOCK_MONOTONIC of the claim, then of each row begun; 0 between samples; that worker */
    shml_u64 index;         /* int64 sample index being decoded, as bits; that worker */
    shml_u64 is_waiting;    /* 1: waits for orders; that worker */
    shml_u64 busy_ns;       /* spent filling chunks; that worker */
    shml_u64 num_chunks;    /* finished; that worker */
    shml_u64 num_samples;   /* written; that worker */
    shml_u64 num_foreign;   /* objects it had to pickle; that worker */
    shml_u64 nbytes_fetched; /* sent by its Ray actor through the object store; that worker, like the next three; 0 without Ray */
    shml_u64 nbytes_remote; /* the part of these bytes from another node, over the network */
    shml_u32 num_actors;    /* actors that have decoded for it, one after the other */
    char node[12];          /* beginning of the id of the last actor's node, NUL-terminated */
    shml_u64 num_restarts;  /* processes that have replaced a dead one here; trainer */
    shml_u64 claimed_ns;    /* CLOCK_MONOTONIC of its present claim, 0 without a claim; that worker */
    shml_u64 visitor;       /* identity (helpers.h) of the other rank's worker that fills chunks here or requests to; 0: none; that
                               worker when it was 0, trainer clears */
    shml_u64 accepted;      /* identity of the helper that the trainer watches, which may claim; trainer */
    shml_u64 row;           /* row being decoded, written before `now`, because a chunk may have more than 65,536; that worker */
    shml_u64 num_irregular; /* files read although they break a rule of their format; that worker */
    uint8_t reserved[32];   /* to 192: whole cache lines, so workers do not share one */
} shml_worker;

typedef struct {
    shml_u64 owner[SHML_MAX_CHUNKS]; /* order << 16 | own: see protocol.h; trainer: publish, void, recover; worker: claim, finish */
    uint64_t reserved0;
    int64_t epoch;            /* like all plain fields: trainer, only while the slot is free, before any owner word */
    int64_t step;             /* of the batch within the epoch */
    uint32_t generation;      /* header.generation at publication */
    uint32_t nrows;           /* rows ordered */
    uint32_t nchunks;         /* 1..64 */
    uint32_t order_kind;      /* SHML_ORDER_* */
    uint64_t order_nbytes;    /* bytes used in the order area, or in order_path */
    shml_u64 err;             /* order << 16 | chunk + 1 of the error in the text area, 0 none; claimant, trainer clears */
    shml_u64 repack;          /* order that must be filled again as one packed chunk, 0 none; claimant */
    shml_u64 need_nbytes;     /* payload bytes that the claimant requests, 0 none; claimant, trainer clears when granted */
    shml_u64 text_nbytes;     /* bytes of error text; winner of err */
    shml_u64 used_nbytes;     /* payload bytes of a packed batch; claimant, before finish */
    uint32_t form;            /* SHML_FORM_* of the order; trainer, while free */
    uint32_t state;           /* copy of the private state, for stats readers; trainer */
    shml_u64 payload_version; /* grows when payload_* change; trainer, while free or while its claimant waits for need_nbytes */
    uint64_t payload_offset;  /* bytes from the segment's start */
    uint64_t payload_nbytes;  /* bytes this slot may use */
    int64_t ordered_ns;       /* CLOCK_MONOTONIC of publication */
    shml_u64 note_nbytes;     /* bytes in the text area of a batch that did not fail: the worker's position; claimant, before finish */
    shml_u64 num_lost;        /* claims of this order recovered from dead workers; if any, its rows are read one by one; trainer */
    uint8_t reserved1[112];   /* to 768 */
    char payload_path[SHML_PATH_NBYTES]; /* segment of the payload; NUL-terminated, empty: no payload yet */
    char order_path[SHML_PATH_NBYTES];   /* segment with an order too large for its area; empty: it fits */
} shml_slot;

static_assert(sizeof(shml_u64) == 8 && sizeof(shml_u32) == 4, "atomics must be plain words");
static_assert(offsetof(shml_header, last_order) == 256, "hot words start a cache line");
static_assert(sizeof(shml_header) == 512, "header size");
static_assert(sizeof(shml_worker) == 192, "worker record size");
static_assert(offsetof(shml_slot, reserved0) == 512, "owner words are the first eight cache lines");
static_assert(offsetof(shml_slot, payload_path) == 768, "slot record: paths");
static_assert(sizeof(shml_slot) == 1024, "slot record size");
static_assert(SHML_MAX_WORKERS + 1 < 0x4000, "claims and reservations must not meet");

#endif
