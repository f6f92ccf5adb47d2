/* Antialiased resampling of a part of an 8-bit RGB image, one row of the result at a time.
 *
 * Definition: every pixel of the result is the mean of the source pixels weighted by a triangle around its center, as wide as the
 * reduction (at least two source pixels), first down the columns, then along the rows. Pillow's BILINEAR is the same sum, but
 * starts with the rows and rounds to 8 bits in between; here the intermediate has 15 bits, so the results differ by at most one
 * level.
 *
 * All arithmetic after the weights uses integers: a machine with other vector instructions, or none, gives the same bytes.
 *
 * Source of the definition: P. Heckbert, Fundamentals of Texture Mapping and Image Warping, 1989; of the pairing of taps for
 * multiply-add instructions: Pillow-SIMD (https://github.com/uploadcare/pillow-simd).
 */
#ifndef SHMLOAD_RESAMPLE_H
#define SHMLOAD_RESAMPLE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define RESAMPLE_BETWEEN_BITS 7 /* fraction of a level between the passes: 255 << 7 still fits an int16 */
#define RESAMPLE_DOWN_BITS 22   /* most bits of a column's weights: 255 << 22 is an int32 */
#define RESAMPLE_ALONG_BITS 16  /* most bits of a row's weights: 255 << (7 + 16) is an int32 */

enum { RESAMPLE_PLAIN, RESAMPLE_SSE2, RESAMPLE_AVX2 }; /* vector instructions; all give the same bytes */

typedef struct {
    int32_t start; /* first source pixel */
    int32_t count; /* source pixels, at least 1 */
} resample_span;

typedef struct {
    resample_span *spans; /* one for each pixel of the result, in its order */
    int16_t *weights;     /* `stride` for each, 0 after the first `count`; they add up to 1 << bits */
    int32_t stride;       /* even */
    int32_t pairs;        /* pairs of weights of the longest span */
    int32_t bits;
    int32_t first, end;   /* source pixels that any span uses */
} resample_axis;

/* Return the number of weights that one pixel of the result can have, plus one. */
static inline int32_t resample_stride(double length, int32_t size, int32_t available) {
    double reduction = length / size;
    double most = ceil(reduction < 1 ? 1 : reduction) * 2 + 2;
    int32_t stride = most < available ? (int32_t)most : available;
    return (stride + 2) & ~1;
}

/* Fill an axis: `size` pixels from the source's [from, from + length), of which only pixels in [low, high) exist. `exact` has
 * room for size x stride doubles. */
static void resample_fill(
    resample_axis *axis, double from, double length, int32_t size, int32_t low, int32_t high, int32_t most_bits, int is_flipped,
    double *exact
) {
    double scale = length / size, radius = scale < 1 ? 1 : scale, slope = 1 / radius, largest = 0;
    int32_t longest = 1;
    axis->first = high;
    axis->end = low;
    for (int32_t i = 0; i < size; i++) {
        double center = from + ((is_flipped ? size - 1 - i : i) + 0.5) * scale, total = 0;
        int32_t start = (int32_t)floor(center - radius + 0.5), end = (int32_t)floor(center + radius + 0.5), count = 0;
        double *weights = exact + (size_t)i * axis->stride;
        start = start < low ? low : start > high - 1 ? high - 1 : start;
        end = end > high ? high : end <= start ? start + 1 : end;
        for (int32_t x = start; x < end && count < axis->stride - 1; x++) {
            double weight = 1 - fabs(x + 0.5 - center) * slope;
            if (weight <= 0) {
                if (count)
                    break;
                if (x + 1 < end) {
                    start = x + 1;
                    continue;
                }
                weight = 1; /* nothing in reach: use the nearest pixel */
            }
            weights[count++] = weight;
            total += weight;
        }
        total = 1 / total;
        for (int32_t k = 0; k < count; k++) {
            weights[k] *= total;
            largest = weights[k] > largest ? weights[k] : largest;
        }
        axis->spans[i] = (resample_span){start, count};
        longest = count > longest ? count : longest;
        axis->first = start < axis->first ? start : axis->first;
        axis->end = start + count > axis->end ? start + count : axis->end;
    }
    axis->pairs = (longest + 1) / 2;
    axis->bits = 14;
    while (axis->bits < most_bits && largest * (double)(1 << (axis->bits + 1)) <= 32766)
        axis->bits++;
    int32_t one = 1 << axis->bits;
    for (int32_t i = 0; i < size; i++) { /* the rounding error of a weight is carried to the next */
        double sum = 0;
        int32_t given = 0, count = axis->spans[i].count;
        int16_t *weights = axis->weights + (size_t)i * axis->stride;
        for (int32_t k = 0; k < count; k++) {
            sum += exact[(size_t)i * axis->stride + k];
            int32_t upto = k + 1 < count ? (int32_t)(sum * one + 0.5) : one;
            weights[k] = (int16_t)(upto - given);
            given = upto;
        }
        memset(weights + count, 0, (axis->stride - count) * sizeof(int16_t));
    }
}

