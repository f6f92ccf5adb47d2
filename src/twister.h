/* Freshly seeded states of Mersenne Twisters, sixteen at a time.
 *
 * random, numpy and torch each hold 624 words, and seeding fills them by a recurrence in which every word depends on the
 * previous one: about 2,000 multiplications in sequence, 5 us. With vector units, sixteen seeds side by side take no longer than
 * one.
 *
 *     plain: init_genrand of the key's low 32 bits; equal to np.random.seed(key & 0xFFFFFFFF) and torch's manual_seed(key)
 *     mixed: init_by_array of the key's 32-bit words, least significant first; equal to random.seed(key)
 *
 * Lanes are adjacent while they are computed, words[word][lane], and are transposed to words[lane][word] afterwards.
 *
 * Source: M. Matsumoto, T. Nishimura, mt19937ar.c (2002), http://www.math.sci.hiroshima-u.ac.jp/m-mat/MT/MT2002/emt19937ar.html */
#ifndef SHML_TWISTER_H
#define SHML_TWISTER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu.h"
#include "permutation.h" /* a sample's key, and the choice of the instruction set */

#define SHML_TWISTER_WORDS 624
#define SHML_TWISTER_NBYTES (4 * SHML_TWISTER_WORDS)
#define SHML_LANES 16

typedef struct {
    uint32_t plain[SHML_LANES][SHML_TWISTER_WORDS];
    uint32_t mixed[SHML_LANES][SHML_TWISTER_WORDS];
} shml_twisters;

static inline uint32_t shml_twister_next(uint32_t word, uint32_t factor) { return (word ^ (word >> 30)) * factor; }

/* Compute the words from which init_by_array begins, init_genrand(19650218), and one more, which is read but has no effect. */
static inline void shml_twister_base(uint32_t *base) {
    base[0] = 19650218;
    for (uint32_t i = 1; i <= SHML_TWISTER_WORDS; i++) base[i] = shml_twister_next(base[i - 1], 1812433253u) + i;
}

typedef uint32_t shml_vector4 __attribute__((vector_size(16)));
typedef uint32_t shml_vector8 __attribute__((vector_size(32)));

/* Copy four words of four lanes from words[word][lane] to out[lane][word]. `stride`: lanes in a row of `words`. */
SHML_INLINE void shml_transpose(const uint32_t *words, size_t stride, uint32_t *out) {
#ifdef __x86_64__
    __m128i a = _mm_loadu_si128((const __m128i *)words), b = _mm_loadu_si128((const __m128i *)(words + stride));
    __m128i c = _mm_loadu_si128((const __m128i *)(words + 2 * stride)), d = _mm_loadu_si128((const __m128i *)(words + 3 * stride));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + SHML_TWISTER_WORDS), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + 2 * SHML_TWISTER_WORDS), _mm_unpacklo_epi64(ab_high, cd_high));
    _mm_storeu_si128((__m128i *)(out + 3 * SHML_TWISTER_WORDS), _mm_unpackhi_epi64(ab_high, cd_high));
#elif defined(__aarch64__)
    uint32x4_t a = vld1q_u32(words), b = vld1q_u32(words + stride), c = vld1q_u32(words + 2 * stride), d = vld1q_u32(words + 3 * stride);
    uint64x2_t ab = vreinterpretq_u64_u32(vzip1q_u32(a, b)), cd = vreinterpretq_u64_u32(vzip1q_u32(c, d));
    uint64x2_t ab_high = vreinterpretq_u64_u32(vzip2q_u32(a, b)), cd_high = vreinterpretq_u64_u32(vzip2q_u32(c, d));
    vst1q_u32(out, vreinterpretq_u32_u64(vzip1q_u64(ab, cd)));
    vst1q_u32(out + SHML_TWISTER_WORDS, vreinterpretq_u32_u64(vzip2q_u64(ab, cd)));
    vst1q_u32(out + 2 * SHML_TWISTER_WORDS, vreinterpretq_u32_u64(vzip1q_u64(ab_high, cd_high)));
    vst1q_u32(out + 3 * SHML_TWISTER_WORDS, vreinterpretq_u32_u64(vzip2q_u64(ab_high, cd_high)));
#else
    for (size_t lane = 0; lane < 4; lane++)
        for (size_t word = 0; word < 4; word++) out[lane * SHML_TWISTER_WORDS + word] = words[word * stride + lane];
#endif
}

/* Copy words of each of `width` lanes, words[word][lane], to words `at` on of their states: four, or eight with wide registers. */
SHML_INLINE void shml_put_one(const uint32_t *words, int width, uint32_t at, uint32_t (*out)[SHML_TWISTER_WORDS]) {
    memcpy(&out[0][at], words, 16 * (size_t)width);
}

SHML_INLINE void shml_put_base(const uint32_t *words, int width, uint32_t at, uint32_t (*out)[SHML_TWISTER_WORDS]) {
    for (int lane = 0; lane < width; lane += 4) shml_transpose(words + lane, (size_t)width, &out[lane][at]);
}

