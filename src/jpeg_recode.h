/* Re-encode a JPEG without loss: the same quantized coefficients in one sequential scan with new Huffman tables and a restart
 * marker after every so many MCUs. Coefficients are read and written by libjpeg-turbo; segments that only describe the picture
 * (APPn, COM) and all bytes after the image are copied byte by byte, so colors, orientation and profiles stay the same.
 *
 * Refused are files that the library finds damaged, and files whose pixels depend on more than their coefficients: decoders smooth
 * incomplete progressive files.
 */
#ifndef SHMLOAD_JPEG_RECODE_H
#define SHMLOAD_JPEG_RECODE_H

#include <stdlib.h>

#include "jpeg_guard.h"
#include "jpeg_segments.h"

typedef struct {
    const uint8_t *data;          /* the file */
    size_t nbytes;
    unsigned least_width;         /* least width of an interval in pixels: as few MCUs as cover it and divide a row; 0: a row */
    uint8_t *out;                 /* the new file; freed by the caller, also after a failure */
    size_t out_nbytes, out_room;  /* bytes used, bytes allocated */
    char message[JPEG62_MESSAGE]; /* cause of a failure */
} jpeg_recoding;

typedef struct {
    jpeg62_decompress from;
    jpeg62_compress to;
    jpeg62_destination dest;
    jpeg_guard guard;
    jpeg_recoding *job;
} jpeg_recoder;

static jpeg_recoder *jpeg_recoder_of(jpeg62_compress *to) {
    return (jpeg_recoder *)((char *)to - offsetof(jpeg_recoder, to));
}

static void jpeg_grow(jpeg_recoder *recoder, size_t room) {
    uint8_t *grown = realloc(recoder->job->out, room);
    if (grown == NULL)
        jpeg_refuse(&recoder->guard, "no memory for the new JPEG");
    recoder->job->out = grown;
    recoder->job->out_room = room;
}

static void jpeg_give_room(jpeg_recoder *recoder, size_t used) {
    recoder->dest.next_output_byte = recoder->job->out + used;
    recoder->dest.free_in_buffer = recoder->job->out_room - used;
}

static void jpeg_begin_output(jpeg62_compress *to) {
}

static int jpeg_more_output(jpeg62_compress *to) {
    jpeg_recoder *recoder = jpeg_recoder_of(to);
    size_t used = recoder->job->out_room;
    jpeg_grow(recoder, 2 * used);
    jpeg_give_room(recoder, used);
    return 1;
}

static void jpeg_end_output(jpeg62_compress *to) {
    jpeg_recoder *recoder = jpeg_recoder_of(to);
    recoder->job->out_nbytes = recoder->dest.next_output_byte - recoder->job->out;
}

/* Copy the kept segments of a whole image and return their length. If `to` is NULL, only count it. */
static size_t jpeg_copy_kept(const uint8_t *data, size_t nbytes, uint8_t *to) {
    size_t at = 2, total = 0;
    while (at + 1 < nbytes && !(data[at] == 0xFF && data[at + 1] == JPEG_EOI)) {
        size_t end = jpeg_segment_end(data, nbytes, at);
        if (!end) { /* padding, entropy-coded data, restart markers: skip to the next FF */
            const uint8_t *next = memchr(data + at + 1, 0xFF, nbytes - at - 1);
            if (next == NULL)
                break;
            at = next - data;
            continue;
        }
        if (jpeg_is_kept(data[at + 1])) {
            if (to != NULL)
                memcpy(to + total, data + at, end - at);
            total += end - at;
        }
        at = end;
    }
    return total;
}

/* Return the number of MCUs between two markers. */
static unsigned jpeg_interval(const jpeg62_decompress *from, unsigned least_width) {
    unsigned side = from->num_components == 1 ? 8 : 8 * from->max_h_samp_factor;
    unsigned per_row = (from->image_width + side - 1) / side, interval = least_width / side + (least_width % side > 0);
    if (!interval || interval > per_row)
        interval = per_row;
    while (per_row % interval)
        interval++;
    return interval;
}