/* Make an axis relative to the source's `count` pixels from `origin` on. Return 0 if it needs other pixels. */
static int resample_shift(resample_axis *axis, int32_t size, int32_t origin, int32_t count) {
    if (axis->first < origin || axis->end > origin + count)
        return 0;
    for (int32_t i = 0; i < size; i++)
        axis->spans[i].start -= origin;
    axis->first -= origin;
    axis->end -= origin;
    return 1;
}

typedef struct {
    resample_axis down, along;
    const uint8_t *source;   /* (rows, columns, 3) */
    size_t row_nbytes;       /* of the source */
    int32_t height, width;   /* of the result */
    int is_planar;           /* the result is (3, height, width), otherwise (height, width, 3) */
    int vectors;             /* RESAMPLE_... */
    const float *levels;     /* (3, 256): the value of each level of each channel; NULL: the level itself, one byte */
    void *result;
    int16_t *between;        /* room for resample_between values, zeroed */
    int32_t *wide;           /* room for (width + 3) / 4 x 4 x along.pairs x 4: the row weights in the order of the vector loops */
    uint8_t *row;            /* room for 3 x (width + 4) bytes */
} resample_job;

/* Return the number of values between the passes, with room after them for spans shorter than the longest. */
static inline size_t resample_between(const resample_axis *along) {
    return (size_t)(along->end - along->first) * 3 + (size_t)along->pairs * 6 + 8;
}

/* Write the row weights for two pixels at a time: for each pair of taps, four copies for the first pixel, four for the second. */
static void resample_widen(resample_job *job) {
    const resample_axis *along = &job->along;
    int32_t *to = job->wide;
    for (int32_t x = 0; x < ((job->width + 3) & ~3); x += 2)
        for (int32_t k = 0; k < along->pairs; k++)
            for (int32_t i = x; i < x + 2; i++, to += 4) {
                int32_t pair;
                memcpy(&pair, along->weights + (size_t)(i < job->width ? i : job->width - 1) * along->stride + 2 * k, 4);
                to[0] = to[1] = to[2] = to[3] = pair;
            }
}

/* Compute one row between the passes, from its value `begin` on: the weighted mean of rows of the source. */
static void resample_down_plain(const resample_job *job, int32_t y, int32_t begin, int32_t width) {
    const resample_axis *down = &job->down;
    const uint8_t *top = job->source + down->spans[y].start * job->row_nbytes + (size_t)job->along.first * 3;
    const int16_t *weights = down->weights + (size_t)y * down->stride;
    int32_t shift = down->bits - RESAMPLE_BETWEEN_BITS;
    for (int32_t i = begin; i < width; i++) {
        int32_t sum = 1 << (shift - 1);
        for (int32_t k = 0; k < down->spans[y].count; k++)
            sum += weights[k] * top[k * job->row_nbytes + i];
        job->between[i] = (int16_t)(sum >> shift);
    }
}

/* Compute four pixels of the result from `x` on, as bytes r, g, b, undefined. */
static void resample_along_plain(const resample_job *job, int32_t x, uint32_t pixels[4]) {
    const resample_axis *along = &job->along;
    int32_t shift = along->bits + RESAMPLE_BETWEEN_BITS;
    for (int32_t i = 0; i < 4; i++) {
        int32_t to = x + i < job->width ? x + i : job->width - 1;
        const int16_t *at = job->between + (size_t)(along->spans[to].start - along->first) * 3;
        const int16_t *weights = along->weights + (size_t)to * along->stride;
        uint8_t found[4] = {0, 0, 0, 0};
        for (int c = 0; c < 3; c++) {
            int32_t sum = 1 << (shift - 1);
            for (int32_t k = 0; k < along->spans[to].count; k++)
                sum += weights[k] * at[3 * k + c];
            found[c] = (uint8_t)(sum >> shift);
        }
        memcpy(&pixels[i], found, 4);
    }
}

