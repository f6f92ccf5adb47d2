/* CRC-32C (Castagnoli) of memory, alone or while copying it.

   The instruction takes 3 cycles and one can start every cycle, so three stretches of a block are summed at once and combined:
   the sum of the first is advanced over as many zero bytes as the others have, a linear map stored in four tables of 256 words.
   The copy uses the same registers, so each byte is read once. There are two block sizes, so short inputs have three stretches
   too; the long one is not a multiple of 4096, because then loads of one stretch would wait for stores of another whose
   addresses agree in their low 12 bits.

   SSE4.2 and ARMv8's crc extension are detected at run time; without them, eight tables process eight bytes per step. On
   processors with 512-bit carry-less multiplication, runs that are summed without a copy use it.

   Source: Mark Adler, crc32c.c, https://stackoverflow.com/a/17646775 (the zero operator); Intel, "Fast CRC Computation for iSCSI
   Polynomial Using CRC32 Instruction" (three stretches). */

#ifndef SHMLOAD_CRC32C_H
#define SHMLOAD_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define CRC_TARGET __attribute__((target("sse4.2,crc32"))) /* clang treats it as a separate feature */
#define CRC_EIGHT(crc, x) _mm_crc32_u64(crc, x)
#define CRC_ONE(crc, x) _mm_crc32_u8((uint32_t)(crc), x)
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_EIGHT(crc, x) __crc32cd((uint32_t)(crc), x)
#define CRC_ONE(crc, x) __crc32cb((uint32_t)(crc), x)
#endif

#define CRC_POLYNOMIAL 0x82F63B78u /* reflected */
#define CRC_LONG 5184u             /* bytes in a stretch of a long block */
#define CRC_SHORT 256u             /* bytes in a stretch of a short block */
#define CRC_AHEAD 512u             /* bytes that a streamed copy prefetches; measured */

static uint32_t crc_tables[8][256]; /* [k][b]: the sum of byte b with k zero bytes after it */
static uint32_t crc_over_long[4][256]; /* [k][b]: byte k of a sum, advanced over CRC_LONG zero bytes */
static uint32_t crc_over_short[4][256];
static int crc_has_instruction; /* whether this processor has the instruction */
static int crc_is_wide; /* and 512-bit carry-less multiplication */

static void crc_make_zeros(uint32_t tables[4][256], size_t nbytes) {
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = 1u << bit;
        for (size_t i = 0; i < nbytes; i++) crc = (crc >> 8) ^ crc_tables[0][crc & 0xff];
        bits[bit] = crc;
    }
    for (int k = 0; k < 4; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (byte >> bit & 1) crc ^= bits[8 * k + bit];
            tables[k][byte] = crc;
        }
}

/* Fill the tables; call once, before anything else here. */
static void crc_start(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >> 1) ^ CRC_POLYNOMIAL : crc >> 1;
        crc_tables[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            crc_tables[k][byte] = (crc_tables[k - 1][byte] >> 8) ^ crc_tables[0][crc_tables[k - 1][byte] & 0xff];
    crc_make_zeros(crc_over_long, CRC_LONG);
    crc_make_zeros(crc_over_short, CRC_SHORT);
#if defined(__x86_64__)
    crc_has_instruction = shml_cpu_has(SHML_CPU_SSE42);
    crc_is_wide = shml_cpu_has(SHML_CPU_SSE42 | SHML_CPU_VPCLMULQDQ);
#elif defined(__aarch64__)
    crc_has_instruction = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

static inline uint32_t crc_carried(uint32_t tables[4][256], uint32_t crc) {
    return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^ tables[3][crc >> 24];
}

/* Return the sum without the instruction; `crc` and the result are not inverted. */
static uint32_t crc_by_tables(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    if (to && nbytes) memcpy(to, at, nbytes);
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        uint64_t x;
        memcpy(&x, at, 8); /* little-endian, like all supported machines */
        x ^= crc;
        crc = crc_tables[7][x & 0xff] ^ crc_tables[6][x >> 8 & 0xff] ^ crc_tables[5][x >> 16 & 0xff] ^
              crc_tables[4][x >> 24 & 0xff] ^ crc_tables[3][x >> 32 & 0xff] ^ crc_tables[2][x >> 40 & 0xff] ^
              crc_tables[1][x >> 48 & 0xff] ^ crc_tables[0][x >> 56];
    }
    while (nbytes--) crc = (crc >> 8) ^ crc_tables[0][(crc ^ *at++) & 0xff];
    return crc;
}

#ifdef CRC_TARGET

