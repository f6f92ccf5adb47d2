/* Keyed bijections of [0, n), and the keys from which they and the samples are drawn.
 *
 * All randomness of the schedule is one function: Philox4x64-10, a block cipher used as a counter-based generator.
 *
 *     key     = (seed, n)                      n = 0 for sample keys
 *     counter = (block, epoch, stream, purpose)     block = the sample's index for sample keys
 *
 * Distinct inputs under one key give distinct outputs, so no two (epoch, stream) can share a stream of numbers, and seeds are mixed
 * with epochs by ten rounds of multiplication, never by addition (seed + epoch makes epoch 1 of seed 1 equal epoch 0 of seed 2: a
 * known bug of another library).
 *
 * n <= 65,536: a Fisher-Yates shuffle into a table of uint16. A Feistel network on so few points is visibly not random.
 * n >  65,536: an 8-round unbalanced Feistel network on [0, left_size * 2^right_bits), the smallest such domain with
 * right_bits = ceil(log2(n) / 2). It exceeds n by less than one part in sqrt(n), so cycle walking (apply again until the value is
 * below n) is rare. Measured against the usual power-of-two domain: cost is flat in n, 1.5 times lower at n = 2^k + 1 and 1.3 times
 * higher just below 2^k, where one more multiplication in every second round shows.
 *
 * A call works on blocks of 512 positions held as two arrays of halves, one round over the whole block at a time, so that the
 * compiler vectorizes every loop and no lane waits for another's multiplication; stragglers are gathered and walked together.
 *
 * A change here that alters one index needs a new schedule version.
 *
 * Sources: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox). M.
 * Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988 (Feistel). J. Black, P. Rogaway,
 * "Ciphers with arbitrary finite domains", CT-RSA 2002 (two radices, cycle walking). R. Durstenfeld, "Algorithm 235: random
 * permutation", 1964. D. Lemire, "Fast random integer generation in an interval", 2019. C. Wellons, "Prospecting for hash
 * functions", 2018 (the multipliers of the round function, called lowbias32 there).
 */
#ifndef SHML_PERMUTATION_H
#define SHML_PERMUTATION_H

#include <stddef.h>
#include <stdint.h>

#include "cpu.h"

#define SHML_MAX_ROUNDS 8
#define SHML_BLOCK 512         /* positions processed together: 14 KiB of stack, inside the L1 cache */
#define SHML_FOR_PERMUTATION 1 /* purposes: the last word of the counter, so that no two uses share a stream */
#define SHML_FOR_SAMPLE 2

typedef struct {
    uint64_t word[4];
} shml_words;

/* Compute one block of Philox4x64-10. */
static inline shml_words shml_philox(shml_words counter, uint64_t key0, uint64_t key1) {
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * counter.word[0];
        unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * counter.word[2];
        counter = (shml_words){{(uint64_t)(second >> 64) ^ counter.word[1] ^ key0, (uint64_t)second,
                                (uint64_t)(first >> 64) ^ counter.word[3] ^ key1, (uint64_t)first}};
        key0 += 0x9E3779B97F4A7C15u;
        key1 += 0xBB67AE8584CAA73Bu;
    }
    return counter;
}

static inline shml_words shml_sample_words(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t stream) {
    return shml_philox((shml_words){{index, epoch, stream, SHML_FOR_SAMPLE}}, seed, 0);
}

typedef struct {
    uint64_t seed, n;       /* Philox key */
    uint64_t epoch, stream; /* Philox counter, with the block's number and the purpose */
} shml_key;

static inline shml_words shml_key_words(const shml_key *key, uint64_t block) {
    return shml_philox((shml_words){{block, key->epoch, key->stream, SHML_FOR_PERMUTATION}}, key->seed, key->n);
}

/* ---- the table, n <= 65,536 ---- */

typedef struct {
    const shml_key *key;
    uint64_t block;    /* next block to draw */
    shml_words words;  /* the current one */
    unsigned num_left; /* number of its unused 32-bit halves */
} shml_stream;

static inline uint32_t shml_next32(shml_stream *stream) {
    if (stream->num_left == 0) {
        stream->words = shml_key_words(stream->key, stream->block++);
        stream->num_left = 8;
    }
    stream->num_left--;
    uint64_t word = stream->words.word[stream->num_left / 2];
    return (uint32_t)(stream->num_left % 2 ? word >> 32 : word);
}

