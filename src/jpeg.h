/* A part of a JPEG, decoded by a libjpeg-turbo that is bound at run time: only as many rows as it needs are read, only its columns
 * (and one MCU beside them) are transformed, upsampled and made RGB. The entropy-coded data up to its last row are always read.
 *
 * The pixels are those of the whole image, bit for bit: upsampling looks at the neighbours of a column, and at the edge of a crop
 * would take that for the image's; a margin of one MCU on each side keeps that away, of three where block smoothing looks
 * farther (progressive files). Rows are the library's own affair (jpeg_skip_scanlines keeps the context of the next ones).
 *
 * Nothing is kept from one image to the next: a file without tables of its own would be decoded with the last one's.
 *
 * Errors: libjpeg's error_exit must not return (its own ends the process), so it jumps to `jpeg_guarded`. Between there and here
 * lie the library's frames and ours in this file, never Cython's.
 */
#ifndef SHMLOAD_JPEG_H
#define SHMLOAD_JPEG_H

#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include "libjpeg62.h"

enum {
    JPEG_MOST_SCANS = 500, /* a progressive file needs about 10; as libjpeg-turbo's own tools limit it against bombs */
    JPEG_ROWS = 16         /* asked for at a time: more than one, or some upsamplers copy every other row */
};

typedef struct {
    const uint8_t *data;                /* the file */
    size_t nbytes;
    uint8_t *into;                      /* rows end to end, R G B */
    size_t into_nbytes;                 /* room there */
    unsigned reduction;                 /* 1, 2, 4 or 8: the image is shrunk to that fraction; all below is in its pixels */
    unsigned height, width;             /* what the shrunk image has to have */
    unsigned top, left, bottom, right;  /* wanted; `left` and `right` are then those of what was decoded */
    int is_strict;                      /* warnings of damaged data are errors */
    int is_fast;                        /* fast DCT and upsampling */
    char message[JPEG62_MESSAGE];       /* why it failed */
} jpeg_job;

typedef struct {
    jpeg62_decompress cinfo; /* first: the library's callbacks get its address */
    jpeg62_error err;
    jpeg62_progress progress;
    jmp_buf failed;
    jpeg_job *job;
} jpeg_state;

_Noreturn static void jpeg_fail(jpeg62_decompress *cinfo) {
    jpeg_state *state = (jpeg_state *)cinfo;
    cinfo->err->format_message(cinfo, state->job->message);
    longjmp(state->failed, 1);
}

_Noreturn static void jpeg_refuse(jpeg_state *state, const char *why) {
    snprintf(state->job->message, JPEG62_MESSAGE, "%s", why);
    longjmp(state->failed, 1);
}

static void jpeg_warn(jpeg62_decompress *cinfo, int level) {
    if (level >= 0)
        return;
    cinfo->err->num_warnings++;
    if (((jpeg_state *)cinfo)->job->is_strict)
        jpeg_fail(cinfo);
}

static void jpeg_say_nothing(jpeg62_decompress *cinfo) {
}

static void jpeg_count_scans(jpeg62_decompress *cinfo) {
    if (cinfo->input_scan_number > JPEG_MOST_SCANS)
        jpeg_refuse((jpeg_state *)cinfo, "a JPEG of more than 500 scans");
}

/* Leaves the columns beside the job's out. */
static void jpeg_crop_columns(const jpeg62_library *library, jpeg_state *state) {
    jpeg62_decompress *cinfo = &state->cinfo;
    jpeg_job *job = state->job;
    unsigned margin = (unsigned)(cinfo->min_DCT_scaled_size * cinfo->max_h_samp_factor) * (cinfo->progressive_mode ? 3 : 1);
    unsigned end = job->width - job->right > margin ? job->right + margin : job->width;
    unsigned left = job->left > margin ? job->left - margin : 0, width = end - left;
    library->crop(cinfo, &left, &width); /* moves `left` to the start of an MCU */
    job->left = left;
    job->right = left + width;
}

