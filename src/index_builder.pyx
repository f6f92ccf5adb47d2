"""Columns of a packed index while they grow: each entry is copied as it arrives, and no object is kept.

The bytes grow in private memory by doubling, for which the C library moves pages, and are copied into the segment once, when their
number is known (see index.h for the layout). ASCII text is copied from the str itself; other text is encoded temporarily, because
PyUnicode_AsUTF8AndSize would leave a copy in every str.
"""

from cpython.bool cimport PyBool_Check
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_CheckExact
from cpython.float cimport PyFloat_AsDouble, PyFloat_Check
from cpython.long cimport PyLong_Check
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

import numpy as np

cdef extern from "index.h" nogil:
    int SHML_UNKNOWN, SHML_STR, SHML_BYTES, SHML_INT, SHML_FLOAT, SHML_BOOL, SHML_ARRAY
    const uint64_t SHML_IS_NONE, SHML_IS_WIDE

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    void *PyUnicode_DATA(object text)
    bytes PyUnicode_AsEncodedString(object text, const char *encoding, const char *errors)

_KINDS = ("str", "str", "bytes", "int", "float", "bool", "array")  # by number; a column of only None is of str
_NUMERIC = "biufc"  # numpy's kinds of numbers
_MISSING = object()
_TAKEN = "str, bytes, int, float, bool, numpy numbers and numeric arrays"


cdef class _Buffer:
    """A growing buffer."""

    cdef char *base
    cdef size_t nbytes, capacity

    def __dealloc__(self):
        free(self.base)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.base if self.base else <char *>"", <Py_ssize_t>self.nbytes, 1, flags)

    cdef inline int add(self, const void *data, size_t nbytes) except -1:
        if self.capacity - self.nbytes < nbytes:
            self.grow(nbytes)
        memcpy(self.base + self.nbytes, data, nbytes)
        self.nbytes += nbytes
        return 0

    cdef int grow(self, size_t nbytes) except -1:
        cdef size_t capacity = max(2 * self.capacity, self.nbytes + nbytes, <size_t>4096)
        cdef char *base = <char *>realloc(self.base, capacity)
        if base == NULL:
            raise MemoryError(f"cannot allocate {capacity} bytes for a column of the index")
        self.base, self.capacity = base, capacity
        return 0