/* Process three stretches of `block` bytes as often as they fit. */
#define CRC_BLOCKS(block, tables)                                                      \
    while (nbytes >= 3 * (size_t)(block)) {                                            \
        uint64_t a = crc, b = 0, c = 0;                                                \
        for (size_t i = 0; i < (block); i += 8) {                                      \
            uint64_t x, y, z;                                                          \
            memcpy(&x, at + i, 8);                                                     \
            memcpy(&y, at + i + (block), 8);                                           \
            memcpy(&z, at + i + 2 * (block), 8);                                       \
            if (copies) {                                                              \
                memcpy(to + i, &x, 8);                                                 \
                memcpy(to + i + (block), &y, 8);                                       \
                memcpy(to + i + 2 * (block), &z, 8);                                   \
            }                                                                          \
            a = CRC_EIGHT(a, x);                                                       \
            b = CRC_EIGHT(b, y);                                                       \
            c = CRC_EIGHT(c, z);                                                       \
        }                                                                              \
        crc = crc_carried(tables, (uint32_t)a) ^ (uint32_t)b;                          \
        crc = crc_carried(tables, (uint32_t)crc) ^ (uint32_t)c;                        \
        at += 3 * (block);                                                             \
        if (copies) to += 3 * (block);                                                 \
        nbytes -= 3 * (size_t)(block);                                                 \
    }

CRC_TARGET __attribute__((always_inline)) static inline uint32_t crc_by_instruction(
    uint64_t crc, uint8_t *restrict to, const uint8_t *restrict at, size_t nbytes, const int copies) {
    CRC_BLOCKS(CRC_LONG, crc_over_long)
    CRC_BLOCKS(CRC_SHORT, crc_over_short)
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        uint64_t x;
        memcpy(&x, at, 8);
        if (copies) memcpy(to, &x, 8), to += 8;
        crc = CRC_EIGHT(crc, x);
    }
    for (; nbytes; nbytes--, at++) {
        if (copies) *to++ = *at;
        crc = CRC_ONE(crc, *at);
    }
    return (uint32_t)crc;
}

#if defined(__x86_64__)

/* Advance `x` by `distance` bytes onto `next`, so that the sum covers both: two carry-less multiplications. */
#define CRC_FOLDED(x, next, distance) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, distance, 0x00), _mm512_clmulepi64_epi128(x, distance, 0x11), next, 0x96)
#define CRC_FOLDED_16(x, next) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by_16, 0x00), _mm_clmulepi64_si128(x, by_16, 0x11)), next)

/* Sum a run of 256 bytes or more, 256 at a time, in a third of the time of the three stretches; this matters for records of some
   KiB, which are summed separately. Source: V. Gopal et al., Fast CRC computation for generic polynomials using PCLMULQDQ, 2009;
   the factors are x^(8n+32) and x^(8n-32) modulo the polynomial for a distance of n bytes, as in P. Cawley's fast-crc32. */
__attribute__((target("sse4.2,crc32,pclmul,avx512f,avx512vl,vpclmulqdq"))) static uint32_t crc_of_wide_run(
    uint32_t crc, const uint8_t *at, size_t nbytes) {
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_setr_epi32((int)0xdcb17aa4, 0, (int)0xb9e02b86, 0));
    const __m512i by_64 = _mm512_broadcast_i32x4(_mm_setr_epi32(0x740eef02, 0, (int)0x9e4addf8, 0));
    const __m128i by_16 = _mm_setr_epi32((int)0xf20c0dfe, 0, 0x493c7d27, 0);
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i b = _mm512_loadu_si512(at + 64), c = _mm512_loadu_si512(at + 128), d = _mm512_loadu_si512(at + 192);
    for (at += 256, nbytes -= 256; nbytes >= 256; at += 256, nbytes -= 256) {
        a = CRC_FOLDED(a, _mm512_loadu_si512(at), by_256);
        b = CRC_FOLDED(b, _mm512_loadu_si512(at + 64), by_256);
        c = CRC_FOLDED(c, _mm512_loadu_si512(at + 128), by_256);
        d = CRC_FOLDED(d, _mm512_loadu_si512(at + 192), by_256);
    }
    b = CRC_FOLDED(a, b, by_64);
    c = CRC_FOLDED(b, c, by_64);
    d = CRC_FOLDED(c, d, by_64);
    for (; nbytes >= 64; at += 64, nbytes -= 64) d = CRC_FOLDED(d, _mm512_loadu_si512(at), by_64);
    __m128i last = CRC_FOLDED_16(_mm512_extracti32x4_epi32(d, 0), _mm512_extracti32x4_epi32(d, 1));
    last = CRC_FOLDED_16(last, _mm512_extracti32x4_epi32(d, 2));
    last = CRC_FOLDED_16(last, _mm512_extracti32x4_epi32(d, 3));
    uint64_t sum = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(last));
    sum = _mm_crc32_u64(sum, (uint64_t)_mm_extract_epi64(last, 1));
    return crc_by_instruction(sum, NULL, at, nbytes, 0);
}

