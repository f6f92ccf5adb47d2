/* Antialiased resampling of a part of an 8-bit RGB image, one row of the result at a time.
 *
 * Definition: every pixel of the result is the mean of the source pixels weighted by a triangle around its centre, as wide as the
 * reduction (at least two source pixels), first down the columns, then along the rows. Pillow's BILINEAR is the same sum with its
 * rows first and rounded to 8 bits in between; here 15 bits lie between the two, so that the results differ by a level at most.
 *
 * All arithmetic behind the weights is on integers: a machine with other vectors, or none, gives the same bytes.
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
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define RESAMPLE_BETWEEN_BITS 7 /* fraction of a level between the passes: 255 << 7 still is an int16 */
#define RESAMPLE_DOWN_BITS 22   /* most bits of a column's weights: 255 << 22 is an int32 */
#define RESAMPLE_ALONG_BITS 16  /* most bits of a row's weights: 255 << (7 + 16) is an int32 */

typedef struct {
    int32_t start; /* first source pixel */
    int32_t count; /* source pixels, at least 1 */
    int32_t bits;  /* the weights' sum is exactly 1 << bits */
} resample_span;

typedef struct {
    resample_span *spans; /* one for each pixel of the result */
    int16_t *weights;     /* `stride` for each, those behind `count` are 0 */
    int32_t stride;       /* even */
    int32_t first, end;   /* source pixels that any span touches */
} resample_axis;

/* Weights that one pixel of the result can have. */
static inline int32_t resample_stride(double length, int32_t size, int32_t available) {
    double reduction = length / size;
    double most = ceil(reduction < 1 ? 1 : reduction) * 2 + 2;
    int32_t stride = most < available ? (int32_t)most : available;
    return (stride + 2) & ~1;
}

/* Fills an axis: `size` pixels from the source's [from, from + length), of which only pixels in [low, high) exist.
 * `scratch` holds `stride` doubles. */
static void resample_fill(
    resample_axis *axis, double from, double length, int32_t size, int32_t low, int32_t high, int32_t most_bits, double *scratch
) {
    double scale = length / size, radius = scale < 1 ? 1 : scale;
    axis->first = high;
    axis->end = low;
    for (int32_t i = 0; i < size; i++) {
        double center = from + (i + 0.5) * scale, total = 0, largest = 0;
        int32_t start = (int32_t)floor(center - radius + 0.5), end = (int32_t)floor(center + radius + 0.5), count = 0;
        start = start < low ? low : start > high - 1 ? high - 1 : start;
        end = end > high ? high : end <= start ? start + 1 : end;
        for (int32_t x = start; x < end && count < axis->stride - 1; x++) {
            double weight = 1 - fabs(x + 0.5 - center) / radius;
            if (weight <= 0) {
                if (count)
                    break;
                if (x + 1 < end) {
                    start = x + 1;
                    continue;
                }
                weight = 1; /* nothing in reach: the nearest there is */
            }
            scratch[count++] = weight;
            total += weight;
            largest = weight > largest ? weight : largest;
        }
        int32_t bits = 14;
        while (bits < most_bits && largest / total * (double)(1 << (bits + 1)) <= 32766)
            bits++;
        int16_t *weights = axis->weights + (size_t)i * axis->stride;
        double sum = 0;
        int32_t given = 0;
        for (int32_t k = 0; k < count; k++) { /* what is rounded off one weight goes to the next */
            sum += scratch[k];
            int32_t upto = (int32_t)floor(sum / total * (double)(1 << bits) + 0.5);
            weights[k] = (int16_t)(upto - given);
            given = upto;
        }
        for (int32_t k = count; k < axis->stride; k++)
            weights[k] = 0;
        axis->spans[i] = (resample_span){start, count, bits};
        axis->first = start < axis->first ? start : axis->first;
        axis->end = start + count > axis->end ? start + count : axis->end;
    }
}

/* One row of `width` values between the passes: the weighted mean of rows of the source. */
static void resample_down_plain(
    const uint8_t *source, size_t row_nbytes, const resample_span *span, const int16_t *weights, int16_t *to, int32_t begin, int32_t width
) {
    const uint8_t *top = source + (size_t)span->start * row_nbytes;
    int32_t shift = span->bits - RESAMPLE_BETWEEN_BITS;
    for (int32_t i = begin; i < width; i++) {
        int32_t sum = 1 << (shift - 1);
        for (int32_t k = 0; k < span->count; k++)
            sum += weights[k] * top[(size_t)k * row_nbytes + i];
        to[i] = (int16_t)(sum >> shift);
    }
}

/* Pixel `span` of a row between the passes as bytes r, g, b, anything. */
static uint32_t resample_along_plain(const int16_t *row, const resample_span *span, const int16_t *weights, int32_t first) {
    const int16_t *at = row + (size_t)(span->start - first) * 3;
    int32_t shift = span->bits + RESAMPLE_BETWEEN_BITS;
    uint8_t found[4] = {0, 0, 0, 0};
    for (int c = 0; c < 3; c++) {
        int32_t sum = 1 << (shift - 1);
        for (int32_t k = 0; k < span->count; k++)
            sum += weights[k] * at[3 * k + c];
        found[c] = (uint8_t)(sum >> shift);
    }
    uint32_t pixel;
    memcpy(&pixel, found, 4);
    return pixel;
}

#ifdef __SSE2__
static inline __m128i resample_pair(const int16_t *weights) { /* two weights, four times */
    int32_t both;
    memcpy(&both, weights, 4);
    return _mm_set1_epi32(both);
}

