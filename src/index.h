/* A packed index's columns as they lie in memory.
 *
 * A fixed column is an array of one row per entry. A text column (str or bytes) is its values' bytes end to end, and one 64-bit word
 * per entry: where the entry's bytes end, and two marks. Where they begin is where the entry before it ends.
 */
#ifndef SHMLOAD_INDEX_H
#define SHMLOAD_INDEX_H

#include <stdint.h>

enum {
    SHML_UNKNOWN = 0, /* nothing but None so far */
    SHML_STR = 1,     /* UTF-8; lone surrogates as three bytes, as Python's surrogatepass writes them */
    SHML_BYTES = 2,   /* as they are */
    SHML_INT = 3,     /* int64 */
    SHML_FLOAT = 4,   /* float64 */
    SHML_BOOL = 5,    /* one byte, 0 or 1 */
    SHML_ARRAY = 6,   /* any fixed numpy dtype and shape; a number if the shape is () */
};

#define SHML_IS_NONE (1ull << 63) /* the entry is None and has no bytes */
#define SHML_IS_WIDE (1ull << 62) /* a str that must be decoded: it is not all ASCII */
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
