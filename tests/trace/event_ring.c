/* One thread writes events without a pause, another reads them with the functions of src/events.h: what it gets must be whole,
 * in order, none twice; and what it got and what it was told it missed must be all there was.
 *
 * Arguments: number of events, capacity. Prints "read N lost N ns_per_event F". Exit code 3: an event was torn, 4: the account is wrong.
 * PLANT 1: the reader does not look at the head again. PLANT 2: the last place is taken for whole while it is being written.
 */
#include "events.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t num_events;
static uint32_t capacity;
static shml_recorder *recorder;
static _Atomic int is_over;

static uint64_t word(uint64_t n, int i) { return n * 8 + (uint64_t)i; }

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void *write_all(void *unused) {
    (void)unused;
    for (uint64_t n = 0; n < num_events; n++) {
        uint64_t words[8];
        for (int i = 0; i < 8; i++) words[i] = word(n, i);
        shml_record(recorder, capacity, words);
    }
    atomic_store(&is_over, 1);
    return NULL;
}

#if PLANT
static uint64_t read_carelessly(uint64_t since, uint64_t *out, uint64_t *first) {
    uint64_t head = atomic_load_explicit(&recorder->head, memory_order_acquire);
    uint64_t begin = head - since > capacity ? head - capacity : since;
    for (uint64_t n = begin; n < head; n++) {
        shml_u64 *event = (shml_u64 *)((shml_event *)(recorder + 1) + (n & (capacity - 1)));
        for (int i = 0; i < 8; i++) out[(n - begin) * 8 + i] = atomic_load_explicit(&event[i], memory_order_relaxed);
    }
    atomic_thread_fence(memory_order_acquire);
    uint64_t now = atomic_load_explicit(&recorder->head, memory_order_relaxed);
    uint64_t whole = PLANT == 2 && now >= capacity ? now - capacity : 0;
    if (whole > head) whole = head;
    if (whole > begin) {
        memmove(out, out + (whole - begin) * 8, (head - whole) * 64);
        begin = whole;
    }
    *first = begin;
    return head - begin;
}
#endif

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    num_events = strtoull(argv[1], NULL, 10);
    capacity = (uint32_t)strtoul(argv[2], NULL, 10);
    recorder = aligned_alloc(64, shml_recorder_nbytes(capacity));
    uint64_t *out = malloc(capacity * sizeof(shml_event));
    if (!recorder || !out) return 2;
    memset(recorder, 0, shml_recorder_nbytes(capacity));
    pthread_t writer;
    double began = now_s();
    if (pthread_create(&writer, NULL, write_all, NULL)) return 2;
    uint64_t next = 0, num_read = 0, num_lost = 0;
    for (int is_last = 0; !is_last;) {
        is_last = atomic_load(&is_over);
        uint64_t first;
#if PLANT
        uint64_t count = read_carelessly(next, out, &first);
#else
        uint64_t count = shml_read_events(recorder, capacity, next, out, &first);
#endif
        for (uint64_t k = 0; k < count; k++)
            for (int i = 0; i < 8; i++)
                if (out[k * 8 + i] != word(first + k, i)) return 3;
        if (first < next) return 4;
        num_lost += first - next;
        num_read += count;
        next = first + count;
    }
    double took = now_s() - began;
    pthread_join(writer, NULL);
    free(out);
    free(recorder);
    if (next != num_events || num_read + num_lost != num_events) return 4;
    printf("read %llu lost %llu ns_per_event %.1f\n", (unsigned long long)num_read, (unsigned long long)num_lost,
           took / (double)num_events * 1e9);
    return 0;
}