#ifdef __SSE2__
/* Like resample_down_plain, 16 values and two rows at a time. */
static void resample_down_sse2(const resample_job *job, int32_t y, int32_t begin, int32_t width) {
    const resample_axis *down = &job->down;
    const int16_t *weights = down->weights + (size_t)y * down->stride;
    const uint8_t *top = job->source + down->spans[y].start * job->row_nbytes + (size_t)job->along.first * 3;
    const int32_t count = down->spans[y].count, bits = down->bits - RESAMPLE_BETWEEN_BITS;
    const __m128i zero = _mm_setzero_si128(), shift = _mm_cvtsi32_si128(bits), half = _mm_set1_epi32(1 << (bits - 1));
    if (width < 16) {
        resample_down_plain(job, y, begin, width);
        return;
    }
    for (int32_t i = begin; i < width; i += 16) {
        if (i > width - 16)
            i = width - 16; /* compute the last values twice instead of one by one */
        __m128i a = half, b = half, c = half, d = half;
        const uint8_t *row = top + i;
        for (int32_t k = 0; k < count; k += 2, row += 2 * job->row_nbytes) {
            const uint8_t *next = k + 1 < count ? row + job->row_nbytes : row; /* with weight 0 */
            int32_t both;
            memcpy(&both, weights + k, 4);
            __m128i one = _mm_loadu_si128((const __m128i *)row), two = _mm_loadu_si128((const __m128i *)next);
            __m128i low = _mm_unpacklo_epi8(one, two), high = _mm_unpackhi_epi8(one, two), pair = _mm_set1_epi32(both);
            a = _mm_add_epi32(a, _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), pair));
            b = _mm_add_epi32(b, _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), pair));
            c = _mm_add_epi32(c, _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), pair));
            d = _mm_add_epi32(d, _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), pair));
        }
        a = _mm_packs_epi32(_mm_sra_epi32(a, shift), _mm_sra_epi32(b, shift));
        c = _mm_packs_epi32(_mm_sra_epi32(c, shift), _mm_sra_epi32(d, shift));
        _mm_storeu_si128((__m128i *)(job->between + i), a);
        _mm_storeu_si128((__m128i *)(job->between + i + 8), c);
    }
}

/* Like resample_along_plain, all channels and two source pixels at a time. */
static inline void resample_along_sse2(const resample_job *job, int32_t x, uint32_t pixels[4]) {
    const resample_axis *along = &job->along;
    const __m128i shift = _mm_cvtsi32_si128(along->bits + RESAMPLE_BETWEEN_BITS);
    const __m128i half = _mm_set1_epi32(1 << (along->bits + RESAMPLE_BETWEEN_BITS - 1));
    __m128i sums[4];
    for (int32_t i = 0; i < 4; i++) {
        int32_t to = x + i < job->width ? x + i : job->width - 1;
        const int16_t *at = job->between + (size_t)(along->spans[to].start - along->first) * 3;
        const __m128i *pairs = (const __m128i *)(job->wide + ((size_t)((x + i) / 2) * along->pairs * 2 + (i & 1)) * 4);
        __m128i sum = half;
        for (int32_t k = 0; k < along->pairs; k++, at += 6, pairs += 2) {
            __m128i one = _mm_loadl_epi64((const __m128i *)at), two = _mm_loadl_epi64((const __m128i *)(at + 3));
            sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_unpacklo_epi16(one, two), _mm_loadu_si128(pairs)));
        }
        sums[i] = _mm_sra_epi32(sum, shift);
    }
    sums[0] = _mm_packs_epi32(sums[0], sums[1]);
    sums[2] = _mm_packs_epi32(sums[2], sums[3]);
    _mm_storeu_si128((__m128i *)pixels, _mm_packus_epi16(sums[0], sums[2]));
}