#define CRC_WIDE_FROM 512u /* bytes of a run from which folding is faster */

#endif

CRC_TARGET static uint32_t crc_of_run(uint32_t crc, const uint8_t *at, size_t nbytes) {
#if defined(__x86_64__)
    if (crc_is_wide && nbytes >= CRC_WIDE_FROM) return crc_of_wide_run(crc, at, nbytes);
#endif
    return crc_by_instruction(crc, NULL, at, nbytes, 0);
}

CRC_TARGET static uint32_t crc_of_copy(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    return crc_by_instruction(crc, to, at, nbytes, 1);
}

#if defined(__x86_64__)

/* A copy for data that its reader loads from memory anyway: stores that bypass the caches do not fetch what they overwrite. */
CRC_TARGET static uint32_t crc_of_stream(uint64_t crc, uint8_t *restrict to, const uint8_t *restrict at, size_t nbytes) {
    const size_t head = -(uintptr_t)to & 63;
    if (nbytes < head + 3 * (size_t)CRC_LONG) return crc_of_copy((uint32_t)crc, to, at, nbytes);
    crc = crc_of_copy((uint32_t)crc, to, at, head); /* whole cache lines from here on: CRC_LONG is a multiple of one */
    for (to += head, at += head, nbytes -= head; nbytes >= 3 * (size_t)CRC_LONG; nbytes -= 3 * (size_t)CRC_LONG) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t line = 0; line < CRC_LONG; line += 64) {
            _mm_prefetch((const char *)at + line + CRC_AHEAD, _MM_HINT_T0); /* only a hint; the address may be past the end */
            _mm_prefetch((const char *)at + line + CRC_LONG + CRC_AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)at + line + 2 * CRC_LONG + CRC_AHEAD, _MM_HINT_T0);
            for (size_t i = line; i < line + 64; i += 8) {
                uint64_t x, y, z;
                memcpy(&x, at + i, 8);
                memcpy(&y, at + i + CRC_LONG, 8);
                memcpy(&z, at + i + 2 * CRC_LONG, 8);
                _mm_stream_si64((long long *)(to + i), (long long)x);
                _mm_stream_si64((long long *)(to + i + CRC_LONG), (long long)y);
                _mm_stream_si64((long long *)(to + i + 2 * CRC_LONG), (long long)z);
                a = CRC_EIGHT(a, x);
                b = CRC_EIGHT(b, y);
                c = CRC_EIGHT(c, z);
            }
        }
        crc = crc_carried(crc_over_long, (uint32_t)a) ^ (uint32_t)b;
        crc = crc_carried(crc_over_long, (uint32_t)crc) ^ (uint32_t)c;
        at += 3 * CRC_LONG;
        to += 3 * CRC_LONG;
    }
    _mm_sfence(); /* these stores are not ordered: the process that reads the batch must see them */
    return crc_of_copy((uint32_t)crc, to, at, nbytes);
}

#else

static uint32_t crc_of_stream(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    return crc_of_copy(crc, to, at, nbytes);
}

#endif

#else

static uint32_t crc_of_run(uint32_t crc, const uint8_t *at, size_t nbytes) { return crc_by_tables(crc, NULL, at, nbytes); }

static uint32_t crc_of_copy(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    return crc_by_tables(crc, to, at, nbytes);
}

static uint32_t crc_of_stream(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    return crc_by_tables(crc, to, at, nbytes);
}

#endif

/* Return the CRC-32C of the data summed in `crc` followed by these bytes; copy them to `to` unless it is NULL. */
static inline uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    if (!crc_has_instruction) return ~crc_by_tables(~crc, to, at, nbytes);
    return ~(to ? crc_of_copy(~crc, to, at, nbytes) : crc_of_run(~crc, at, nbytes));
}

/* The same with a copy that bypasses the caches where supported: for data larger than the caches when it is read again. */
static inline uint32_t crc32c_streamed(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) {
    if (!crc_has_instruction) return ~crc_by_tables(~crc, to, at, nbytes);
    return ~crc_of_stream(~crc, to, at, nbytes);
}

/* Mask a sum as TFRecord stores it: its author says that a sum over data that contains sums is unsafe. */
static inline uint32_t crc_masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

#endif