/* Return an unbiased number below `bound`: Lemire's multiplication, repeated in the rare short interval. */
static inline uint32_t shml_below(shml_stream *stream, uint32_t bound) {
    uint64_t product = (uint64_t)shml_next32(stream) * bound;
    if ((uint32_t)product < bound) {
        uint32_t threshold = -bound % bound;
        while ((uint32_t)product < threshold) product = (uint64_t)shml_next32(stream) * bound;
    }
    return (uint32_t)(product >> 32);
}

static inline void shml_shuffle(const shml_key *key, uint16_t *table) {
    shml_stream stream = {.key = key};
    for (uint32_t i = 0; i < key->n; i++) table[i] = (uint16_t)i;
    for (uint32_t i = (uint32_t)key->n; i > 1; i--) {
        uint32_t j = shml_below(&stream, i);
        uint16_t moved = table[i - 1];
        table[i - 1] = table[j];
        table[j] = moved;
    }
}

/* ---- the Feistel network, n > 65,536 ---- */

typedef struct {
    uint64_t n;                            /* the permutation's values are below n */
    uint32_t left_size;                    /* left half is in [0, left_size), at most 2^31; rounds add to it modulo left_size */
    int right_bits;                        /* right half is in [0, 2^right_bits), 1 to 31 bits; rounds xor into it */
    int num_rounds;                        /* even, at most SHML_MAX_ROUNDS; fewer only to show that tests can fail */
    uint32_t round_key[SHML_MAX_ROUNDS][2]; /* xored in before each multiplication of the round function */
} shml_feistel;

static inline void shml_feistel_init(shml_feistel *feistel, const shml_key *key, int num_rounds) {
    int bits = 1;
    while ((key->n - 1) >> bits) bits++;
    feistel->n = key->n;
    feistel->right_bits = (bits + 1) / 2;
    feistel->left_size = (uint32_t)(((key->n - 1) >> feistel->right_bits) + 1);
    feistel->num_rounds = num_rounds;
    for (int round = 0; round < SHML_MAX_ROUNDS; round++) {
        uint64_t word = shml_key_words(key, (uint64_t)round / 4).word[round % 4];
        feistel->round_key[round][0] = (uint32_t)word;
        feistel->round_key[round][1] = (uint32_t)(word >> 32);
    }
}

#define SHML_INLINE static inline __attribute__((always_inline))

SHML_INLINE uint32_t shml_mix(uint32_t x, const uint32_t *key) {
    x = (x ^ key[0]) * 0x7feb352du;
    x ^= x >> 15;
    return (x ^ key[1]) * 0x846ca68bu; /* callers use its high bits */
}

/* Apply the network once to `count` <= SHML_BLOCK values, each below left_size * 2^right_bits, in place. */
SHML_INLINE void shml_encrypt_body(const shml_feistel *feistel, uint64_t *values, int count) {
    uint32_t left[SHML_BLOCK], right[SHML_BLOCK];
    const int right_bits = feistel->right_bits;
    const uint32_t size = feistel->left_size;
    for (int i = 0; i < count; i++) {
        left[i] = (uint32_t)(values[i] >> right_bits);
        right[i] = (uint32_t)(values[i] & (((uint64_t)1 << right_bits) - 1));
    }
    for (int round = 0; round < feistel->num_rounds; round += 2) {
        const uint32_t even[2] = {feistel->round_key[round][0], feistel->round_key[round][1]};
        const uint32_t odd[2] = {feistel->round_key[round + 1][0], feistel->round_key[round + 1][1]};
        for (int i = 0; i < count; i++) {
            uint32_t sum = left[i] + (uint32_t)(((uint64_t)shml_mix(right[i], even) * size) >> 32);
            uint32_t reduced = sum - size; /* wraps to a large number if sum < size: the smaller one is sum mod size */
            sum = sum < reduced ? sum : reduced;
            right[i] ^= shml_mix(sum, odd) >> (32 - right_bits);
            left[i] = sum;
        }
    }
    for (int i = 0; i < count; i++) values[i] = ((uint64_t)left[i] << right_bits) | right[i];
}