/* Like resample_down_sse2, 32 values at a time. */
__attribute__((target("avx2"))) static void resample_down_avx2(const resample_job *job, int32_t y, int32_t width) {
    const resample_axis *down = &job->down;
    const int16_t *weights = down->weights + (size_t)y * down->stride;
    const uint8_t *top = job->source + down->spans[y].start * job->row_nbytes + (size_t)job->along.first * 3;
    const int32_t count = down->spans[y].count, bits = down->bits - RESAMPLE_BETWEEN_BITS;
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (bits - 1));
    const __m128i shift = _mm_cvtsi32_si128(bits);
    if (width < 32) {
        resample_down_sse2(job, y, 0, width);
        return;
    }
    for (int32_t i = 0; i < width; i += 32) {
        if (i > width - 32)
            i = width - 32;
        __m256i a = half, b = half, c = half, d = half;
        const uint8_t *row = top + i;
        for (int32_t k = 0; k < count; k += 2, row += 2 * job->row_nbytes) {
            const uint8_t *next = k + 1 < count ? row + job->row_nbytes : row;
            int32_t both;
            memcpy(&both, weights + k, 4);
            __m256i one = _mm256_loadu_si256((const __m256i *)row), two = _mm256_loadu_si256((const __m256i *)next);
            __m256i low = _mm256_unpacklo_epi8(one, two), high = _mm256_unpackhi_epi8(one, two), pair = _mm256_set1_epi32(both);
            a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), pair)); /* values 0-3, 16-19 */
            b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), pair)); /* 4-7, 20-23 */
            c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), pair));
            d = _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), pair));
        }
        a = _mm256_packs_epi32(_mm256_sra_epi32(a, shift), _mm256_sra_epi32(b, shift)); /* 0-7, 16-23 */
        c = _mm256_packs_epi32(_mm256_sra_epi32(c, shift), _mm256_sra_epi32(d, shift)); /* 8-15, 24-31 */
        _mm256_storeu_si256((__m256i *)(job->between + i), _mm256_permute2x128_si256(a, c, 0x20));
        _mm256_storeu_si256((__m256i *)(job->between + i + 16), _mm256_permute2x128_si256(a, c, 0x31));
    }
}

/* Like resample_along_sse2, two pixels at a time. */
__attribute__((target("avx2"))) static inline __m256i resample_two_avx2(const resample_job *job, int32_t x) {
    const resample_axis *along = &job->along;
    const __m256i paired = _mm256_setr_epi8( /* r0 g0 b0 r1 g1 b1 ... -> r0 r1 g0 g1 b0 b1 */
        0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1, 0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1
    );
    int32_t one = x < job->width ? x : job->width - 1, two = x + 1 < job->width ? x + 1 : job->width - 1;
    const int16_t *left = job->between + (size_t)(along->spans[one].start - along->first) * 3;
    const int16_t *right = job->between + (size_t)(along->spans[two].start - along->first) * 3;
    const __m256i *pairs = (const __m256i *)(job->wide + (size_t)(x / 2) * along->pairs * 8);
    __m256i sum = _mm256_set1_epi32(1 << (along->bits + RESAMPLE_BETWEEN_BITS - 1));
    for (int32_t k = 0; k < along->pairs; k++, left += 6, right += 6) {
        __m256i both = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)left));
        both = _mm256_shuffle_epi8(_mm256_inserti128_si256(both, _mm_loadu_si128((const __m128i *)right), 1), paired);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_loadu_si256(pairs + k)));
    }
    return _mm256_sra_epi32(sum, _mm_cvtsi32_si128(along->bits + RESAMPLE_BETWEEN_BITS));
}

__attribute__((target("avx2"))) static inline void resample_along_avx2(const resample_job *job, int32_t x, uint32_t pixels[4]) {
    __m256i all = _mm256_packs_epi32(resample_two_avx2(job, x), resample_two_avx2(job, x + 2)); /* pixels 0 2, 1 3 */
    __m128i found = _mm_packus_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)); /* 0 2 1 3 */
    _mm_storeu_si128((__m128i *)pixels, _mm_shuffle_epi32(found, 0xD8));
}
#endif

/* Copy four pixels of r, g, b, undefined to the three planes of a row. */
static inline void resample_to_planes(const uint32_t pixels[4], uint8_t *red, uint8_t *green, uint8_t *blue) {
#ifdef __SSE2__
    __m128i all = _mm_loadu_si128((const __m128i *)pixels);        /* r0 g0 b0 x0 r1 ... */
    all = _mm_unpacklo_epi8(all, _mm_srli_si128(all, 8));          /* r0 r2 g0 g2 b0 b2 x0 x2 r1 r3 ... */
    all = _mm_unpacklo_epi8(all, _mm_srli_si128(all, 8));          /* r0 r1 r2 r3 g0 ... */
    int32_t r = _mm_cvtsi128_si32(all), g = _mm_cvtsi128_si32(_mm_srli_si128(all, 4)), b = _mm_cvtsi128_si32(_mm_srli_si128(all, 8));
    memcpy(red, &r, 4);
    memcpy(green, &g, 4);
    memcpy(blue, &b, 4);
#else
    const uint8_t *bytes = (const uint8_t *)pixels;
    for (int i = 0; i < 4; i++) {
        red[i] = bytes[4 * i];
        green[i] = bytes[4 * i + 1];
        blue[i] = bytes[4 * i + 2];
    }
#endif
}