static void jpeg_read_part(const jpeg62_library *library, jpeg_state *state) {
    jpeg62_decompress *cinfo = &state->cinfo;
    jpeg_job *job = state->job;
    library->mem_src(cinfo, job->data, job->nbytes);
    library->read_header(cinfo, 1);
    if (cinfo->data_precision != 8)
        jpeg_refuse(state, "a JPEG of other than 8 bits a channel");
    cinfo->out_color_space = JPEG62_RGB;
    cinfo->dct_method = job->is_fast ? JPEG62_IFAST : JPEG62_ISLOW;
    cinfo->do_fancy_upsampling = !job->is_fast;
    cinfo->scale_num = 1;
    cinfo->scale_denom = job->reduction;
    library->start(cinfo);
    if (cinfo->output_width != job->width || cinfo->output_height != job->height || cinfo->output_components != 3)
        jpeg_refuse(state, "a JPEG that decodes to another size than its header says");
    jpeg_crop_columns(library, state);
    size_t row_nbytes = (size_t)cinfo->output_width * 3;
    if (cinfo->output_width != job->right - job->left || (job->bottom - job->top) * row_nbytes > job->into_nbytes)
        jpeg_refuse(state, "no room for the decoded part of a JPEG");
    if (job->top)
        library->skip(cinfo, job->top);
    while (cinfo->output_scanline < job->bottom) {
        uint8_t *rows[JPEG_ROWS];
        unsigned before = cinfo->output_scanline, count = job->bottom - before < JPEG_ROWS ? job->bottom - before : JPEG_ROWS;
        for (unsigned row = 0; row < count; row++)
            rows[row] = job->into + (before - job->top + row) * row_nbytes;
        library->read(cinfo, rows, count);
        if (cinfo->output_scanline == before)
            jpeg_refuse(state, "a JPEG whose decoder does not go on");
    }
    if (job->is_strict && cinfo->output_scanline == cinfo->output_height)
        library->finish(cinfo); /* looks for what may be wrong behind the last row */
}

/* The one place errors jump to: `state` is the caller's, so what changed in it since is still there. */
static int jpeg_guarded(const jpeg62_library *library, jpeg_state *state, void (*body)(const jpeg62_library *, jpeg_state *)) {
    if (setjmp(state->failed))
        return 0;
    library->create(&state->cinfo, JPEG62_VERSION, sizeof(jpeg62_decompress));
    state->cinfo.progress = &state->progress;
    body(library, state);
    return 1;
}

static int jpeg_with_state(const jpeg62_library *library, jpeg_job *job, void (*body)(const jpeg62_library *, jpeg_state *)) {
    jpeg_state state;
    memset(&state, 0, sizeof(state));
    state.job = job;
    state.cinfo.err = library->std_error(&state.err);
    state.err.error_exit = jpeg_fail;
    state.err.emit_message = jpeg_warn;
    state.err.output_message = jpeg_say_nothing;
    state.progress.progress_monitor = jpeg_count_scans;
    int is_done = jpeg_guarded(library, &state, body);
    library->destroy(&state.cinfo);
    return is_done;
}

/* Decodes; 0 if it cannot, and then `message` says why. */
static int jpeg_decode(const jpeg62_library *library, jpeg_job *job) {
    job->message[0] = 0;
    return jpeg_with_state(library, job, jpeg_read_part);
}

static void jpeg_do_nothing(const jpeg62_library *library, jpeg_state *state) {
}

/* Finds the functions in a shared object or in what it depends on, and tries the ABI. 0 if it is not what is needed, and
 * then `message` says why. The object stays loaded. */
static int jpeg_bind(jpeg62_library *library, const char *path, char message[JPEG62_MESSAGE]) {
    static const char *const names[] = {
        "jpeg_std_error",      "jpeg_CreateDecompress", "jpeg_mem_src",        "jpeg_read_header",       "jpeg_start_decompress",
        "jpeg_crop_scanline",  "jpeg_skip_scanlines",   "jpeg_read_scanlines", "jpeg_finish_decompress", "jpeg_destroy_decompress",
    };
    void **functions = (void **)library;
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    _Static_assert(sizeof(jpeg62_library) == sizeof(names), "a name for each function");
    if (object == NULL) {
        snprintf(message, JPEG62_MESSAGE, "%s", dlerror());
        return 0;
    }
    for (size_t number = 0; number < sizeof(names) / sizeof(names[0]); number++) {
        functions[number] = dlsym(object, names[number]);
        if (functions[number] == NULL) {
            snprintf(message, JPEG62_MESSAGE, "%s is not in it", names[number]);
            return 0;
        }
    }
    jpeg_job job = {.is_strict = 1};
    int is_fit = jpeg_with_state(library, &job, jpeg_do_nothing);
    memcpy(message, job.message, JPEG62_MESSAGE);
    return is_fit;
}

#endif
