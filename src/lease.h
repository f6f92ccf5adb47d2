/* The trainer's private state of a ring: the state of each slot, and the leases.
 *
 * Nothing here is in shared memory. A lease counts the tensors made from one slot. Each is made from a DLPack capsule, whose deleter
 * is called when torch frees the storage, so the count follows the storage and not the Python object that was yielded. The deleter
 * may run in any thread and without the GIL: it only pushes the slot onto a lock-free stack, which the trainer empties. In a forked
 * child the deleter works on the child's own copy of this state, so it returns no slot to the parent; the bytes there are shared
 * until shml_lease_make_private (see shm/fork_copies.py).
 *
 * A mapping is counted too: by its owner and by every lease in it, so closing a loader never unmaps memory under a live tensor.
 */
#ifndef SHMLOAD_LEASE_H
#define SHMLOAD_LEASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mremap */
#endif

#include "protocol.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    void *base;
    size_t nbytes;
    _Atomic int refs;
} shml_map;

static inline uint64_t shml_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void shml_map_drop(shml_map *map) {
    if (map && atomic_fetch_sub(&map->refs, 1) == 1) {
        munmap(map->base, map->nbytes);
        free(map);
    }
}

static inline shml_map *shml_map_keep(shml_map *map) {
    atomic_fetch_add(&map->refs, 1);
    return map;
}

enum { /* states of a slot, as only the trainer knows them */
    SHML_FREE = 0,
    SHML_HELD = 1,     /* taken from the free list, about to be published */
    SHML_ORDERED = 2,  /* an order is published: being filled, ready or failed, by the owner words */
    SHML_LEASED = 3,
    SHML_DRAINING = 4, /* abandoned, and a worker may still write to it */
    SHML_PARKED = 5,   /* not in use: a ring may be created for more batches than are in progress now */
    SHML_PENDING_COPIES = 6,  /* its lease has ended, but copies from it to a device may still be running */
};

struct shml_local_ring;

typedef struct {
    _Atomic int refs;       /* the Lease objects and every tensor made from them; 0: the slot is not leased */
    uint32_t slot;
    struct shml_local_ring *local_ring; /* counted while refs > 0 */
    shml_map *map;          /* counted while refs > 0 */
    uint8_t *base;          /* the slot's first byte */
    uint64_t nbytes;
    int is_private;         /* in a forked child: its bytes are already a private copy */
} shml_lease;

typedef struct {
    uint64_t order;       /* newest order published here */
    shml_map *map;        /* payload, counted; NULL before the layout is known */
    uint64_t offset;      /* offset of the slot in the payload, in bytes */
    uint64_t nbytes;      /* size of the slot in bytes */
    int32_t next;         /* link in the stack of returned slots */
    int32_t state;
    int32_t reserved;     /* worker the order is for, SHML_ANYONE otherwise */
    uint64_t leased_ns;   /* CLOCK_MONOTONIC at the start of the newest lease */
    uint64_t released_ns; /* CLOCK_MONOTONIC at the end of that lease; written by the thread that drops the last alias */
    shml_lease lease;     /* a slot has one at a time; stored here, so a fork can access it while other threads drop it */
} shml_place;

typedef struct shml_local_ring {
    _Atomic int refs;         /* the ring object, the list of all local rings, and every live lease */
    _Atomic int32_t returned; /* head of the stack of slots whose last alias was dropped; -1 if empty */
    _Atomic int poison;       /* for debugging: if 1, a slot is overwritten when it is returned; if -n, the process sends itself
                                 signal n before the next slot is returned; 0 for neither */
    uint32_t num_slots;
    uint32_t num_usable;      /* not parked */
    uint32_t num_free;
    uint32_t num_leased;      /* as the trainer last saw it */
    uint32_t num_pending_copies;
    int32_t *pending_copies;  /* returned slots that must not be used yet; if NULL, a returned slot is free at once */
    void (*ended)(void *context, uint32_t slot); /* called when a lease ends, in its thread, before the slot is returned; or NULL */
    void *context;            /* argument of `ended`; lives as long as the local ring has leases */
    int32_t *free_list;       /* last in, first out, so the part of the ring in use stays small and in the caches */
    shml_place *places;
} shml_local_ring;

