"""CRC-32C of buffers: the checksum of TFRecord, with the processor's instruction if it has one; see crc32c.h."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t

cdef extern from "crc32c.h":
    int crc_has_instruction
    void crc_start()
    uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc32c_streamed(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc_by_tables(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc_masked(uint32_t crc) noexcept nogil

crc_start()
HAS_INSTRUCTION = bool(crc_has_instruction)


def crc32c(source, uint32_t crc=0, bint by_tables=False):
    """Return the sum of the data summed in `crc` followed by a C-contiguous buffer.

    Args:
        source: the buffer.
        crc: the sum of the data before it; 0 if there is none.
        by_tables: do not use the instruction.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(source, &view, PyBUF_C_CONTIGUOUS)
    with nogil:
        if by_tables:
            crc = ~crc_by_tables(~crc, NULL, <const uint8_t *>view.buf, view.len)
        else:
            crc = crc32c_copied(crc, NULL, <const uint8_t *>view.buf, view.len)
    PyBuffer_Release(&view)
    return crc


def copy_crc32c(to, source, bint by_tables=False, bint streams=False):
    """Copy a C-contiguous buffer to the start of another and return its sum.

    Args:
        by_tables: do not use the instruction.
        streams: bypass the caches.
    Raises:
        ValueError: `to` is shorter than `source`.
    """
    cdef Py_buffer view, room
    cdef uint32_t crc
    PyObject_GetBuffer(source, &view, PyBUF_C_CONTIGUOUS)
    try:
        PyObject_GetBuffer(to, &room, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if room.len < view.len:
                raise ValueError(f"the destination of {room.len} bytes is too small for {view.len} bytes")
            with nogil:
                if by_tables:
                    crc = ~crc_by_tables(<uint32_t>-1, <uint8_t *>room.buf, <const uint8_t *>view.buf, view.len)
                elif streams:
                    crc = crc32c_streamed(0, <uint8_t *>room.buf, <const uint8_t *>view.buf, view.len)
                else:
                    crc = crc32c_copied(0, <uint8_t *>room.buf, <const uint8_t *>view.buf, view.len)
        finally:
            PyBuffer_Release(&room)
    finally:
        PyBuffer_Release(&view)
    return crc


def masked(uint32_t crc):
    """Return a sum as TFRecord stores it."""
    return crc_masked(crc)