/* Apply the inverse: the rounds in reverse order. */
SHML_INLINE void shml_decrypt_body(const shml_feistel *feistel, uint64_t *values, int count) {
    uint32_t left[SHML_BLOCK], right[SHML_BLOCK];
    const int right_bits = feistel->right_bits;
    const uint32_t size = feistel->left_size;
    for (int i = 0; i < count; i++) {
        left[i] = (uint32_t)(values[i] >> right_bits);
        right[i] = (uint32_t)(values[i] & (((uint64_t)1 << right_bits) - 1));
    }
    for (int round = feistel->num_rounds - 2; round >= 0; round -= 2) {
        const uint32_t even[2] = {feistel->round_key[round][0], feistel->round_key[round][1]};
        const uint32_t odd[2] = {feistel->round_key[round + 1][0], feistel->round_key[round + 1][1]};
        for (int i = 0; i < count; i++) {
            right[i] ^= shml_mix(left[i], odd) >> (32 - right_bits);
            uint32_t difference = left[i] - (uint32_t)(((uint64_t)shml_mix(right[i], even) * size) >> 32);
            uint32_t raised = difference + size; /* if difference wrapped below zero, this wraps back into [0, size) */
            left[i] = difference < raised ? difference : raised;
        }
    }
    for (int i = 0; i < count; i++) values[i] = ((uint64_t)left[i] << right_bits) | right[i];
}

/* Compile the same loops for several instruction sets; the CPU of the first call decides. Plain target attributes, because
 * target_clones needs ifunc support (absent in musl) and does not start under the sanitizers. Other architectures use the base. */
#define SHML_CLONES(target, suffix) \
    target static void shml_encrypt_##suffix(const shml_feistel *feistel, uint64_t *values, int count) { \
        shml_encrypt_body(feistel, values, count); \
    } \
    target static void shml_decrypt_##suffix(const shml_feistel *feistel, uint64_t *values, int count) { \
        shml_decrypt_body(feistel, values, count); \
    }

SHML_CLONES(, base)
#ifdef __x86_64__
SHML_CLONES(__attribute__((target("avx2"))), avx2)
SHML_CLONES(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), avx512)
#endif

typedef void (*shml_network)(const shml_feistel *, uint64_t *, int);

/* Return the best instruction set, slowest first: 0 base, 1 avx2, 2 avx512. */
static inline int shml_best_isa(void) {
#ifdef __x86_64__
    if (shml_cpu_has(SHML_CPU_AVX512)) return 2;
    if (shml_cpu_has(SHML_CPU_AVX2)) return 1;
#endif
    return 0;
}

static inline shml_network shml_network_for(int isa, int is_inverse) {
#ifdef __x86_64__
    if (isa == 2) return is_inverse ? shml_decrypt_avx512 : shml_encrypt_avx512;
    if (isa == 1) return is_inverse ? shml_decrypt_avx2 : shml_encrypt_avx2;
#endif
    return is_inverse ? shml_decrypt_base : shml_encrypt_base;
}

/* Map `count` values below n, in place: the network, then again for those outside [0, n). Every cycle of the network through a
 * value below n returns to [0, n), so the walk ends. */
static inline void shml_map_values(const shml_feistel *feistel, shml_network network, uint64_t *values, size_t count) {
    uint64_t walking[SHML_BLOCK];
    int place[SHML_BLOCK];
    for (size_t start = 0; start < count; start += SHML_BLOCK) {
        uint64_t *block = values + start;
        int size = count - start < SHML_BLOCK ? (int)(count - start) : SHML_BLOCK;
        int num_outside = 0;
        network(feistel, block, size);
        for (int i = 0; i < size; i++) { /* no branch: the place is always written, and kept when its value is outside */
            place[num_outside] = i;
            num_outside += block[i] >= feistel->n;
        }
        while (num_outside) {
            int num_left = 0;
            for (int i = 0; i < num_outside; i++) walking[i] = block[place[i]];
            network(feistel, walking, num_outside);
            for (int i = 0; i < num_outside; i++) {
                block[place[i]] = walking[i];
                place[num_left] = place[i];
                num_left += walking[i] >= feistel->n;
            }
            num_outside = num_left;
        }
    }
}

#endif
