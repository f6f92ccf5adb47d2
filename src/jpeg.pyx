"""Decode a part of a JPEG to RGB, with the libjpeg-turbo of a shared object in this process: nothing is linked at build time.

src/libjpeg62.h defines the library's structures, src/jpeg.h decodes, and src/jpeg_recode.h writes files of which less has to be
decoded; this module adds the checks that make them safe.
"""

cimport cython
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

cdef extern from "jpeg.h" nogil:
    enum:
        JPEG62_MESSAGE
        JPEG_LENIENT, JPEG_WHOLE, JPEG_STRICT

    ctypedef struct jpeg62_library:
        pass

    ctypedef struct jpeg_job:
        const uint8_t *data
        size_t nbytes
        uint8_t *into
        size_t into_nbytes
        unsigned reduction, height, width, top, left, bottom, right
        int strictness, num_passed_over, is_fast
        char *message

    int jpeg_bind(jpeg62_library *library, const char *path, char *message)
    int jpeg_decode(const jpeg62_library *library, jpeg_job *job)
    int jpeg_is_remark(const char *text)

cdef extern from "jpeg_recode.h" nogil:
    ctypedef struct jpeg_recoding:
        const uint8_t *data
        size_t nbytes
        unsigned least_width
        uint8_t *out
        size_t out_nbytes
        char *message

    int jpeg_recode(const jpeg62_library *library, jpeg_recoding *job)

cdef jpeg62_library bound
cdef bint is_bound = False
cdef object _bind_lock = object()


def bind(bytes path not None):
    """Bind the library that a shared object is linked with, or is.

    Raises:
        ImportError: no library found, or one with another interface than libjpeg-turbo's of version 6.2.
    """
    global is_bound, bound
    cdef jpeg62_library found
    cdef char message[JPEG62_MESSAGE]
    if not jpeg_bind(&found, path, message):
        raise ImportError(f"cannot load libjpeg-turbo from {path.decode(errors='replace')}: {message.decode(errors='replace')}")
    with cython.critical_section(_bind_lock):
        if not is_bound:  # another thread may decode already, and the library is the same
            bound, is_bound = found, True


def decode(
    bytes data not None,
    uint8_t[::1] into not None,
    tuple size not None,
    tuple part not None,
    *,
    int reduction=1,
    object is_strict=True,
    bint is_fast=False,
):
    """Decode the rows and columns that a part of a JPEG needs, without the GIL.

    Args:
        data: the file.
        into: room for the rows of `part` from `first` to `end`, R G B each.
        size: (height, width) of the image as in the file's header, divided by `reduction` and rounded up.
        part: (top, left, bottom, right) in pixels of the reduced image.
        reduction: 1, 2, 4 or 8: how much smaller the image is decoded.
        is_strict: True: every warning of the library is an error. None: only warnings that cost pixels are errors, such as damaged
            or missing data. False: no warning is an error, and the library invents the missing pixels. The data after the last row
            needed is not read.
        is_fast: use the fast DCT and upsampling.
    Returns:
        (first, end, num_passed_over): the columns of the rows that were written, more than `part` has; and the number of warnings
            of the library that were not errors.
    Raises:
        ValueError: the data is damaged, not a JPEG, or not convertible to RGB; or `into` is too small.
        RuntimeError: no library is bound.
    """
    cdef jpeg_job job
    cdef int is_done
    if not is_bound:
        raise RuntimeError("libjpeg-turbo is not loaded: call bind() first")
    job.height, job.width = size
    job.top, job.left, job.bottom, job.right = part
    if not (job.top < job.bottom <= job.height and job.left < job.right <= job.width):
        raise ValueError(f"part {part} is not inside the image of {job.height} x {job.width} pixels")
    if reduction not in (1, 2, 4, 8):
        raise ValueError(f"reduction must be 1, 2, 4 or 8, got {reduction}")
    job.data = <const uint8_t *>PyBytes_AS_STRING(data)
    job.nbytes = PyBytes_GET_SIZE(data)
    job.into = &into[0] if into.shape[0] else NULL
    job.into_nbytes = into.shape[0]
    job.reduction = reduction
    job.strictness = JPEG_WHOLE if is_strict is None else JPEG_STRICT if is_strict else JPEG_LENIENT
    job.is_fast = is_fast
    with nogil:
        is_done = jpeg_decode(&bound, &job)
    if not is_done:
        raise ValueError(job.message.decode(errors="replace"))
    return job.left, job.right, job.num_passed_over


def is_remark(str warning not None):
    """Return whether a warning of libjpeg-turbo leaves every pixel intact, such as bytes between two segments."""
    return bool(jpeg_is_remark(warning.encode(errors="replace")))


def recode(bytes data not None, *, unsigned least_width=0):
    """Re-encode a JPEG with restart markers, without the GIL: the same coefficients, new tables, one sequential scan.

    Args:
        data: the file.
        least_width: least pixels between two markers: as few MCUs as cover them and divide a row; 0: a row.
    Returns:
        the new file.
    Raises:
        ValueError: the file cannot be re-encoded without loss; the message has the cause.
        RuntimeError: no library is bound.
    """
    cdef jpeg_recoding job
    cdef int is_done
    if not is_bound:
        raise RuntimeError("libjpeg-turbo is not loaded: call bind() first")
    job.data = <const uint8_t *>PyBytes_AS_STRING(data)
    job.nbytes = PyBytes_GET_SIZE(data)
    job.least_width = least_width
    with nogil:
        is_done = jpeg_recode(&bound, &job)
    try:
        if not is_done:
            raise ValueError(job.message.decode(errors="replace"))
        return PyBytes_FromStringAndSize(<char *>job.out, job.out_nbytes)
    finally:
        free(job.out)
