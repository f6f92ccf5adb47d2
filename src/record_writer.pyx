"""Records framed, and Examples encoded, into one growing buffer; its owner writes that to a file now and then.

Lengths of protobuf stand before what they measure, so an Example is sized first and written second, each value once.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef extern from "crc32c.h":
    void crc_start()
    uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc_masked(uint32_t crc) noexcept nogil

crc_start()

BYTES, FLOATS, INTS = 1, 2, 3


cdef inline size_t varint_nbytes(uint64_t value) noexcept nogil:
    cdef size_t nbytes = 1
    while value >= 0x80:
        value >>= 7
        nbytes += 1
    return nbytes


cdef inline uint8_t *put_varint(uint8_t *at, uint64_t value) noexcept nogil:
    while value >= 0x80:
        at[0] = <uint8_t>(value | 0x80)
        at += 1
        value >>= 7
    at[0] = <uint8_t>value
    return at + 1


cdef inline size_t block_nbytes(size_t nbytes) noexcept nogil:
    """Of a tag of one byte, the length and so many bytes."""
    return 1 + varint_nbytes(nbytes) + nbytes


cdef inline uint8_t *put_head(uint8_t *at, uint8_t tag, size_t nbytes) noexcept nogil:
    at[0] = tag
    return put_varint(at + 1, nbytes)


cdef size_t ints_nbytes(const int64_t *values, size_t count) noexcept nogil:
    cdef size_t i, total = 0
    for i in range(count):
        total += varint_nbytes(<uint64_t>values[i])
    return total


def feature(int kind, values):
    """The encoded Feature: of contiguous float32 (FLOATS) or int64 (INTS) memory, or of a list of bytes-like values (BYTES)."""
    cdef Py_buffer view
    cdef size_t nbytes = 0, whole
    cdef uint8_t *at
    cdef size_t i
    cdef bytearray made
    if kind == 1:
        sizes = [memoryview(value).nbytes for value in values]
        for size in sizes:
            nbytes += block_nbytes(size)
        made = bytearray(block_nbytes(nbytes))
        at = put_head(<uint8_t *><char *>made, 0x0a, nbytes)
        for value in values:
            PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS)
            at = put_head(at, 0x0a, view.len)
            memcpy(at, view.buf, view.len)
            at += view.len
            PyBuffer_Release(&view)
        return made
    PyObject_GetBuffer(values, &view, PyBUF_C_CONTIGUOUS)
    try:
        nbytes = view.len if kind == 2 else ints_nbytes(<const int64_t *>view.buf, view.len // 8)
        whole = block_nbytes(nbytes) if nbytes else 0  # as protobuf's own writers: an empty list has no packed field
        made = bytearray(block_nbytes(whole))
        at = put_head(<uint8_t *><char *>made, 0x12 if kind == 2 else 0x1a, whole)
        if nbytes:
            at = put_head(at, 0x0a, nbytes)
            if kind == 2:
                memcpy(at, view.buf, nbytes)
            else:
                for i in range(<size_t>view.len // 8):
                    at = put_varint(at, (<const uint64_t *>view.buf)[i])
        return made
    finally:
        PyBuffer_Release(&view)


def message(list parts):
    """A message of (tag of one byte, encoded bytes) in this order."""
    cdef size_t nbytes = 0
    cdef uint8_t *at
    cdef bytearray made
    cdef const uint8_t[::1] view
    for tag, part in parts:
        nbytes += block_nbytes(len(part))
    made = bytearray(nbytes)
    at = <uint8_t *><char *>made
    for tag, part in parts:
        at = put_head(at, tag, len(part))
        if len(part):
            view = part
            memcpy(at, &view[0], len(part))
            at += len(part)
    return made


cdef class RecordBuffer:
    """Framed records, end to end."""

    cdef uint8_t *_data
    cdef size_t _room
    cdef readonly size_t nbytes

    def __dealloc__(self):
        free(self._data)

    def append(self, data):
        """Frames one record; its sum is taken while it is copied."""
        cdef Py_buffer view
        cdef uint8_t *at
        cdef uint64_t length
        cdef uint32_t crc
        PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS)
        try:
            if self.nbytes + view.len + 16 > self._room:
                at = <uint8_t *>realloc(self._data, 2 * self._room + view.len + 4096)
                if at == NULL:
                    raise MemoryError(f"no memory for a record of {view.len} bytes")
                self._data, self._room = at, 2 * self._room + view.len + 4096
            at = self._data + self.nbytes
            length = view.len
            memcpy(at, &length, 8)
            crc = crc_masked(crc32c_copied(0, NULL, at, 8))
            memcpy(at + 8, &crc, 4)
            with nogil:
                crc = crc_masked(crc32c_copied(0, at + 12, <const uint8_t *>view.buf, length))
            memcpy(at + 12 + length, &crc, 4)
            self.nbytes += length + 16
            return length + 16
        finally:
            PyBuffer_Release(&view)

    def write_to(self, file):
        """Writes all to a file's `write` and is empty again."""
        cdef uint8_t[::1] view
        if self.nbytes:
            view = <uint8_t[:self.nbytes]>self._data
            file.write(view)
            self.nbytes = 0
