/* The layout of a packed index's columns in memory.
 *
 * A fixed column is an array of one row per entry. A text column (str or bytes) is its values' bytes end to end, and one 64-bit
 * word per entry: where the entry's bytes end, and two marks. They begin where the previous entry's end.
 */
#ifndef SHMLOAD_INDEX_H
#define SHMLOAD_INDEX_H

#include <stdint.h>

enum {
    SHML_UNKNOWN = 0, /* only None so far */
    SHML_STR = 1,     /* UTF-8; lone surrogates as three bytes, as in Python's surrogatepass */
    SHML_BYTES = 2,   /* unchanged */
    SHML_INT = 3,     /* int64 */
    SHML_FLOAT = 4,   /* float64 */
    SHML_BOOL = 5,    /* one byte, 0 or 1 */
    SHML_ARRAY = 6,   /* any fixed numpy dtype and shape; a number if the shape is () */
};

#define SHML_IS_NONE (1ull << 63) /* the entry is None and has no bytes */
#define SHML_IS_WIDE (1ull << 62) /* a str that must be decoded because it is not all ASCII */
#define SHML_END (SHML_IS_WIDE - 1)

typedef struct {
    int kind;
    const uint64_t *ends; /* NULL in a fixed column */
    const char *data;
} shml_column;

static inline uint64_t shml_begin(const shml_column *column, int64_t row) {
    return row ? column->ends[row - 1] & SHML_END : 0;
}

#endif