/* Return a new local ring whose first `num_usable` slots are free and whose others are parked; NULL if out of memory. */
static inline shml_local_ring *shml_local_ring_new(uint32_t num_slots, uint32_t num_usable) {
    shml_local_ring *local_ring = (shml_local_ring *)calloc(1, sizeof(shml_local_ring));
    if (!local_ring) return NULL;
    local_ring->places = (shml_place *)calloc(num_slots, sizeof(shml_place));
    local_ring->free_list = (int32_t *)calloc(num_slots, sizeof(int32_t));
    if (!local_ring->places || !local_ring->free_list) {
        free(local_ring->places);
        free(local_ring->free_list);
        free(local_ring);
        return NULL;
    }
    atomic_store(&local_ring->refs, 1);
    atomic_store(&local_ring->returned, -1);
    local_ring->num_slots = num_slots;
    local_ring->num_usable = num_usable;
    for (uint32_t s = 0; s < num_usable; s++) local_ring->free_list[local_ring->num_free++] = (int32_t)(num_usable - 1 - s);
    for (uint32_t s = num_usable; s < num_slots; s++) local_ring->places[s].state = SHML_PARKED;
    return local_ring;
}

static inline void shml_local_ring_keep(shml_local_ring *local_ring) { atomic_fetch_add(&local_ring->refs, 1); }

static inline void shml_local_ring_drop(shml_local_ring *local_ring) {
    if (atomic_fetch_sub(&local_ring->refs, 1) != 1) return;
    free(local_ring->places);
    free(local_ring->free_list);
    free(local_ring->pending_copies);
    free(local_ring);
}

/* Release the ring's mappings. Afterward only leases keep its payloads mapped. */
static inline void shml_local_ring_close(shml_local_ring *local_ring) {
    for (uint32_t s = 0; s < local_ring->num_slots; s++) {
        shml_map_drop(local_ring->places[s].map);
        local_ring->places[s].map = NULL;
    }
}

static inline void shml_local_ring_push_free(shml_local_ring *local_ring, uint32_t slot) {
    local_ring->places[slot].state = SHML_FREE;
    local_ring->free_list[local_ring->num_free++] = (int32_t)slot;
}

/* Remove a free slot from the list of free slots. */
static inline void shml_local_ring_pull_free(shml_local_ring *local_ring, uint32_t slot) {
    uint32_t at = 0;
    while (local_ring->free_list[at] != (int32_t)slot) at++;
    local_ring->num_free--;
    for (; at < local_ring->num_free; at++) local_ring->free_list[at] = local_ring->free_list[at + 1];
}

/* Collect the slots that leases have returned since the last call, and return how many. Trainer only. */
static inline uint32_t shml_local_ring_collect(shml_local_ring *local_ring) {
    if (atomic_load_explicit(&local_ring->returned, memory_order_relaxed) < 0) return 0;
    int32_t slot = atomic_exchange_explicit(&local_ring->returned, -1, memory_order_acquire);
    uint32_t n = 0;
    while (slot >= 0) {
        int32_t next = local_ring->places[slot].next;
        if (local_ring->pending_copies) {
            local_ring->places[slot].state = SHML_PENDING_COPIES;
            local_ring->pending_copies[local_ring->num_pending_copies++] = slot;
        } else {
            shml_local_ring_push_free(local_ring, (uint32_t)slot);
        }
        local_ring->num_leased--;
        slot = next;
        n++;
    }
    return n;
}

static inline void shml_local_ring_poison(uint8_t *base, uint64_t nbytes) { memset(base, 0xA5, nbytes); }

/* From now on, free returned slots only after their copies to a device, and call `ended` at the end of each lease. Return -1 if out
 * of memory. Trainer only, before the first lease. */
static inline int shml_local_ring_await_copies(shml_local_ring *local_ring, void (*ended)(void *, uint32_t), void *context) {
    local_ring->pending_copies = (int32_t *)calloc(local_ring->num_slots, sizeof(int32_t));
    if (!local_ring->pending_copies) return -1;
    local_ring->ended = ended;
    local_ring->context = context;
    return 0;
}

/* Free a slot whose device copies have finished. Return -1 if it does not wait for copies. Trainer only. */
static inline int shml_local_ring_copies_done(shml_local_ring *local_ring, uint32_t slot) {
    uint32_t at = 0;
    while (at < local_ring->num_pending_copies && local_ring->pending_copies[at] != (int32_t)slot) at++;
    if (at == local_ring->num_pending_copies) return -1;
    local_ring->num_pending_copies--;
    for (; at < local_ring->num_pending_copies; at++) local_ring->pending_copies[at] = local_ring->pending_copies[at + 1];
    shml_place *place = &local_ring->places[slot];
    if (place->map && atomic_load_explicit(&local_ring->poison, memory_order_relaxed) > 0)
        shml_local_ring_poison((uint8_t *)place->map->base + place->offset, place->nbytes);
    shml_local_ring_push_free(local_ring, slot);
    return 0;
}

