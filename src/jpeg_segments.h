/* The segments of a JPEG file, and how its restart intervals lie on the image.
 *
 * A restart marker ends an interval: behind it prediction begins anew and bits at a byte, so that an interval can be decoded alone.
 * Here are the files whose intervals can be counted off: one sequential Huffman scan of all components, intervals of whole rows of
 * MCUs, or such that divide a row.
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
    unsigned rows_per_interval;      /* 1 where a row is one or more intervals */
    unsigned intervals_per_row;      /* 1 where an interval is one or more rows */
    unsigned num_intervals;          /* of the file */
    int mixes_rows, mixes_columns;   /* whether upsampling looks at the neighbours of a row, of a column */
    size_t frame_at;                 /* byte at which the frame's segment begins */
    size_t scan_at;                  /* byte at which the entropy-coded data begin */
} jpeg_layout;

static unsigned jpeg_number(const uint8_t *at) {
    return (unsigned)at[0] << 8 | at[1];
}

/* The end of the segment at `at`; 0 if there is none with a length that lies within the file. */
static size_t jpeg_segment_end(const uint8_t *data, size_t nbytes, size_t at) {
    if (nbytes < 4 || at > nbytes - 4 || data[at] != 0xFF || data[at + 1] < JPEG_SOF0 || data[at + 1] == 0xFF ||
        (data[at + 1] >= JPEG_RST0 && data[at + 1] <= JPEG_EOI))
        return 0;
    size_t length = jpeg_number(data + at + 2);
    return length >= 2 && length <= nbytes - at - 2 ? at + 2 + length : 0;
}

/* Whether a segment says something about the picture and not about how it is coded. */
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
    if (num == 1 && (most_h > 1 || most_v > 1)) /* its MCUs are single blocks, whatever the factors say: nobody writes that */
        return 0;
    layout->mixes_columns = least_h < most_h;
    layout->mixes_rows = least_v < most_v;
    layout->mcu_width = 8 * most_h;
    layout->mcu_height = 8 * most_v;
    layout->per_row = (layout->width + layout->mcu_width - 1) / layout->mcu_width;
    layout->num_rows = (layout->height + layout->mcu_height - 1) / layout->mcu_height;
    return 1;
}

/* Whether the scan is the one of a sequential file: every component, every coefficient. */
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

/* Reads the head of a file; 0 if its intervals are not such that lie on rows, or anything about it is out of the ordinary. */
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
