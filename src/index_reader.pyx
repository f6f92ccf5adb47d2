"""Entries of a packed index, created when they are accessed (see index.h for the layout).

PackedRows is the fast half of shmload.SharedIndex, which derives from it: a subscript with an integer never leaves C. The memory is
this process's own mapping of a finished segment, so only the index is checked.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef extern from "index.h" nogil:
    ctypedef struct shml_column:
        int kind
        const uint64_t *ends
        const char *data
    int SHML_STR, SHML_BYTES, SHML_INT, SHML_FLOAT, SHML_BOOL, SHML_ARRAY
    const uint64_t SHML_IS_NONE, SHML_IS_WIDE, SHML_END
    uint64_t shml_begin(const shml_column *column, int64_t row)

cdef extern from "Python.h":
    str PyUnicode_New(Py_ssize_t length, Py_UCS4 largest)
    void *PyUnicode_DATA(object text)
    str PyUnicode_DecodeUTF8(const char *data, Py_ssize_t nbytes, const char *errors)
    Py_ssize_t PyNumber_AsSsize_t(object value, object error) except? -1
    bint PyIndex_Check(object value)
    bint PySlice_Check(object value)

cdef dict _KINDS = {"str": SHML_STR, "bytes": SHML_BYTES, "int": SHML_INT, "float": SHML_FLOAT, "bool": SHML_BOOL, "array": SHML_ARRAY}
cdef object _new_tuple = tuple.__new__


cdef class PackedRows:
    """Read-only rows: `len`, subscripts, iteration, `take`."""

    cdef object _memory           # keeps the columns mapped
    cdef shml_column *_columns
    cdef Py_ssize_t _num_columns
    cdef tuple _names             # keys of a dict's values; None if entries are not dicts
    cdef object _row_type         # tuple, or a named tuple's class; None if entries are not tuples
    cdef tuple _arrays            # arrays of the "array" columns; None for the others
    cdef Py_ssize_t _start, _step, _count  # entry i is row start + i * step

    def __cinit__(self, *args, **kwargs):
        self._columns = NULL

    def __dealloc__(self):
        free(self._columns)

    def _bind(self, memory, columns, *, names, row_type, arrays, rows):
        """Set the columns and rows to read.

        Args:
            memory: Mapping with the columns.
            columns: for each column its kind, the offset of its words (-1 if it has none), and the offset of its data.
            names, row_type: what entries are: dicts, tuples, or if both are None the values of the only column.
            arrays: for each column its array; None for a column of another kind.
            rows: range of the rows to show.
        """
        cdef uintptr_t base = memory.address
        cdef Py_ssize_t number
        free(self._columns)
        self._num_columns = len(columns)
        self._columns = <shml_column *>calloc(self._num_columns, sizeof(shml_column))
        if self._columns == NULL:
            raise MemoryError
        for number, (kind, ends, data) in enumerate(columns):
            self._columns[number].kind = _KINDS[kind]
            if ends >= 0:
                self._columns[number].ends = <const uint64_t *>(base + <uintptr_t>ends)
            self._columns[number].data = <const char *>(base + <uintptr_t>data)
        self._memory, self._names, self._row_type, self._arrays = memory, names, row_type, arrays
        self._start, self._step, self._count = rows.start, rows.step, len(rows)

    def _slice(self, item):
        raise NotImplementedError

    def __len__(self):
        return self._count

    def __getitem__(self, item):
        if PySlice_Check(item):
            return self._slice(item)
        if not PyIndex_Check(item):
            raise TypeError(f"an index takes integers and slices, got {type(item).__name__}")
        return self._entry(self._row(PyNumber_AsSsize_t(item, IndexError)))

    def __iter__(self):
        cdef Py_ssize_t index
        for index in range(self._count):
            yield self._entry(self._start + index * self._step)

    def take(self, indices):
        """Return the entries at these indices, in their order, as a list.

        Args:
            indices: integers, negative ones from the end: a list, an array, a tensor.
        Raises:
            IndexError: an index is out of range.
        """
        return [self._entry(self._row(PyNumber_AsSsize_t(index, IndexError))) for index in indices]

    def __getitems__(self, indices):
        """`take`, under the name that torch's fetchers call."""
        return self.take(indices)

    cdef Py_ssize_t _row(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t counted = index + self._count if index < 0 else index
        if counted < 0 or counted >= self._count:
            raise IndexError(f"index {index} is out of range: there are {self._count} entries")
        return self._start + counted * self._step

    cdef object _entry(self, Py_ssize_t row):
        cdef Py_ssize_t number
        cdef dict named
        cdef tuple values
        if self._names is not None:
            named = {}
            for number in range(self._num_columns):
                named[self._names[number]] = self._value(number, row)
            return named
        if self._row_type is None:
            return self._value(0, row)
        values = PyTuple_New(self._num_columns)
        for number in range(self._num_columns):
            value = self._value(number, row)
            Py_INCREF(value)
            PyTuple_SET_ITEM(values, number, value)
        return values if self._row_type is tuple else _new_tuple(self._row_type, values)

    cdef object _value(self, Py_ssize_t number, Py_ssize_t row):
        cdef const shml_column *column = &self._columns[number]
        cdef uint64_t begin, word
        cdef Py_ssize_t nbytes
        if column.kind == SHML_INT:
            return (<const int64_t *>column.data)[row]
        if column.kind == SHML_FLOAT:
            return (<const double *>column.data)[row]
        if column.kind == SHML_BOOL:
            return column.data[row] != 0
        if column.kind == SHML_ARRAY:
            array = self._arrays[number]
            return array.item(row) if array.ndim == 1 else array[row].copy()
        word, begin = column.ends[row], shml_begin(column, row)
        if word & SHML_IS_NONE:
            return None
        nbytes = <Py_ssize_t>((word & SHML_END) - begin)
        if column.kind == SHML_BYTES:
            return PyBytes_FromStringAndSize(column.data + begin, nbytes)
        if word & SHML_IS_WIDE:
            return PyUnicode_DecodeUTF8(column.data + begin, nbytes, "surrogatepass")
        text = PyUnicode_New(nbytes, 127)
        memcpy(PyUnicode_DATA(text), column.data + begin, nbytes)
        return text
