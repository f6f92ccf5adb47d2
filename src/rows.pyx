"""Columns of a batch in a slot: write one sample's value into its row.

A column knows the address of its first row and the values it accepts. `put` returns False if a value does not fit; the caller
decides what to do then. A sample of several values is taken apart here too: for small samples, the calls in between would cost more
than the bytes.

Values are read through the buffer protocol with one `Py_buffer` each, because a typed memoryview per call costs several times as
much; the copy runs without the GIL when it is long enough to matter.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bool cimport PyBool_Check
from cpython.exc cimport PyErr_Clear
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1

cdef extern from "streamed.h":
    const size_t SHML_STREAMED_NBYTES
    void shml_copy_streamed(uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil

cdef size_t LONG_COPY = 16384  # bytes from which a copy takes longer than releasing and reacquiring the GIL

import inspect

import numpy as np


cdef extern from *:
    """
    #include <stdint.h>

    /* DLPack 1.3, https://dmlc.github.io/dlpack/latest/c_api.html: the struct that a tensor's class offers as
     * __dlpack_c_exchange_api__ */
    typedef struct { int32_t device_type, device_id; } shml_dl_device;
    typedef struct { uint8_t code, bits; uint16_t lanes; } shml_dl_dtype;
    typedef struct {
        void *data;
        shml_dl_device device;
        int32_t ndim;
        shml_dl_dtype dtype;
        int64_t *shape, *strides; /* in elements; strides NULL: C order */
        uint64_t byte_offset;
    } shml_dl_tensor;
    typedef struct {
        uint32_t major, minor; /* of the version */
        void *previous;
        void *allocate, *managed_from_object, *managed_to_object;
        int (*tensor_from_object)(void *object, shml_dl_tensor *tensor); /* borrows; -1 and an exception for other memory */
        void *current_stream;
    } shml_dl_exchange;
    enum { SHML_DL_MAJOR = 1, SHML_DL_CPU = 1 };

    /* Return what `value.name` and `value.name()` look up each time: a type's attribute, and its method without arguments. */
    static getter shml_getter_of(PyObject *descriptor) {
        return Py_IS_TYPE(descriptor, &PyGetSetDescr_Type) ? ((PyGetSetDescrObject *)descriptor)->d_getset->get : NULL;
    }
    static void *shml_closure_of(PyObject *descriptor) { return ((PyGetSetDescrObject *)descriptor)->d_getset->closure; }
    static PyCFunction shml_method_of(PyObject *descriptor) {
        if (!Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) return NULL;
        PyMethodDef *method = ((PyMethodDescrObject *)descriptor)->d_method;
        return method->ml_flags == METH_NOARGS ? method->ml_meth : NULL;
    }
    """
    ctypedef struct shml_dl_device:
        int32_t device_type
    ctypedef struct shml_dl_dtype:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct shml_dl_tensor:
        void *data
        shml_dl_device device
        int32_t ndim
        shml_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct shml_dl_exchange:
        uint32_t major
        int (*tensor_from_object)(void *object, shml_dl_tensor *tensor)
    int SHML_DL_MAJOR, SHML_DL_CPU
    ctypedef object (*shml_getter "getter")(object, void *)
    ctypedef object (*shml_method "PyCFunction")(object, void *)
    shml_getter shml_getter_of(object descriptor)
    void *shml_closure_of(object descriptor)
    shml_method shml_method_of(object descriptor)


cdef object _MISSING = object()


cdef class Part:
    """The target of one part of a sample: a column, or several columns in the structure of the sample."""

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        return False

    def put(self, value, Py_ssize_t row):
        """Write the part's value of one sample into a row. Return False if its kind or shape is not the column's."""
        return self.write(value, row)


cdef class DictPart(Part):
    """Parts by key, for samples that are dicts with exactly these keys; in the first row also in this order, which the batch has."""

    cdef tuple _keys, _parts

    def __cinit__(self, keys, parts):
        self._keys, self._parts = tuple(keys), tuple(parts)

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        if type(value) is not dict or len(<dict>value) != len(self._keys) or (row == 0 and tuple(<dict>value) != self._keys):
            return False
        for i in range(len(self._keys)):
            found = (<dict>value).get(self._keys[i], _MISSING)
            if found is _MISSING or not (<Part>self._parts[i]).write(found, row):
                return False
        return True


cdef class SequencePart(Part):
    """Parts by position, for samples that are sequences of one of these types and this length."""

    cdef tuple _kinds, _parts

    def __cinit__(self, kinds, parts):
        self._kinds, self._parts = tuple(kinds), tuple(parts)

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        cdef Py_ssize_t n = len(self._parts)
        if type(value) not in self._kinds or len(value) != n:
            return False
        for i in range(n):
            if not (<Part>self._parts[i]).write((<tuple>value)[i] if isinstance(value, tuple) else (<list>value)[i], row):
                return False
        return True


cdef class Column(Part):
    """Rows of `row_nbytes` from `address` on, in memory that `keeper` keeps mapped. The base class accepts no value."""

    cdef uint8_t *_base
    cdef readonly size_t row_nbytes
    cdef object _keeper

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, *args):
        self._base = <uint8_t *>address
        self.row_nbytes = row_nbytes
        self._keeper = keeper


cdef class IntColumn(Column):
    """int64 rows; accepts exactly int (bool is not)."""

    cdef bint write(self, object value, Py_ssize_t row) except -1:
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

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        if not PyFloat_CheckExact(value):
            return False
        (<double *>self._base)[row] = PyFloat_AS_DOUBLE(value)
        return True


cdef class BoolColumn(Column):
    """bool rows; accepts exactly bool."""

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        if not PyBool_Check(value):
            return False
        self._base[row] = value is True
        return True


cdef class ArrayColumn(Column):
    """Rows of a numpy dtype and shape; accepts ndarray (and memmap) or numpy scalars of exactly this dtype and shape."""

    cdef object _dtype, _rows
    cdef tuple _shape
    cdef bint _is_scalar

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, rows, bint is_scalar):
        self._rows = rows  # ndarray (capacity, *shape) over the same memory
        self._dtype = rows.dtype
        self._shape = rows.shape[1:]
        self._is_scalar = is_scalar

    cdef bint write(self, object value, Py_ssize_t row) except -1:
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
    """Rows of a torch dtype and shape; accepts plain contiguous or strided CPU tensors of exactly this dtype and shape.

    If torch offers DLPack's C functions (from 2.10 on), one call returns a tensor's address, type and shape: 0.1 us instead of 0.8.
    What they do not tell is read from the tensor itself: whether it requires a gradient or has a pending sign.

    Args:
        rows: a tensor (capacity, *shape) over the same memory.
        code: DLPack's code of the element type.
        is_plain: returns whether a tensor is only bytes in this process's memory; for older versions of torch.
    """

    cdef object _dtype, _shape, _rows, _type, _is_plain
    cdef shml_dl_exchange *_exchange
    cdef shml_getter _requires_grad
    cdef void *_requires_grad_closure
    cdef shml_method _is_neg
    cdef uint8_t _code, _bits
    cdef int32_t _ndim
    cdef bint _has_sign

    def __cinit__(self, uintptr_t address, size_t row_nbytes, keeper, rows, uint8_t code, is_plain):
        self._rows = rows
        self._dtype = rows.dtype
        self._shape = tuple(rows.shape[1:])
        self._type = type(rows)
        self._is_plain = is_plain
        self._code, self._bits, self._ndim = code, 8 * rows.element_size(), len(self._shape)
        self._has_sign = rows.dtype.is_floating_point
        capsule = getattr(self._type, "__dlpack_c_exchange_api__", None)
        cdef shml_dl_exchange *exchange
        if PyCapsule_IsValid(capsule, "dlpack_exchange_api") and not rows.dtype.is_complex:  # conjugation may be pending
            exchange = <shml_dl_exchange *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
            requires_grad, is_neg = (inspect.getattr_static(self._type, name) for name in ("requires_grad", "is_neg"))
            self._requires_grad, self._is_neg = shml_getter_of(requires_grad), shml_method_of(is_neg)
            if exchange.major == SHML_DL_MAJOR and exchange.tensor_from_object and self._requires_grad and self._is_neg:
                self._requires_grad_closure = shml_closure_of(requires_grad)
                self._exchange = exchange

    cdef bint write(self, object value, Py_ssize_t row) except -1:
        if type(value) is not self._type:
            return False
        cdef uintptr_t address
        cdef shml_dl_tensor tensor
        if self._exchange != NULL:
            if self._exchange.tensor_from_object(<void *>value, &tensor):
                PyErr_Clear()
                return False
            if not self._fits(&tensor) or self._requires_grad(value, self._requires_grad_closure):
                return False
            if self._has_sign and self._is_neg(value, NULL):
                return False
            if self._is_contiguous(&tensor):
                if self.row_nbytes:
                    _copy(self._base + row * self.row_nbytes, <uint8_t *>tensor.data + tensor.byte_offset, self.row_nbytes)
                return True
        elif value.dtype is not self._dtype or not self._is_plain(value) or value.shape != self._shape:  # a nested one has no shape
            return False
        elif value.is_contiguous():
            address = value.data_ptr()
            if self.row_nbytes:
                _copy(self._base + row * self.row_nbytes, <const void *>address, self.row_nbytes)
            return True
        self._rows[row].copy_(value)
        return True

    cdef bint _fits(self, shml_dl_tensor *tensor):
        if tensor.device.device_type != SHML_DL_CPU or tensor.ndim != self._ndim or (tensor.data == NULL and self.row_nbytes):
            return False
        if tensor.dtype.code != self._code or tensor.dtype.bits != self._bits or tensor.dtype.lanes != 1:
            return False
        for axis in range(self._ndim):
            if tensor.shape[axis] != <int64_t>(<tuple>self._shape)[axis]:
                return False
        return True

    cdef bint _is_contiguous(self, shml_dl_tensor *tensor) noexcept:
        cdef int64_t step = 1
        cdef int32_t axis = self._ndim - 1
        if tensor.strides == NULL or not self.row_nbytes:
            return True
        while axis >= 0:
            if tensor.shape[axis] != 1 and tensor.strides[axis] != step:
                return False
            step *= tensor.shape[axis]
            axis -= 1
        return True


cdef inline void _copy(void *to, const void *source, size_t nbytes):
    if nbytes >= SHML_STREAMED_NBYTES:
        with nogil:
            shml_copy_streamed(<uint8_t *>to, <const uint8_t *>source, nbytes)
    elif nbytes >= LONG_COPY:
        with nogil:
            memcpy(to, source, nbytes)
    else:
        memcpy(to, source, nbytes)


def copy_from(uintptr_t to, uintptr_t source, size_t nbytes):
    """Copy `nbytes` from one address to another, without the GIL if that pays."""
    _copy(<void *>to, <const void *>source, nbytes)
