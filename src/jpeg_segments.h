/* The segments of a JPEG file, and the positions of its restart intervals in the image.
 *
 * A restart marker ends an interval: after it, prediction restarts and the data starts at a byte, so an interval can be decoded
 * alone. This file handles files whose intervals can be located by counting: one sequential Huffman scan of all components, with
 * intervals that are whole rows of MCUs or divide a row.
 *
 * Source: ITU-T T.81, annexes A.2 (MCUs), B (segments), E.1.4 and F.2.2.5 (restarts).
 */
#ifndef SHMLOAD_JPEG_SEGMENTS_H
#define SHMLOAD_JPEG_SEGMENTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    JPEG_SOF0 = 0xC0, JPEG_SOF1 = 0xC1, JPEG_DHT = 0xC4, JPEG_RST0 = 0xD0, JPEG_SOI = 0xD8, JPEG_EOI = 0xD9, JPEG_SOS = 0xDA,
    JPEG_DQT = 0xDB, JPEG_DRI = 0xDD, JPEG_APP0 = 0xE0, JPEG_APP14 = 0xEE, JPEG_APP15 = 0xEF, JPEG_COM = 0xFE,
};

typedef struct {
    unsigned width, height;          /* pixels */
    unsigned mcu_width, mcu_height;  /* pixels; multiples of 8 */
    unsigned num_rows, per_row;      /* rows of MCUs, MCUs in each */
    unsigned rows_per_interval;      /* 1 if a row is one or more intervals */
    unsigned intervals_per_row;      /* 1 if an interval is one or more rows */
    unsigned num_intervals;          /* in the file */
    int mixes_rows, mixes_columns;   /* whether upsampling reads the neighbors of a row, of a column */
    size_t frame_at;                 /* first byte of the frame's segment */
    size_t scan_at;                  /* first byte of the entropy-coded data */
} jpeg_layout;

static unsigned jpeg_number(const uint8_t *at) {
    return (unsigned)at[0] << 8 | at[1];
}

/* Return the end of the segment at `at`, or 0 if there is no segment whose length lies within the file. */
static size_t jpeg_segment_end(const uint8_t *data, size_t nbytes, size_t at) {
    if (nbytes < 4 || at > nbytes - 4 || data[at] != 0xFF || data[at + 1] < JPEG_SOF0 || data[at + 1] == 0xFF ||
        (data[at + 1] >= JPEG_RST0 && data[at + 1] <= JPEG_EOI))
        return 0;
    size_t length = jpeg_number(data + at + 2);
    return length >= 2 && length <= nbytes - at - 2 ? at + 2 + length : 0;
}

/* Return whether a segment describes the picture and not its encoding. */
static int jpeg_is_kept(unsigned marker) {
    return (marker >= JPEG_APP0 && marker <= JPEG_APP15) || marker == JPEG_COM;
}

static int jpeg_read_frame(const uint8_t *segment, size_t length, jpeg_layout *layout) {
    if (length < 8 || segment[4] != 8)
        return 0;
    unsigned num = segment[9], most_h = 1, most_v = 1, least_h = 4, least_v = 4;
    layout->height = jpeg_number(segment + 5);
    layout->width = jpeg_number(segment + 7);
    if ((num != 1 && num != 3) || length != 8 + 3 * num || !layout->height || !layout->width)
        return 0;
    for (unsigned number = 0; number < num; number++) {
        unsigned h = segment[11 + 3 * number] >> 4, v = segment[11 + 3 * number] & 15;
        if (h < 1 || h > 4 || v < 1 || v > 4)
            return 0;
        most_h = h > most_h ? h : most_h;
        most_v = v > most_v ? v : most_v;
        least_h = h < least_h ? h : least_h;
        least_v = v < least_v ? v : least_v;
    }
    if (num == 1 && (most_h > 1 || most_v > 1)) /* MCUs are single blocks, whatever the factors say; no encoder writes this */
        return 0;
    layout->mixes_columns = least_h < most_h;
    layout->mixes_rows = least_v < most_v;
    layout->mcu_width = 8 * most_h;
    layout->mcu_height = 8 * most_v;
    layout->per_row = (layout->width + layout->mcu_width - 1) / layout->mcu_width;
    layout->num_rows = (layout->height + layout->mcu_height - 1) / layout->mcu_height;
    return 1;
}

/* Return whether the scan is the only one of a sequential file: every component, every coefficient. */
static int jpeg_is_whole_scan(const uint8_t *segment, size_t length, unsigned num) {
    const uint8_t *last = segment + 5 + 2 * num;
    return length == 6 + 2 * num && segment[4] == num && last[0] == 0 && last[1] == 63 && last[2] == 0;
}

static int jpeg_divide(jpeg_layout *layout, unsigned interval) {
    if (!interval || (interval % layout->per_row && layout->per_row % interval))
        return 0;
    layout->rows_per_interval = interval >= layout->per_row ? interval / layout->per_row : 1;
    layout->intervals_per_row = interval >= layout->per_row ? 1 : layout->per_row / interval;
    layout->num_intervals =
        (layout->num_rows + layout->rows_per_interval - 1) / layout->rows_per_interval * layout->intervals_per_row;
    return 1;
}

/* Read the head of a file. Return 0 if its intervals do not align with rows, or anything about the file is unusual. */
static int jpeg_read_layout(const uint8_t *data, size_t nbytes, jpeg_layout *layout) {
    unsigned interval = 0;
    size_t at = 2, end;
    memset(layout, 0, sizeof(*layout));
    for (; (end = jpeg_segment_end(data, nbytes, at)); at = end) {
        const uint8_t *segment = data + at;
        unsigned marker = segment[1];
        size_t length = end - at - 2;
        if (marker == JPEG_SOF0 || marker == JPEG_SOF1) {
            if (layout->frame_at || !jpeg_read_frame(segment, length, layout))
                return 0;
            layout->frame_at = at;
        } else if (marker == JPEG_DRI) {
            if (length != 4)
                return 0;
            interval = jpeg_number(segment + 4);
        } else if (marker == JPEG_SOS) {
            layout->scan_at = end;
            return layout->frame_at && jpeg_is_whole_scan(segment, length, data[layout->frame_at + 9]) &&
                   jpeg_divide(layout, interval);
        } else if (marker != JPEG_DHT && marker != JPEG_DQT && !jpeg_is_kept(marker)) {
            return 0;
        }
    }
    return 0;
}

#endif
