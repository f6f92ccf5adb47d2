/* Stateless draws: the words of a position, and weighted indices from an alias table.
 *
 *     key = (seed, n), counter = (position / 4, epoch, stream, purpose): the position's word is number position % 4
 *
 * The alias table is Walker's: n columns of equal capacity, each shared by at most two indices, so a draw is one multiplication and
 * one cache line whatever n is. It is built in integers: weights are multiples of 2^-63 of the largest, column i starts with
 * weight[i] * n of a capacity of sum(weights), and what large columns give away to fill small ones is exact. So nothing is left
 * over at the end, an index without weight keeps nothing of its column, and the table is the same on every machine. Fractions of a
 * column are rounded to 2^-63.
 *
 * A change here that alters one draw needs a new schedule version.
 *
 * Sources: A. J. Walker, "An efficient method for generating discrete random variables with general distributions", 1977.
 * M. D. Vose, "A linear algorithm for generating random numbers with a given distribution", 1991 (the two worklists).
 */
#ifndef SHML_DRAWS_H
#define SHML_DRAWS_H

#include "permutation.h"

#define SHML_FOR_DRAW 16 /* purpose, see permutation.h */

__extension__ typedef unsigned __int128 shml_uint128;

typedef struct {
    uint64_t own;   /* share of the column that belongs to its own index, in units of 2^-64 */
    uint64_t alias; /* index that gets the rest */
} shml_alias_column;

/* Compute the words of positions [start, start + count). */
static inline void shml_draw_words(uint64_t seed, uint64_t n, uint64_t epoch, uint64_t stream, uint64_t start, uint64_t *out,
                                   size_t count) {
    size_t done = 0;
    while (done < count) {
        uint64_t position = start + done;
        shml_words words = shml_philox((shml_words){{position / 4, epoch, stream, SHML_FOR_DRAW}}, seed, n);
        for (unsigned i = position % 4; i < 4 && done < count; i++) out[done++] = words.word[i];
    }
}

/* Turn words into indices: the high half of word * n is the column, the low half the position in it. */
static inline void shml_alias_draw(const shml_alias_column *columns, uint64_t n, uint64_t *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        shml_uint128 product = (shml_uint128)words[i] * n;
        uint64_t column = (uint64_t)(product >> 64);
        words[i] = (uint64_t)product < columns[column].own ? column : columns[column].alias;
    }
}

/* Build the table of `n` < 2^31 weights, each at most 2^63 and one of them positive. `held` and `pending` are scratch of n each.
 * Columns below capacity are listed from the front of `pending`, the others from its end. */
static inline void shml_alias_build(const uint64_t *weights, uint64_t n, shml_alias_column *columns, shml_uint128 *held,
                                    uint64_t *pending) {
    shml_uint128 capacity = 0;
    uint64_t num_small = 0, first_large = n;
    int shift = 0;
    for (uint64_t i = 0; i < n; i++) capacity += weights[i];
    while (capacity >> shift >> 63) shift++; /* a column in at most 63 bits: then a share times 2^64 fits in 128 */
    for (uint64_t i = 0; i < n; i++) {
        held[i] = (shml_uint128)weights[i] * n;
        if (held[i] < capacity)
            pending[num_small++] = i;
        else
            pending[--first_large] = i;
    }
    while (num_small) {
        uint64_t small = pending[--num_small], large = pending[first_large];
        shml_uint128 own = ((held[small] >> shift) << 64) / (capacity >> shift);
        columns[small].own = own >> 64 ? UINT64_MAX : (uint64_t)own; /* an almost full column may become full by the shift */
        columns[small].alias = large;
        held[large] -= capacity - held[small];
        if (held[large] < capacity) {
            first_large++;
            pending[num_small++] = large;
        }
    }
    for (uint64_t i = first_large; i < n; i++) { /* exactly full */
        columns[pending[i]].own = UINT64_MAX;
        columns[pending[i]].alias = pending[i];
    }
}

#endif
