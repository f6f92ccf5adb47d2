/* A copy for data that will have left the caches before it is read: stores that bypass the caches do not fetch the memory they
 * overwrite. The C library's memcpy does so only above a share of the last-level cache, which on servers is tens of megabytes. */
#ifndef SHML_STREAMED_H
#define SHML_STREAMED_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SHML_STREAMED_NBYTES ((size_t)1 << 18) /* least size of such a copy: a batch of such rows does not stay in the caches */

#if defined(__x86_64__)
#include <emmintrin.h>

#define SHML_STREAM_AHEAD 512u /* bytes fetched ahead */

static inline void shml_copy_streamed(uint8_t *restrict to, const uint8_t *restrict at, size_t nbytes) {
    size_t head = -(uintptr_t)to & 63;
    if (head > nbytes) head = nbytes;
    memcpy(to, at, head); /* whole cache lines from here on */
    for (to += head, at += head, nbytes -= head; nbytes >= 64; to += 64, at += 64, nbytes -= 64) {
        _mm_prefetch((const char *)at + SHML_STREAM_AHEAD, _MM_HINT_T0); /* only a hint; the address may be past the end */
        for (size_t i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(at + i)));
    }
    _mm_sfence(); /* these stores are not ordered: the process that reads the batch must see them */
    memcpy(to, at, nbytes);
}

#else

static inline void shml_copy_streamed(uint8_t *restrict to, const uint8_t *restrict at, size_t nbytes) {
    memcpy(to, at, nbytes);
}

#endif
#endif