#ifdef __x86_64__
/* Like shml_transpose in both halves of a register; then the halves are exchanged. */
__attribute__((target("avx2"))) static inline void shml_put_avx2(const uint32_t *words, int width, uint32_t at,
                                                                 uint32_t (*out)[SHML_TWISTER_WORDS]) {
    for (int lane = 0; lane < width; lane += 8) {
        __m256i row[8], pair[8], quad[8];
        for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_si256((const __m256i *)(words + i * width + lane));
        for (int i = 0; i < 8; i += 2) {
            pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
            pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) { /* quad[i + j]: lanes j and j + 4 of words i to i + 3 */
            for (int j = 0; j < 2; j++) {
                quad[i + 2 * j] = _mm256_unpacklo_epi64(pair[i + j], pair[i + 2 + j]);
                quad[i + 2 * j + 1] = _mm256_unpackhi_epi64(pair[i + j], pair[i + 2 + j]);
            }
        }
        for (int j = 0; j < 4; j++) {
            _mm256_storeu_si256((__m256i *)&out[lane + j][at], _mm256_permute2x128_si256(quad[j], quad[j + 4], 0x20));
            _mm256_storeu_si256((__m256i *)&out[lane + j + 4][at], _mm256_permute2x128_si256(quad[j], quad[j + 4], 0x31));
        }
    }
}
#endif

/* Compute the states of N vectors of keys. A macro, because C has no type arguments. A key below 2^32 has one word, which
 * init_by_array uses repeatedly; it adds the word's number within the key. */
#define SHML_SEED_BODY(put, GROUP, vector, N) \
    enum { WIDTH = N * sizeof(vector) / 4, WORDS = SHML_TWISTER_WORDS }; \
    vector group[GROUP][N], mixed[WORDS][N], added[2][N], p[N], m[N]; \
    uint32_t low[WIDTH], high[WIDTH], first[WIDTH]; \
    for (int lane = 0; lane < WIDTH; lane++) { \
        uint32_t top = (uint32_t)(keys[lane] >> 32); \
        low[lane] = (uint32_t)keys[lane]; \
        high[lane] = top ? top + 1 : low[lane]; \
        first[lane] = base[0]; \
    } \
    memcpy(p, low, sizeof p); \
    memcpy(m, first, sizeof m); \
    memcpy(added[1], low, sizeof p); \
    memcpy(added[0], high, sizeof p); \
    for (uint32_t i = 0; i < WORDS; i += GROUP) { \
        for (uint32_t j = i; j < i + GROUP; j++) { /* two chains a vector, each of which depends only on itself */ \
            for (int v = 0; v < N; v++) { \
                group[j - i][v] = p[v]; \
                p[v] = (p[v] ^ (p[v] >> 30)) * 1812433253u + (j + 1); \
                mixed[j][v] = m[v]; \
                m[v] = (((m[v] ^ (m[v] >> 30)) * 1664525u) ^ base[j + 1]) + added[(j + 1) & 1][v]; \
            } \
        } \
        put((const uint32_t *)group, WIDTH, i, out->plain); \
    } \
    for (int v = 0; v < N; v++) { /* one more word, which is the second again */ \
        m[v] = mixed[WORDS - 1][v]; \
        mixed[1][v] = m[v] = (((m[v] ^ (m[v] >> 30)) * 1664525u) ^ mixed[1][v]) + added[0][v]; \
    } \
    for (uint32_t i = 0; i < WORDS; i += GROUP) { \
        for (uint32_t j = i < 2 ? 2 : i; j < i + GROUP; j++) \
            for (int v = 0; v < N; v++) \
                group[j - i][v] = m[v] = (((m[v] ^ (m[v] >> 30)) * 1566083941u) ^ mixed[j][v]) - j; \
        put((const uint32_t *)group, WIDTH, i, out->mixed); \
    } \
    for (int v = 0; v < N; v++) m[v] = (((m[v] ^ (m[v] >> 30)) * 1566083941u) ^ mixed[1][v]) - 1u; \
    memcpy(low, m, sizeof low); \
    for (int lane = 0; lane < WIDTH; lane++) { \
        out->mixed[lane][0] = 0x80000000u; \
        out->mixed[lane][1] = low[lane]; \
    }

#define SHML_SEED(target, suffix, group, vector, N) \
    target static void shml_seed_##suffix(const uint32_t *base, const uint64_t *keys, shml_twisters *out) { \
        SHML_SEED_BODY(shml_put_##suffix, group, vector, N) \
    }

SHML_SEED(, one, 4, uint32_t, 1)
SHML_SEED(, base, 4, shml_vector4, 4)
#ifdef __x86_64__
SHML_SEED(__attribute__((target("avx2"))), avx2, 8, shml_vector8, 2)
#endif

/* Compute the states of the first `count` keys, at most SHML_LANES. All of `keys` is read. isa: as numbered by shml_best_isa(). */
static inline void shml_seed_twisters(const uint32_t *base, const uint64_t *keys, int count, int isa, shml_twisters *out) {
    if (count == 1)
        shml_seed_one(base, keys, out);
#ifdef __x86_64__
    else if (isa >= 1) /* wider ones gain nothing: the chains' latency is the limit */
        shml_seed_avx2(base, keys, out);
#endif
    else
        shml_seed_base(base, keys, out);
}

#endif
