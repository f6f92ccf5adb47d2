"""Columns of a batch in a slot: writing one sample's value into its row.

A column knows the address of its first row and what it accepts. `put` answers False if the value does not fit, and then has
written nothing: the caller decides what that means. Values are taken through the buffer protocol, one `Py_buffer` each, since a
typed memoryview per call costs several times as much; the copy runs without the GIL when it is long enough to matter.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bool cimport PyBool_Check
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1

cdef extern from "streamed.h":
    void shml_copy_streamed(uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil

cdef size_t HUGE_COPY = 1 << 18  # bytes of a row that is copied past the caches: a batch of such does not stay in them
cdef size_t LONG_COPY = 16384  # bytes from which a copy outlasts giving up the GIL and taking it again

import numpy as np


cdef class Column:
    """Rows of `row_nbytes` from `address` on, in memory that `keeper` keeps mapped."""

    cdef uint8_t *_base
    cdef readonly size_t row_nbytes
    cdef object _keeper

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, *args):
        self._base = <uint8_t *>address
        self.row_nbytes = row_nbytes
        self._keeper = keeper


cdef class IntColumn(Column):
    """int64 rows; accepts exactly int (bool is not)."""

    def put(self, Py_ssize_t row, value):
        cdef int overflow = 0
        cdef int64_t number
        if not PyLong_CheckExact(value):
            return False
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        (<int64_t *>self._base)[row] = number
        return True


cdef class FloatColumn(Column):
    """float64 rows; accepts exactly float."""

    def put(self, Py_ssize_t row, value):
        if not PyFloat_CheckExact(value):
            return False
        (<double *>self._base)[row] = PyFloat_AS_DOUBLE(value)
        return True


cdef class BoolColumn(Column):
    """bool rows; accepts exactly bool."""

    def put(self, Py_ssize_t row, value):
        if not PyBool_Check(value):
            return False
        self._base[row] = value is True
        return True


cdef class ArrayColumn(Column):
    """Rows of a numpy dtype and shape; accepts ndarray (and memmap) or numpy scalars of exactly those."""

    cdef object _dtype, _rows
    cdef tuple _shape
    cdef bint _is_scalar

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, rows, bint is_scalar):
        self._rows = rows  # ndarray (capacity, *shape) over the same memory
        self._dtype = rows.dtype
        self._shape = rows.shape[1:]
        self._is_scalar = is_scalar

    def put(self, Py_ssize_t row, value):
        cdef Py_buffer view
        if self._is_scalar:
            if not isinstance(value, np.generic) or value.dtype != self._dtype:
                return False
            self._rows[row] = value
            return True
        if not isinstance(value, np.ndarray) or (value.dtype is not self._dtype and value.dtype != self._dtype):
            return False
        if value.shape != self._shape:
            return False
        try:
            PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS)
        except (ValueError, BufferError):
            self._rows[row] = value  # strided
            return True
        _copy(self._base + row * self.row_nbytes, view.buf, self.row_nbytes)
        PyBuffer_Release(&view)
        return True


cdef class TensorColumn(Column):
    """Rows of a torch dtype and shape; accepts plain contiguous or strided CPU tensors of exactly those."""

    cdef object _dtype, _shape, _rows, _type, _is_plain

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, rows, is_plain):
        self._rows = rows  # tensor (capacity, *shape) over the same memory
        self._dtype = rows.dtype
        self._shape = rows.shape[1:]
        self._type = type(rows)
        self._is_plain = is_plain

    def put(self, Py_ssize_t row, value):
        if type(value) is not self._type or value.dtype is not self._dtype or value.shape != self._shape:
            return False
        if not self._is_plain(value):
            return False
        cdef uintptr_t address
        if value.is_contiguous():
            address = value.data_ptr()
            if self.row_nbytes:
                _copy(self._base + row * self.row_nbytes, <const void *>address, self.row_nbytes)
        else:
            self._rows[row].copy_(value)
        return True


cdef inline void _copy(void *to, const void *source, size_t nbytes):
    if nbytes >= HUGE_COPY:
        with nogil:
            shml_copy_streamed(<uint8_t *>to, <const uint8_t *>source, nbytes)
    elif nbytes >= LONG_COPY:
        with nogil:
            memcpy(to, source, nbytes)
    else:
        memcpy(to, source, nbytes)


def copy_bytes(uintptr_t to, source, size_t nbytes):
    """Copies the first `nbytes` of a contiguous buffer to an address, without the GIL if that is worth it."""
    cdef Py_buffer view
    PyObject_GetBuffer(source, &view, PyBUF_C_CONTIGUOUS)
    try:
        if <size_t>view.len < nbytes:
            raise ValueError(f"a buffer of {view.len} bytes does not hold {nbytes}")
        _copy(<void *>to, view.buf, nbytes)
    finally:
        PyBuffer_Release(&view)


def copy_from(uintptr_t to, uintptr_t source, size_t nbytes):
    """Copies `nbytes` from one address to another, without the GIL if that is worth it."""
    _copy(<void *>to, <const void *>source, nbytes)