/* Write four pixels from `x` on to `row`: end to end, or as planes of width + 4. */
static inline void resample_put(const resample_job *job, int32_t x, const uint32_t pixels[4]) {
    size_t plane = (size_t)job->width + 4;
    if (job->is_planar)
        resample_to_planes(pixels, job->row + x, job->row + plane + x, job->row + 2 * plane + x);
    else
        for (int i = 0; i < 4; i++)
            memcpy(job->row + 3 * (size_t)(x + i), &pixels[i], 4); /* the fourth byte is overwritten by the next pixel */
}

/* Copies the job, because the compiler must assume that a written byte could be part of the original. */
static void resample_row_plain(const resample_job *job, int32_t y, int32_t num_between) {
    const resample_job own = *job;
    uint32_t pixels[4];
    resample_down_plain(job, y, 0, num_between);
    for (int32_t x = 0; x < own.width; x += 4) {
        resample_along_plain(&own, x, pixels);
        resample_put(&own, x, pixels);
    }
}

#ifdef __SSE2__
static void resample_row_sse2(const resample_job *job, int32_t y, int32_t num_between) {
    const resample_job own = *job;
    uint32_t pixels[4];
    resample_down_sse2(job, y, 0, num_between);
    for (int32_t x = 0; x < own.width; x += 4) {
        resample_along_sse2(&own, x, pixels);
        resample_put(&own, x, pixels);
    }
}

__attribute__((target("avx2"))) static void resample_row_avx2(const resample_job *job, int32_t y, int32_t num_between) {
    const resample_job own = *job;
    uint32_t pixels[4];
    resample_down_avx2(job, y, num_between);
    for (int32_t x = 0; x < own.width; x += 4) {
        resample_along_avx2(&own, x, pixels);
        resample_put(&own, x, pixels);
    }
}
#endif

/* Return the best vector instructions of this machine. */
static inline int resample_best(void) {
#ifdef __SSE2__
    return shml_cpu_has(SHML_CPU_AVX2) ? RESAMPLE_AVX2 : RESAMPLE_SSE2;
#else
    return RESAMPLE_PLAIN;
#endif
}

/* Store `row` in the result, as bytes or through `levels`. */
static void resample_store(resample_job *job, int32_t y) {
    size_t width = job->width, plane = width * (size_t)job->height;
    if (job->is_planar) {
        for (size_t c = 0; c < 3; c++) {
            const uint8_t *from = job->row + c * (width + 4);
            size_t at = c * plane + (size_t)y * width;
            if (job->levels == NULL) {
                memcpy((uint8_t *)job->result + at, from, width);
            } else {
                float *to = (float *)job->result + at;
                for (size_t x = 0; x < width; x++)
                    to[x] = job->levels[256 * c + from[x]];
            }
        }
    } else if (job->levels == NULL) {
        memcpy((uint8_t *)job->result + (size_t)y * width * 3, job->row, width * 3);
    } else {
        float *to = (float *)job->result + (size_t)y * width * 3;
        for (size_t x = 0; x < width * 3; x += 3)
            for (size_t c = 0; c < 3; c++)
                to[x + c] = job->levels[256 * c + job->row[x + c]];
    }
}

/* Compute the whole result, once the axes are filled. */
static void resample_run(resample_job *job) {
    int32_t num_between = (job->along.end - job->along.first) * 3;
    resample_widen(job);
    for (int32_t y = 0; y < job->height; y++) {
#ifdef __SSE2__
        if (job->vectors == RESAMPLE_AVX2)
            resample_row_avx2(job, y, num_between);
        else if (job->vectors == RESAMPLE_SSE2)
            resample_row_sse2(job, y, num_between);
        else
#endif
            resample_row_plain(job, y, num_between);
        resample_store(job, y);
    }
}

#endif
