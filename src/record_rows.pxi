# The places of a batch's rows, and copying values to them; included by records.pyx.

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy


cdef class _Targets:
    """The fields' buffers, held while they are written to."""

    cdef Py_buffer *views
    cdef uint8_t **to  # where each field's next row goes; NULL: not written
    cdef int _num_held

    def __cinit__(self, list targets not None, int num_fields):
        cdef int i
        self.views = <Py_buffer *>calloc(max(num_fields, 1), sizeof(Py_buffer))
        self.to = <uint8_t **>calloc(max(num_fields, 1), sizeof(uint8_t *))
        if self.views == NULL or self.to == NULL:
            raise MemoryError
        if len(targets) != num_fields:
            raise ValueError(f"there must be {num_fields} buffers, one for each field, got {len(targets)}")
        for i in range(num_fields):
            if targets[i] is not None:
                PyObject_GetBuffer(targets[i], &self.views[i], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
                self.to[i] = <uint8_t *>self.views[i].buf
            self._num_held = i + 1

    def __dealloc__(self):
        cdef int i
        for i in range(self._num_held):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.to)

    cdef int check(self, int field, uint64_t wanted) except -1:
        if self.to[field] != NULL and <uint64_t>self.views[field].len < wanted:
            raise ValueError(f"field {field}: the buffer of {self.views[field].len} bytes is too small for {wanted}")
        return 0


cdef inline uint32_t crc_of_copy(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil:
    """Copy bytes and return the sum of `crc`'s bytes followed by these."""
    if nbytes >= SHML_STREAMED_NBYTES:
        return crc32c_streamed(crc, to, at, nbytes)
    return crc32c_copied(crc, to, at, nbytes)


cdef inline void copy(uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil:
    if nbytes >= SHML_STREAMED_NBYTES:
        shml_copy_streamed(to, at, nbytes)
    else:
        memcpy(to, at, nbytes)


cdef inline uint64_t row_nbytes(const FieldSpec *spec, const Found *found) noexcept nogil:
    return spec.itemsize * spec.numel * (found.steps if spec.is_ragged else 1)


cdef inline bint is_plain(const Found *found, const FieldSpec *spec) noexcept nogil:
    """Return whether the row is one run of bytes in the record, the same as in memory."""
    if found.is_list or found.num_pieces > 1:
        return False
    return (found.kind == BYTES and found.count == 1) or (found.kind == FLOATS and spec.kind == FLOAT32 and found.count > 0)
