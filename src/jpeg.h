/* Decode a part of a JPEG with a libjpeg-turbo that is bound at run time. Only the rows down to the part's end are decoded, and
 * only its columns (plus one MCU on each side) are transformed, upsampled and converted to RGB. The entropy-coded data is read up
 * to the last row needed, unless restart markers allow skipping some of it (jpeg_cut.h).
 *
 * The pixels are those of the whole image, bit for bit. Upsampling reads the neighbors of a column, and at the edge of a crop it
 * would treat that edge as the edge of the image; a margin of one MCU on each side prevents that, or three where block smoothing
 * reads farther (progressive files). Rows need no margin: jpeg_skip_scanlines keeps the context of the next rows.
 *
 * Nothing is kept from one image to the next: otherwise a file without its own tables would be decoded with the tables of the
 * previous file.
 */
#ifndef SHMLOAD_JPEG_H
#define SHMLOAD_JPEG_H

#include <dlfcn.h>

#include "jpeg_cut.h"
#include "jpeg_guard.h"

enum { JPEG_ROWS = 16 }; /* rows requested at a time: more than one, or some upsamplers copy every other row */

typedef struct {
    const uint8_t *data;                /* the file */
    size_t nbytes;
    uint8_t *into;                      /* rows end to end, R G B */
    size_t into_nbytes;                 /* its size in bytes */
    unsigned reduction;                 /* 1, 2, 4 or 8: the image is reduced to that fraction; fields below are in its pixels */
    unsigned height, width;             /* required size of the reduced image */
    unsigned top, left, bottom, right;  /* requested part; `left` and `right` become those of the decoded columns */
    int strictness;                     /* JPEG_LENIENT, JPEG_WHOLE or JPEG_STRICT: which warnings are errors */
    int num_passed_over;                /* number of warnings that were not errors */
    int is_fast;                        /* fast DCT and upsampling */
    char message[JPEG62_MESSAGE];       /* cause of a failure */
} jpeg_job;

typedef struct {
    jpeg62_decompress cinfo;
    jpeg_guard guard;
    jpeg_job *job;
} jpeg_state;

/* Skip the columns outside the job's part. */
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
        jpeg_refuse(&state->guard, "a JPEG of other than 8 bits a channel");
    cinfo->out_color_space = JPEG62_RGB;
    cinfo->dct_method = job->is_fast ? JPEG62_IFAST : JPEG62_ISLOW;
    cinfo->do_fancy_upsampling = !job->is_fast;
    cinfo->scale_num = 1;
    cinfo->scale_denom = job->reduction;
    library->start(cinfo);
    if (cinfo->output_width != job->width || cinfo->output_height != job->height || cinfo->output_components != 3)
        jpeg_refuse(&state->guard, "a JPEG that decodes to another size than its header says");
    jpeg_crop_columns(library, state);
    size_t row_nbytes = (size_t)cinfo->output_width * 3;
    if (cinfo->output_width != job->right - job->left || (job->bottom - job->top) * row_nbytes > job->into_nbytes)
        jpeg_refuse(&state->guard, "no room for the decoded part of a JPEG");
    if (job->top)
        library->skip(cinfo, job->top);
    while (cinfo->output_scanline < job->bottom) {
        uint8_t *rows[JPEG_ROWS];
        unsigned before = cinfo->output_scanline, count = job->bottom - before < JPEG_ROWS ? job->bottom - before : JPEG_ROWS;
        for (unsigned row = 0; row < count; row++)
            rows[row] = job->into + (before - job->top + row) * row_nbytes;
        library->read(cinfo, rows, count);
        if (cinfo->output_scanline == before)
            jpeg_refuse(&state->guard, "a JPEG whose decoder makes no progress");
    }
    if (job->strictness != JPEG_LENIENT && cinfo->output_scanline == cinfo->output_height)
        library->finish(cinfo); /* checks what may be wrong after the last row */
}

/* The only place that errors jump to. `state` belongs to the caller, so changes made to it before the jump are kept. */
static int jpeg_guarded(const jpeg62_library *library, jpeg_state *state, void (*body)(const jpeg62_library *, jpeg_state *)) {
    if (setjmp(state->guard.failed))
        return 0;
    library->create(&state->cinfo, JPEG62_VERSION, sizeof(jpeg62_decompress));
    state->cinfo.progress = &state->guard.progress;
    body(library, state);
    return 1;
}

static int jpeg_with_state(const jpeg62_library *library, jpeg_job *job, void (*body)(const jpeg62_library *, jpeg_state *)) {
    jpeg_state state;
    memset(&state, 0, sizeof(state));
    state.job = job;
    state.guard.strictness = job->strictness;
    state.guard.message = job->message;
    jpeg_set_guard(library, &state.guard, (jpeg62_common *)&state.cinfo);
    int is_done = jpeg_guarded(library, &state, body);
    library->destroy(&state.cinfo);
    job->num_passed_over = state.guard.num_passed_over;
    return is_done;
}

/* Decode the part from a piece of the file. Return 0 if there is no such piece, or it cannot be decoded. */
static int jpeg_decode_piece(const jpeg62_library *library, jpeg_job *job) {
    jpeg_wanted wanted = {
        job->data, job->nbytes, job->reduction, job->height, job->width, job->top, job->left, job->bottom, job->right, job->is_fast,
    };
    jpeg_piece piece;
    if (!jpeg_cut(&wanted, &piece))
        return 0;
    jpeg_job within = *job;
    within.data = piece.data;
    within.nbytes = piece.nbytes;
    within.height = piece.height;
    within.width = piece.width;
    within.top -= piece.top;
    within.bottom -= piece.top;
    within.left -= piece.left;
    within.right -= piece.left;
    int is_done = jpeg_with_state(library, &within, jpeg_read_part);
    free(piece.data);
    if (is_done) {
        job->left = within.left + piece.left;
        job->right = within.right + piece.left;
        job->num_passed_over = within.num_passed_over;
    }
    return is_done;
}

/* Decode the part. On failure, return 0 and set `message`. Damage in a piece is reported as the whole file reports it. */
static int jpeg_decode(const jpeg62_library *library, jpeg_job *job) {
    job->message[0] = 0;
    return jpeg_decode_piece(library, job) || jpeg_with_state(library, job, jpeg_read_part);
}

static void jpeg_do_nothing(const jpeg62_library *library, jpeg_state *state) {
}

/* Find the functions in a shared object or its dependencies, and test the ABI. If it does not match, return 0 and set `message`.
 * The object stays loaded. */
static int jpeg_bind(jpeg62_library *library, const char *path, char message[JPEG62_MESSAGE]) {
    static const char *const names[] = {
        "jpeg_std_error",         "jpeg_CreateDecompress",   "jpeg_mem_src",
        "jpeg_read_header",       "jpeg_start_decompress",   "jpeg_crop_scanline",
        "jpeg_skip_scanlines",    "jpeg_read_scanlines",     "jpeg_finish_decompress",
        "jpeg_destroy_decompress", "jpeg_read_coefficients", "jpeg_copy_critical_parameters",
        "jpeg_CreateCompress",    "jpeg_write_coefficients", "jpeg_finish_compress",
        "jpeg_destroy_compress",
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
    jpeg_job job = {.strictness = JPEG_STRICT};
    int is_fit = jpeg_with_state(library, &job, jpeg_do_nothing);
    memcpy(message, job.message, JPEG62_MESSAGE);
    return is_fit;
}

#endif