/* As resample_down_plain, 16 values at a time, two rows at a time. */
static void resample_down(
    const uint8_t *source, size_t row_nbytes, const resample_span *span, const int16_t *weights, int16_t *to, int32_t width
) {
    if (width < 16) {
        resample_down_plain(source, row_nbytes, span, weights, to, 0, width);
        return;
    }
    const uint8_t *top = source + (size_t)span->start * row_nbytes;
    const __m128i zero = _mm_setzero_si128(), shift = _mm_cvtsi32_si128(span->bits - RESAMPLE_BETWEEN_BITS);
    const __m128i half = _mm_set1_epi32(1 << (span->bits - RESAMPLE_BETWEEN_BITS - 1));
    for (int32_t i = 0; i < width; i += 16) {
        if (i > width - 16)
            i = width - 16; /* the last ones once more, rather than one by one */
        __m128i a = half, b = half, c = half, d = half;
        for (int32_t k = 0; k < span->count; k += 2) {
            const uint8_t *row = top + (size_t)k * row_nbytes + i;
            const uint8_t *next = k + 1 < span->count ? row + row_nbytes : row; /* with weight 0 */
            __m128i one = _mm_loadu_si128((const __m128i *)row), two = _mm_loadu_si128((const __m128i *)next);
            __m128i low = _mm_unpacklo_epi8(one, two), high = _mm_unpackhi_epi8(one, two), pair = resample_pair(weights + k);
            a = _mm_add_epi32(a, _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), pair));
            b = _mm_add_epi32(b, _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), pair));
            c = _mm_add_epi32(c, _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), pair));
            d = _mm_add_epi32(d, _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), pair));
        }
        a = _mm_packs_epi32(_mm_sra_epi32(a, shift), _mm_sra_epi32(b, shift));
        c = _mm_packs_epi32(_mm_sra_epi32(c, shift), _mm_sra_epi32(d, shift));
        _mm_storeu_si128((__m128i *)(to + i), a);
        _mm_storeu_si128((__m128i *)(to + i + 8), c);
    }
}

/* As resample_along_plain, all channels and two source pixels at a time. Reads up to 4 values behind the row. */
static inline uint32_t resample_along(const int16_t *row, const resample_span *span, const int16_t *weights, int32_t first) {
    const int16_t *at = row + (size_t)(span->start - first) * 3;
    int32_t shift = span->bits + RESAMPLE_BETWEEN_BITS;
    __m128i sum = _mm_set1_epi32(1 << (shift - 1));
    for (int32_t k = 0; k < span->count; k += 2, at += 6) {
        __m128i one = _mm_loadl_epi64((const __m128i *)at), two = _mm_loadl_epi64((const __m128i *)(at + 3));
        sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_unpacklo_epi16(one, two), resample_pair(weights + k)));
    }
    sum = _mm_sra_epi32(sum, _mm_cvtsi32_si128(shift));
    sum = _mm_packs_epi32(sum, sum);
    return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
}
#endif

/* Four pixels of r, g, b, anything to the three planes of a row. */
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

typedef struct {
    resample_axis down, along;
    const uint8_t *source;   /* (rows, columns, 3) */
    size_t row_nbytes;       /* of the source */
    int32_t height, width;   /* of the result */
    int is_flipped;          /* left to right */
    int is_planar;           /* the result is (3, height, width), else (height, width, 3) */
    int is_plain;            /* without vector instructions */
    const float *levels;     /* (3, 256): what each level of each channel becomes; NULL: itself, a byte */
    void *result;
    int16_t *between;        /* room for the columns touched x 3 + 8 values, zeroed */
    uint8_t *row;            /* room for 3 x (width + 4) bytes */
} resample_job;

/* One row of the result, in `row`: end to end, or as planes of width + 4. */
static void resample_row(resample_job *job, int32_t y) {
    const resample_axis *down = &job->down, *along = &job->along;
    const resample_span *span = down->spans + y;
    const int16_t *weights = down->weights + (size_t)y * down->stride;
    const uint8_t *left = job->source + (size_t)along->first * 3;
    int32_t num_between = (along->end - along->first) * 3;
#ifdef __SSE2__
    if (!job->is_plain)
        resample_down(left, job->row_nbytes, span, weights, job->between, num_between);
    else
#endif
        resample_down_plain(left, job->row_nbytes, span, weights, job->between, 0, num_between);
    size_t plane = (size_t)job->width + 4;
    for (int32_t x = 0; x < job->width; x += 4) {
        uint32_t pixels[4];
        for (int i = 0; i < 4; i++) {
            int32_t to = x + i < job->width ? x + i : job->width - 1;
            size_t from = job->is_flipped ? job->width - 1 - to : to;
#ifdef __SSE2__
            if (!job->is_plain)
                pixels[i] = resample_along(job->between, along->spans + from, along->weights + from * along->stride, along->first);
            else
#endif
                pixels[i] = resample_along_plain(job->between, along->spans + from, along->weights + from * along->stride, along->first);
        }
        if (job->is_planar)
            resample_to_planes(pixels, job->row + x, job->row + plane + x, job->row + 2 * plane + x);
        else
            for (int i = 0; i < 4; i++)
                memcpy(job->row + 3 * (size_t)(x + i), &pixels[i], 4); /* the fourth byte is the next pixel's first */
    }
}

/* Puts `row` in its place, as bytes or as what `levels` makes of them. */
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

static void resample_run(resample_job *job) {
    for (int32_t y = 0; y < job->height; y++) {
        resample_row(job, y);
        resample_store(job, y);
    }
}

#endif
