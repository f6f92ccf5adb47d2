# The frames of a TFRecord file: lengths, sums, and offsets of records; included by records.pyx.
#
# record: u64 length | u32 masked sum of the length | data | u32 masked sum of the data

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, realloc

cdef enum:
    NO_SUMS, LENGTH_SUMS, ALL_SUMS
cdef enum:
    OVERHEAD = 16  # bytes of a record besides its data

cdef struct Record:
    int64_t index, file, start
    const uint8_t *data
    uint64_t nbytes

PROBLEMS = (
    "", "wire", "header", "length_sum", "truncated", "sum", "missing", "kind", "count", "size", "range", "twice", "index", "changed",
    "sequence",
)


cdef inline int framed(const uint8_t *file, uint64_t file_nbytes, uint64_t start, int verify, uint64_t *nbytes) noexcept nogil:
    """Read the length of the record at `start`. If the result is FINE, its data is within the file."""
    cdef uint32_t stored
    cdef uint64_t length
    if start > file_nbytes or file_nbytes - start < 12:
        return BAD_HEADER
    memcpy(&length, file + start, 8)
    memcpy(&stored, file + start + 8, 4)
    if verify and stored != crc_masked(crc32c_copied(0, NULL, file + start, 8)):
        return BAD_LENGTH_SUM
    nbytes[0] = length
    if file_nbytes - start < OVERHEAD or length > file_nbytes - start - OVERHEAD:
        return TRUNCATED
    return FINE


def record_starts(const uint8_t[::1] file):
    """Find where the records of a file begin and the last one ends, by walking from length to length.

    The sum of each length is checked before the length is used.

    Returns:
        (int64 offsets as bytes, name of the problem or "", where it is)
    """
    cdef uint64_t nbytes = file.shape[0], start = 0, length = 0
    cdef size_t count = 0, room = 0
    cdef int64_t *starts = NULL
    cdef int64_t *more
    cdef int problem = FINE
    cdef bint is_full = False
    cdef const uint8_t *data = &file[0] if nbytes else NULL
    with nogil:
        while True:
            if count == room:
                room = 2 * room + 512
                more = <int64_t *>realloc(starts, room * sizeof(int64_t))
                if more == NULL:
                    is_full = True
                    break
                starts = more
            starts[count] = start
            count += 1
            if start == nbytes:
                break
            problem = framed(data, nbytes, start, LENGTH_SUMS, &length)
            if problem:
                break
            start += length + OVERHEAD
    try:
        if is_full:
            raise MemoryError("cannot allocate memory for the offsets of a file's records")
        return PyBytes_FromStringAndSize(<char *>starts, count * sizeof(int64_t)), PROBLEMS[problem], start
    finally:
        free(starts)


cdef inline bint is_intact(const Record *record) noexcept nogil:
    cdef uint32_t stored
    memcpy(&stored, record.data + record.nbytes, 4)
    return stored == crc_masked(crc32c_copied(0, NULL, record.data, record.nbytes))
