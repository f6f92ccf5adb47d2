"""A part of a JPEG as RGB, by the libjpeg-turbo that some shared object of this process brings: nothing is linked at build time.

src/libjpeg62.h has the library's structures, src/jpeg.h the decoding, src/jpeg_recode.h what writes files of which less has to be
decoded; here are the checks that make it safe.
"""

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


def bind(bytes path not None):
    """Takes the library that a shared object is linked with, or is.

    Raises:
        ImportError: there is none, or one of another interface than libjpeg-turbo's of version 6.2.
    """
    global is_bound, bound
    cdef jpeg62_library found
    cdef char message[JPEG62_MESSAGE]
    if not jpeg_bind(&found, path, message):
        raise ImportError(f"no libjpeg-turbo through {path.decode(errors='replace')}: {message.decode(errors='replace')}")
    bound = found
    is_bound = True


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
    """Decodes the rows and columns of a JPEG that a part of it needs, without the GIL.

    Args:
        into: room for the rows of `part` from `first` to `end`, R G B each.
        size: (height, width) of the image as the file's header has them, divided by `reduction` and rounded up.
        part: (top, left, bottom, right) in pixels of the shrunk image.
        reduction: 1, 2, 4 or 8: how much smaller the image is decoded.
        is_strict: True: everything that the library warns of is an error. None: only what costs pixels is, such as damaged or
            missing data. False: nothing is, and the library invents the pixels that are missing. What follows the last row that
            is needed is not read.
        is_fast: the fast DCT and upsampling.
    Returns:
        (first, end, num_passed_over): the columns of the rows that were written, more than `part` has; and how many warnings of the
            library were no errors.
    Raises:
        ValueError: the data are damaged, no JPEG, or one that cannot become RGB; or `into` has no room.
        RuntimeError: no library is bound.
    """
    cdef jpeg_job job
    cdef int is_done
    if not is_bound:
        raise RuntimeError("no libjpeg-turbo is bound; bind() one first")
    job.height, job.width = size
    job.top, job.left, job.bottom, job.right = part
    if not (job.top < job.bottom <= job.height and job.left < job.right <= job.width):
        raise ValueError(f"part {part} is no part of an image of {job.height} x {job.width} pixels")
    if reduction not in (1, 2, 4, 8):
        raise ValueError(f"reduction needs to be 1, 2, 4 or 8; got {reduction}")
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
    """Codes a JPEG anew with restart markers, without the GIL: the same coefficients, tables of its own, one sequential scan.

    Args:
        least_width: pixels between two markers: as few MCUs as have them and divide a row; 0: a row.
    Returns:
        The new file.
    Raises:
        ValueError: it cannot be done without loss; with the cause.
        RuntimeError: no library is bound.
    """
    cdef jpeg_recoding job
    cdef int is_done
    if not is_bound:
        raise RuntimeError("no libjpeg-turbo is bound; bind() one first")
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