cdef class ColumnBuilder:
    """One growing column; its first value other than None sets the type of all.

    Args:
        name: name of the column, for its users and for errors; None if the entries are not rows.
    Attributes:
        count: number of entries so far.
        is_nullable: whether one of them was None.
        dtype, shape: of an "array" column's rows; None and () for other kinds.
    """

    cdef readonly object name
    cdef readonly Py_ssize_t count
    cdef readonly bint is_nullable
    cdef readonly object dtype
    cdef readonly tuple shape
    cdef int _kind
    cdef _Buffer _data, _ends

    def __cinit__(self, name):
        self.name = name
        self.shape = ()
        self._data, self._ends = _Buffer(), _Buffer()

    @property
    def kind(self):
        """Return the kind of the values: "str", "bytes", "int", "float", "bool" or "array"."""
        return _KINDS[self._kind]

    @property
    def data(self):
        """Return the values' bytes."""
        return memoryview(self._data)

    @property
    def ends(self):
        """Return the words of a text column, as bytes."""
        return memoryview(self._ends)

    def extend(self, values):
        """Append all values of an iterable."""
        for value in values:
            self.append(value)

    def extend_array(self, array):
        """Make this the column of a numeric array's rows; only for an empty column."""
        self._become_array(array.dtype, array.shape[1:])
        cdef const unsigned char[::1] view = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if view.shape[0]:
            self._data.add(&view[0], view.shape[0])
        self.count = array.shape[0]

    cdef int append(self, value) except -1:
        cdef int64_t number
        cdef double real
        cdef int overflow = 0
        cdef char flag
        if self._kind == SHML_STR and PyUnicode_Check(value):
            self._append_str(value)
        elif value is None and self._kind <= SHML_BYTES:
            self.is_nullable = True
            self._end(SHML_IS_NONE)
        elif self._kind == SHML_UNKNOWN:
            self._become(value)
            return self.append(value)
        elif self._kind == SHML_BYTES and PyBytes_Check(value):
            self._data.add(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
            self._end(0)
        elif self._kind == SHML_INT and _is_int(value):
            number = PyLong_AsLongLongAndOverflow(value if PyLong_Check(value) else int(value), &overflow)
            if overflow:
                raise OverflowError(f"{self._where()}{value} does not fit in int64: store it as a str")
            self._data.add(&number, sizeof(number))
        elif self._kind == SHML_FLOAT and (PyFloat_Check(value) or isinstance(value, np.floating)):
            real = PyFloat_AsDouble(value)
            self._data.add(&real, sizeof(real))
        elif self._kind == SHML_BOOL and (PyBool_Check(value) or isinstance(value, np.bool_)):
            flag = 1 if value else 0
            self._data.add(&flag, sizeof(flag))
        elif self._kind == SHML_ARRAY and isinstance(value, np.ndarray):
            self._append_array(value)
        else:
            raise self._mismatch(value)
        self.count += 1
        return 0

    cdef int _append_str(self, value) except -1:
        cdef bytes encoded
        if PyUnicode_IS_COMPACT_ASCII(value):
            self._data.add(PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value))
            self._end(0)
        else:
            encoded = PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass")
            self._data.add(PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded))
            self._end(SHML_IS_WIDE)
        return 0

    cdef inline int _end(self, uint64_t marks) except -1:
        cdef uint64_t word = self._data.nbytes | marks
        return self._ends.add(&word, sizeof(word))

    cdef int _append_array(self, value) except -1:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise ValueError(
                f"{self._where()}an array of {value.dtype} {list(value.shape)}, after arrays of {self.dtype} {list(self.shape)}; "
                "all rows of a column must have one dtype and shape"
            )
        cdef const unsigned char[::1] view = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if view.shape[0]:
            self._data.add(&view[0], view.shape[0])
        return 0

    cdef int _become(self, value) except -1:
        """Adopt the type of the column's first value."""
        cdef int kind
        if PyUnicode_Check(value):
            kind = SHML_STR
        elif PyBytes_Check(value):
            kind = SHML_BYTES
        elif PyBool_Check(value) or isinstance(value, np.bool_):
            kind = SHML_BOOL
        elif _is_int(value):
            kind = SHML_INT
        elif PyFloat_Check(value) or isinstance(value, np.floating):
            kind = SHML_FLOAT
        elif isinstance(value, np.ndarray):
            kind = SHML_ARRAY
        else:
            raise TypeError(f"{self._where()}an index cannot store values of type {_type(value)}, only {_TAKEN}. Convert it, for example "
                            "with str(...) or os.fspath(...)")
        if self.count and kind > SHML_BYTES:
            raise TypeError(f"{self._where()}{_type(value)} after None: only str and bytes can be None, so use nan or -1 for missing numbers")
        if kind == SHML_ARRAY:
            self._become_array(value.dtype, value.shape)
        self._kind = kind
        return 0

    def _become_array(self, dtype, shape):
        if dtype.kind not in _NUMERIC or not dtype.isnative:
            raise TypeError(f"{self._where()}an index cannot store an array of {dtype}, only {_TAKEN}, in native byte order")
        self.dtype, self.shape = dtype, tuple(shape)
        self._kind = SHML_ARRAY

    cdef str _where(self):
        return f"entry {self.count}: " if self.name is None else f"entry {self.count}, column {self.name!r}: "

    cdef object _mismatch(self, value):
        if value is None:
            return TypeError(f"{self._where()}None in a column of {self.kind}; only str and bytes can be missing: give nan, or -1")
        return TypeError(f"{self._where()}{_type(value)} after {self.kind}; the values of a column have one type")


cdef bint _is_int(value):
    return (PyLong_Check(value) and not PyBool_Check(value)) or isinstance(value, np.integer)


cdef str _type(value):
    return "None" if value is None else type(value).__name__


def pack_tuples(rows, tuple columns, row_type):
    """Append rows to the columns, one value to each.

    Raises:
        TypeError: a row is not a `row_type`, or a value does not have its column's type.
        ValueError: a row has more or fewer values than there are columns.
    """
    cdef Py_ssize_t number, num_columns = len(columns)
    for row in rows:
        if type(row) is not row_type:
            raise TypeError(_other_row(columns, row, row_type))
        if PyTuple_GET_SIZE(row) != num_columns:
            raise ValueError(f"entry {(<ColumnBuilder>columns[0]).count}: {len(row)} values after rows of {num_columns}")
        for number in range(num_columns):
            (<ColumnBuilder><object>PyTuple_GET_ITEM(columns, number)).append(<object>PyTuple_GET_ITEM(row, number))


def pack_dicts(rows, tuple columns, tuple names):
    """Append dicts to the columns, which are in the order of their names.

    Raises:
        TypeError: a row is not a dict, or a value does not have its column's type.
        ValueError: a row has other keys.
    """
    cdef Py_ssize_t number, num_columns = len(columns)
    for row in rows:
        if not PyDict_CheckExact(row):
            raise TypeError(_other_row(columns, row, dict))
        for number in range(num_columns):
            value = (<dict>row).get(<object>PyTuple_GET_ITEM(names, number), _MISSING)
            if value is _MISSING or len(<dict>row) != num_columns:
                raise ValueError(f"entry {(<ColumnBuilder>columns[number]).count}: keys {list(row)} after rows of {list(names)}")
            (<ColumnBuilder><object>PyTuple_GET_ITEM(columns, number)).append(value)


cdef str _other_row(tuple columns, row, row_type):
    return f"entry {(<ColumnBuilder>columns[0]).count}: {_type(row)} after {row_type.__name__}; the entries of an index are of one type"