static void jpeg_check(jpeg_recoder *recoder) {
    jpeg62_decompress *from = &recoder->from;
    if (from->num_components != 1 && from->num_components != 3)
        jpeg_refuse(&recoder->guard, "neither grey nor of three channels");
    if (from->arith_code)
        jpeg_refuse(&recoder->guard, "arithmetic coding");
    if (from->data_precision != 8)
        jpeg_refuse(&recoder->guard, "other than 8 bits a channel");
}

static void jpeg_check_coefficients(jpeg_recoder *recoder) {
    jpeg62_decompress *from = &recoder->from;
    if (!from->progressive_mode)
        return;
    for (int component = 0; component < from->num_components; component++)
        for (int number = 0; number < 64; number++)
            if (from->coef_bits[component][number])
                jpeg_refuse(&recoder->guard, "a progressive file without all of its scans, which decoders smooth");
}

static void jpeg_recode_guarded(const jpeg62_library *library, jpeg_recoder *recoder) {
    jpeg62_decompress *from = &recoder->from;
    jpeg62_compress *to = &recoder->to;
    jpeg_recoding *job = recoder->job;
    library->create(from, JPEG62_VERSION, sizeof(*from));
    library->create_compress(to, JPEG62_VERSION, sizeof(*to));
    from->progress = &recoder->guard.progress;
    library->mem_src(from, job->data, job->nbytes);
    library->read_header(from, 1);
    jpeg_check(recoder);
    void **coefficients = library->read_coefficients(from);
    jpeg_check_coefficients(recoder);
    size_t image_nbytes = job->nbytes - from->src->bytes_in_buffer, kept_nbytes = jpeg_copy_kept(job->data, image_nbytes, NULL);
    library->copy_parameters(from, to);
    to->write_JFIF_header = to->write_Adobe_marker = 0; /* the file's own segments are copied */
    to->optimize_coding = 1;
    to->restart_interval = jpeg_interval(from, job->least_width);
    recoder->dest = (jpeg62_destination){NULL, 0, jpeg_begin_output, jpeg_more_output, jpeg_end_output};
    to->dest = &recoder->dest;
    jpeg_grow(recoder, job->nbytes + job->nbytes / 4 + 4096);
    jpeg_give_room(recoder, kept_nbytes); /* room for the segments; the library's first two bytes move to the front */
    library->write_coefficients(to, coefficients);
    library->finish_compress(to);
    jpeg_copy_kept(job->data, image_nbytes, job->out + 2);
    memcpy(job->out, job->data, 2);
    size_t num_trailing = job->nbytes - image_nbytes;
    if (num_trailing > job->out_room - job->out_nbytes)
        jpeg_grow(recoder, job->out_nbytes + num_trailing);
    memcpy(job->out + job->out_nbytes, job->data + image_nbytes, num_trailing);
    job->out_nbytes += num_trailing;
}

/* Re-encode a file. On failure, return 0 and set `message`. */
static int jpeg_recode(const jpeg62_library *library, jpeg_recoding *job) {
    jpeg_recoder recoder;
    memset(&recoder, 0, sizeof(recoder));
    recoder.job = job;
    recoder.guard.strictness = JPEG_STRICT;
    recoder.guard.message = job->message;
    job->message[0] = 0;
    job->out = NULL;
    jpeg_set_guard(library, &recoder.guard, (jpeg62_common *)&recoder.from);
    jpeg_set_guard(library, &recoder.guard, (jpeg62_common *)&recoder.to);
    int is_done = 0;
    if (!setjmp(recoder.guard.failed)) {
        jpeg_recode_guarded(library, &recoder);
        is_done = 1;
    }
    library->destroy_compress(&recoder.to);
    library->destroy(&recoder.from);
    return is_done;
}

#endif