/* Lease a slot that has a payload and no lease. Trainer only. */
static inline shml_lease *shml_lease_begin(shml_local_ring *local_ring, uint32_t slot) {
    shml_place *place = &local_ring->places[slot];
    shml_lease *lease = &place->lease;
    atomic_fetch_add(&local_ring->refs, 1);
    lease->slot = slot;
    lease->local_ring = local_ring;
    lease->map = shml_map_keep(place->map);
    lease->base = (uint8_t *)place->map->base + place->offset;
    lease->nbytes = place->nbytes;
    lease->is_private = 0;
    atomic_store(&lease->refs, 1);
    place->state = SHML_LEASED;
    local_ring->num_leased++;
    return lease;
}

/* Add a reference to a lease that has not ended. Return 1 if it was added. The local ring must be alive, and no slot may be
 * leased at the same time. */
static inline int shml_lease_try_keep(shml_lease *lease) {
    int refs = atomic_load_explicit(&lease->refs, memory_order_relaxed);
    while (refs > 0)
        if (atomic_compare_exchange_weak_explicit(&lease->refs, &refs, refs + 1, memory_order_acquire, memory_order_relaxed)) return 1;
    return 0;
}

/* Drop one alias; the last one returns the slot. Any thread; the GIL is not needed, but `ended` may take it. */
static inline void shml_lease_drop(shml_lease *lease) {
    if (atomic_fetch_sub_explicit(&lease->refs, 1, memory_order_acq_rel) != 1) return;
    shml_local_ring *local_ring = lease->local_ring;
    shml_map *map = lease->map;
    int poison = atomic_load_explicit(&local_ring->poison, memory_order_relaxed);
    if (poison > 0 && !local_ring->pending_copies) shml_local_ring_poison(lease->base, lease->nbytes); /* else after the copies */
    if (poison < 0) {
        atomic_store_explicit(&local_ring->poison, 0, memory_order_relaxed);
        kill(getpid(), -poison);
    }
    int32_t slot = (int32_t)lease->slot;
    if (local_ring->ended) local_ring->ended(local_ring->context, lease->slot);
    local_ring->places[slot].released_ns = shml_now_ns();
    int32_t head = atomic_load_explicit(&local_ring->returned, memory_order_relaxed);
    do {
        local_ring->places[slot].next = head;
    } while (!atomic_compare_exchange_weak_explicit(&local_ring->returned, &head, slot, memory_order_release, memory_order_relaxed));
    /* from here on the slot may be leased again */
    shml_map_drop(map);
    shml_local_ring_drop(local_ring);
}

/* In a forked child, replace the slot's pages with a private copy at the same address. Return 0, or -1 if memory is short. */
static inline int shml_lease_make_private(shml_lease *lease) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)lease->base & ~(page - 1);
    uintptr_t end = ((uintptr_t)lease->base + lease->nbytes + page - 1) & ~(page - 1);
    void *copy = mmap(NULL, end - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return -1;
    memcpy(copy, (void *)first, end - first);
    if (mremap(copy, end - first, end - first, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)first) == MAP_FAILED) {
        munmap(copy, end - first);
        return -1;
    }
    lease->is_private = 1;
    return 0;
}

/* ---------------------------------------------------------------- DLPack v0, https://dmlc.github.io/dlpack/latest/c_api.html */

typedef struct {
    int32_t device_type; /* 1: CPU */
    int32_t device_id;
} dl_device;

typedef struct {
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool */
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL for C order */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *manager;
    void (*deleter)(struct dl_managed *);
    int64_t shape[]; /* ndim entries, owned by this struct */
} dl_managed;

static void shml_dl_delete(dl_managed *managed) {
    shml_lease_drop((shml_lease *)managed->manager);
    free(managed);
}

/* Return a C-order array at `offset` of the lease's slot, with a reference to the lease; NULL if out of memory. The caller sets its
 * shape. */
static inline dl_managed *shml_dl_new(shml_lease *lease, uint64_t offset, uint8_t code, uint8_t bits, int32_t ndim) {
    dl_managed *managed = (dl_managed *)malloc(sizeof(dl_managed) + (size_t)ndim * sizeof(int64_t));
    if (!managed) return NULL;
    managed->tensor.data = lease->base + offset;
    managed->tensor.device.device_type = 1;
    managed->tensor.device.device_id = 0;
    managed->tensor.ndim = ndim;
    managed->tensor.dtype.code = code;
    managed->tensor.dtype.bits = bits;
    managed->tensor.dtype.lanes = 1;
    managed->tensor.shape = managed->shape;
    managed->tensor.strides = NULL;
    managed->tensor.byte_offset = 0;
    managed->manager = lease;
    managed->deleter = shml_dl_delete;
    atomic_fetch_add_explicit(&lease->refs, 1, memory_order_relaxed);
    return managed;
}

#endif
