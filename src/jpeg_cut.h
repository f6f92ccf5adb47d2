/* Make a JPEG of only those restart intervals that a part of the image needs, so that no others are entropy-decoded.
 *
 * The result is the file's own head with another height and width, and the file's own intervals with their markers renumbered.
 * Prediction restarts in each interval, so the coefficients are the same; where upsampling reads neighbors, the piece has one more
 * MCU on each side, so the pixels of the part are the same too. Markers are counted from the first one: if one is missing,
 * misplaced or unexpected, the intervals may have other numbers than counted, and no piece is made.
 *
 * Rejected: an index of the markers stored with the file (finding them costs a hundredth of decoding the data between them).
 */
#ifndef SHMLOAD_JPEG_CUT_H
#define SHMLOAD_JPEG_CUT_H

#include <stdlib.h>

#include "jpeg_segments.h"

enum { JPEG_WORTH = 32 }; /* a piece is used only if it skips at least one in so many MCUs that would be decoded without it */

typedef struct {
    const uint8_t *data;                /* the file */
    size_t nbytes;
    unsigned reduction;                 /* the image is reduced to that fraction; all fields below are in its pixels */
    unsigned height, width;             /* of the image */
    unsigned top, left, bottom, right;  /* the requested part */
    int is_fast;                        /* upsampling reads no neighbors */
} jpeg_wanted;

typedef struct {
    uint8_t *data;                      /* a JPEG; freed by the caller */
    size_t nbytes;
    unsigned height, width;             /* of the piece, reduced by `reduction` */
    unsigned top, left;                 /* position of the piece in the image, reduced by `reduction` */
} jpeg_piece;

typedef struct { /* half-open */
    unsigned first, end;
} jpeg_range;

/* Return the rows or columns of MCUs, each of `side` pixels, that contain the given pixels, plus one on each side if they are
 * mixed, rounded outward to whole groups. */
static jpeg_range jpeg_units(unsigned low, unsigned high, unsigned side, unsigned count, int is_mixed, unsigned group) {
    jpeg_range found = {low / side, (high - 1) / side + 1};
    if (is_mixed) {
        found.first -= found.first > 0;
        found.end += found.end < count;
    }
    found.first -= found.first % group;
    found.end += (group - found.end % group) % group;
    if (found.end > count)
        found.end = count;
    return found;
}

static uint8_t *jpeg_append(uint8_t *to, const uint8_t *from, size_t nbytes) {
    memcpy(to, from, nbytes);
    return to + nbytes;
}

/* Write the file's head, without the segments that only describe the picture. */
static uint8_t *jpeg_write_head(const jpeg_wanted *wanted, const jpeg_layout *layout, unsigned height, unsigned width, uint8_t *to) {
    to = jpeg_append(to, wanted->data, 2);
    for (size_t at = 2, end; at < layout->scan_at; at = end) {
        unsigned marker = wanted->data[at + 1];
        end = jpeg_segment_end(wanted->data, wanted->nbytes, at);
        if (jpeg_is_kept(marker) && marker != JPEG_APP0 && marker != JPEG_APP14) /* these two define the color space */
            continue;
        uint8_t size[4] = {height >> 8, height & 255, width >> 8, width & 255}, *segment = to;
        to = jpeg_append(to, wanted->data + at, end - at);
        if (at == layout->frame_at)
            memcpy(segment + 5, size, sizeof(size));
    }
    return to;
}

/* Copy the intervals of some rows and columns. Return NULL if the markers up to the last of them are not as expected. */
static uint8_t *jpeg_write_intervals(
    const jpeg_wanted *wanted, const jpeg_layout *layout, jpeg_range rows, jpeg_range columns, uint8_t *to
) {
    const uint8_t *begin = wanted->data + layout->scan_at, *at = begin, *file_end = wanted->data + wanted->nbytes;
    unsigned row = 0, column = 0, num_written = 0;
    for (unsigned number = 0; row < rows.end;) {
        at = memchr(at, 0xFF, file_end - at);
        if (at == NULL || file_end - at < 2)
            return NULL;
        at += 2;
        if (at[-1] == 0) /* an escaped FF byte of the data */
            continue;
        if (at[-1] != (number + 1 == layout->num_intervals ? JPEG_EOI : JPEG_RST0 + number % 8))
            return NULL;
        if (row >= rows.first && column >= columns.first && column < columns.end) {
            to = jpeg_append(to, begin, at - begin);
            to[-1] = JPEG_RST0 + num_written++ % 8;
        }
        begin = at;
        number++;
        if (++column == layout->intervals_per_row) {
            column = 0;
            row++;
        }
    }
    to[-1] = JPEG_EOI;
    return to;
}

/* Make the piece. Return 0 if the file has no suitable intervals, or too few could be skipped. */
static int jpeg_cut(const jpeg_wanted *wanted, jpeg_piece *piece) {
    jpeg_layout layout;
    if (!jpeg_read_layout(wanted->data, wanted->nbytes, &layout))
        return 0;
    unsigned reduction = wanted->reduction, row_height = layout.mcu_height / reduction, column_width = layout.mcu_width / reduction;
    if ((layout.height + reduction - 1) / reduction != wanted->height || (layout.width + reduction - 1) / reduction != wanted->width)
        return 0;
    unsigned per_interval = layout.per_row / layout.intervals_per_row; /* columns of MCUs */
    jpeg_range rows = jpeg_units(
        wanted->top, wanted->bottom, row_height, layout.num_rows, layout.mixes_rows && !wanted->is_fast, layout.rows_per_interval
    );
    jpeg_range columns = jpeg_units(
        wanted->left, wanted->right, column_width, layout.per_row, layout.mixes_columns && !wanted->is_fast, per_interval
    );
    size_t num_needed = (size_t)(rows.end - rows.first) * (columns.end - columns.first);
    size_t num_before = (size_t)rows.end * layout.per_row;
    if ((num_before - num_needed) * JPEG_WORTH < num_before)
        return 0;
    unsigned top = rows.first * layout.mcu_height, left = columns.first * layout.mcu_width;
    unsigned height = rows.end == layout.num_rows ? layout.height - top : rows.end * layout.mcu_height - top;
    unsigned width = columns.end == layout.per_row ? layout.width - left : columns.end * layout.mcu_width - left;
    jpeg_range in_intervals = {columns.first / per_interval, (columns.end + per_interval - 1) / per_interval};
    jpeg_range in_rows = {rows.first / layout.rows_per_interval, (rows.end + layout.rows_per_interval - 1) / layout.rows_per_interval};
    piece->data = malloc(wanted->nbytes);
    if (piece->data == NULL)
        return 0;
    uint8_t *end = jpeg_write_head(wanted, &layout, height, width, piece->data);
    end = jpeg_write_intervals(wanted, &layout, in_rows, in_intervals, end);
    if (end == NULL) {
        free(piece->data);
        return 0;
    }
    piece->nbytes = end - piece->data;
    piece->height = (height + reduction - 1) / reduction;
    piece->width = (width + reduction - 1) / reduction;
    piece->top = top / reduction;
    piece->left = left / reduction;
    return 1;
}

#endif
