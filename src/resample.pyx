"""Resample, mirror, normalize and lay out a part of an RGB image directly into the row of a batch: one pass, without the GIL.

src/resample.h has the definition and the loops; this module adds the checks that make them safe.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int16_t, int32_t, uint8_t
from libc.stdlib cimport calloc, free, malloc

cdef extern from "resample.h" nogil:
    enum:
        RESAMPLE_DOWN_BITS
        RESAMPLE_ALONG_BITS

    ctypedef struct resample_span:
        pass

    ctypedef struct resample_axis:
        resample_span *spans
        int16_t *weights
        int32_t stride
        int32_t pairs

    ctypedef struct resample_job:
        resample_axis down
        resample_axis along
        const uint8_t *source
        size_t row_nbytes
        int32_t height
        int32_t width
        int is_planar
        int vectors
        const float *levels
        void *result
        int16_t *between
        int32_t *wide
        uint8_t *row

    int32_t resample_stride(double length, int32_t size, int32_t available)
    void resample_fill(
        resample_axis *axis,
        double start,
        double length,
        int32_t size,
        int32_t low,
        int32_t high,
        int32_t most_bits,
        int is_flipped,
        double *exact,
    )
    bint resample_shift(resample_axis *axis, int32_t size, int32_t origin, int32_t count)
    size_t resample_between(const resample_axis *along)
    int resample_best()
    void resample_run(resample_job *job)

cdef int32_t LONGEST = 1 << 24  # pixels of a side, so that no value computed from it overflows
cdef double SLACK = 0.001  # pixels by which a window's float arithmetic may exceed the image

cdef enum Outcome:
    DONE, NO_MEMORY, LACKING


def resample(
    const uint8_t[:, :, ::1] image not None,
    out,
    tuple size not None,
    tuple box not None,
    tuple clip not None,
    *,
    tuple origin=(0, 0),
    tuple whole=None,
    bint is_flipped=False,
    bint is_planar=False,
    const float[:, ::1] levels=None,
    int vectors=2,
):
    """Resample a box of an image to a size.

    Args:
        image: shape (height, width, 3); the whole image, or a part that contains the pixels needed.
        out: C-contiguous, (height, width, 3) or, planar, (3, height, width) of `size`; uint8, or float32 with `levels`.
        size: (height, width) of the result.
        box: (top, left, height, width) in pixels of the whole image; fractions are allowed.
        clip: (top, left, bottom, right), whole pixels: only those within are used.
        origin: (top, left) of the part.
        whole: (height, width) of the image that contains the part. Default: `image` is the whole image.
        is_flipped: mirror left to right.
        is_planar: store the channels one after another.
        levels: shape (3, 256): the value of each level of each channel.
        vectors: the best instructions to use: 0 none, 1 SSE2, 2 AVX2; the result does not depend on it.
    Raises:
        ValueError: the arguments do not fit together.
    """
    cdef resample_job job
    cdef Py_buffer view
    cdef double top, left, box_height, box_width
    cdef int32_t clip_top, clip_left, clip_bottom, clip_right, first_row, first_column
    cdef Py_ssize_t wanted, height, width
    job.height, job.width = size
    top, left, box_height, box_width = box
    clip_top, clip_left, clip_bottom, clip_right = clip
    first_row, first_column = origin
    height, width = (image.shape[0], image.shape[1]) if whole is None else whole
    if image.shape[2] != 3 or image.shape[0] > LONGEST or image.shape[1] > LONGEST:
        raise ValueError(f"the image must have the shape (height, width, 3), got ({image.shape[0]}, {image.shape[1]}, {image.shape[2]})")
    if not (0 < job.height <= LONGEST and 0 < job.width <= LONGEST):
        raise ValueError(f"both sides of size must be 1 to {LONGEST} pixels, got {size}")
    if not (
        0 <= first_row <= height - image.shape[0]
        and 0 <= first_column <= width - image.shape[1]
        and height <= LONGEST
        and width <= LONGEST
    ):
        raise ValueError(
            f"{image.shape[0]} x {image.shape[1]} pixels at {origin} are not inside the image of {height} x {width} pixels"
        )
    if not (0 <= clip_top < clip_bottom <= height and 0 <= clip_left < clip_right <= width):
        raise ValueError(f"clip {clip} is not inside the image of {height} x {width} pixels")
    if not (
        clip_top - SLACK <= top <= top + box_height <= clip_bottom + SLACK
        and clip_left - SLACK <= left <= left + box_width <= clip_right + SLACK
        and box_height > 0
        and box_width > 0
    ):
        raise ValueError(f"box {box} is not inside clip {clip}")
    if levels is not None and (levels.shape[0] != 3 or levels.shape[1] != 256):
        raise ValueError(f"levels must have the shape (3, 256), got ({levels.shape[0]}, {levels.shape[1]})")
    job.source = &image[0, 0, 0]
    job.row_nbytes = image.shape[1] * 3
    job.is_planar = is_planar
    job.vectors = min(vectors, resample_best())
    job.levels = NULL
    if levels is not None:
        job.levels = &levels[0, 0]
    wanted = <Py_ssize_t>job.height * job.width * (3 if levels is None else 12)
    cdef Outcome outcome
    cdef int32_t num_rows = image.shape[0]
    cdef int32_t num_columns = image.shape[1]
    PyObject_GetBuffer(out, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    try:
        if view.len != wanted:
            raise ValueError(f"out must have {wanted} bytes for size {size}, got {view.len}")
        job.result = view.buf
        with nogil:
            outcome = _run(
                &job,
                top,
                left,
                box_height,
                box_width,
                clip_top,
                clip_left,
                clip_bottom,
                clip_right,
                first_row,
                first_column,
                num_rows,
                num_columns,
                is_flipped,
            )
        if outcome == NO_MEMORY:
            raise MemoryError(f"cannot allocate memory to resample {box} to {size}")
        if outcome == LACKING:
            raise ValueError(
                f"box {box} within clip {clip} needs more than the {num_rows} x {num_columns} pixels at {origin} that are there"
            )
    finally:
        PyBuffer_Release(&view)


def look_up(const uint8_t[:, :, ::1] image not None, float[:, :, ::1] out not None, const float[:, ::1] levels not None, bint is_planar):
    """Replace each level of each channel by its value in `levels`, for whole images stored one after another.

    Args:
        image: planar (images, channels, pixels), otherwise (images, pixels, channels).
        out: of the same shape.
        levels: shape (channels, 256).
        is_planar: layout of the images.
    Raises:
        ValueError: the arguments do not fit together.
    """
    cdef Py_ssize_t n = image.shape[0]
    cdef Py_ssize_t channels = image.shape[1] if is_planar else image.shape[2]
    cdef Py_ssize_t pixels = image.shape[2] if is_planar else image.shape[1]
    cdef Py_ssize_t i, c, x
    cdef const uint8_t *source
    cdef const float *level
    cdef float *into
    if (out.shape[0], out.shape[1], out.shape[2]) != (n, image.shape[1], image.shape[2]):
        raise ValueError(f"out must have the shape of the images, got ({out.shape[0]}, {out.shape[1]}, {out.shape[2]})")
    if levels.shape[0] != channels or levels.shape[1] != 256:
        raise ValueError(f"levels must have the shape ({channels}, 256), got ({levels.shape[0]}, {levels.shape[1]})")
    if n == 0 or channels == 0 or pixels == 0:
        return
    source, into = &image[0, 0, 0], &out[0, 0, 0]
    with nogil:
        if is_planar:
            for i in range(n * channels):
                level = &levels[i % channels, 0]
                for x in range(pixels):
                    into[x] = level[source[x]]
                source += pixels
                into += pixels
        else:
            level = &levels[0, 0]
            for x in range(n * pixels):
                for c in range(channels):
                    into[c] = level[256 * c + source[c]]
                source += channels
                into += channels


cdef Outcome _run(
    resample_job *job,
    double top,
    double left,
    double box_height,
    double box_width,
    int32_t clip_top,
    int32_t clip_left,
    int32_t clip_bottom,
    int32_t clip_right,
    int32_t first_row,
    int32_t first_column,
    int32_t num_rows,
    int32_t num_columns,
    int is_flipped,
) noexcept nogil:
    """Run a job."""
    cdef resample_axis *down = &job.down
    cdef resample_axis *along = &job.along
    cdef size_t height = job.height
    cdef size_t width = job.width
    cdef double *exact
    cdef Outcome outcome = NO_MEMORY
    down.stride = resample_stride(box_height, job.height, clip_bottom - clip_top)
    along.stride = resample_stride(box_width, job.width, clip_right - clip_left)
    down.spans = <resample_span *>malloc(height * sizeof(resample_span))
    along.spans = <resample_span *>malloc(width * sizeof(resample_span))
    down.weights = <int16_t *>malloc(height * down.stride * sizeof(int16_t))
    along.weights = <int16_t *>malloc(width * along.stride * sizeof(int16_t))
    exact = <double *>malloc(max(height * down.stride, width * along.stride) * sizeof(double))
    job.row = <uint8_t *>malloc(3 * (width + 4))
    job.wide = NULL
    job.between = NULL
    if (
        down.spans != NULL
        and along.spans != NULL
        and down.weights != NULL
        and along.weights != NULL
        and exact != NULL
        and job.row != NULL
    ):
        resample_fill(down, top, box_height, job.height, clip_top, clip_bottom, RESAMPLE_DOWN_BITS, False, exact)
        resample_fill(along, left, box_width, job.width, clip_left, clip_right, RESAMPLE_ALONG_BITS, is_flipped, exact)
        job.between = <int16_t *>calloc(resample_between(along), sizeof(int16_t))
        job.wide = <int32_t *>malloc((width + 3) // 4 * 16 * along.pairs * sizeof(int32_t))
        if not (
            resample_shift(down, job.height, first_row, num_rows)
            and resample_shift(along, job.width, first_column, num_columns)
        ):
            outcome = LACKING
        elif job.between != NULL and job.wide != NULL:
            resample_run(job)
            outcome = DONE
    free(job.between)
    free(job.wide)
    free(job.row)
    free(exact)
    free(along.weights)
    free(down.weights)
    free(along.spans)
    free(down.spans)
    return outcome
