"""A packed column of str or bytes in a slot, and the list of objects made from it.

    count * 8 bytes: where each value ends (uint64, from the start of the text) | the values' bytes end to end

A column is bytes, ASCII, or UTF-8 with lone surrogates, which a file name may contain, as in Python's "surrogatepass". ASCII is
converted back without checking its bytes. A plain ASCII value is copied from the str itself. Other values are encoded into separate
bytes: asking the str itself for its UTF-8 would make it keep that copy, and a dataset that holds its strings would grow by them.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.unicode cimport PyUnicode_Check, PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    void *PyUnicode_DATA(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 maxchar)
    object PyUnicode_AsEncodedString(object text, const char *encoding, const char *errors)


BYTES, ASCII, UTF8 = range(3)
cdef int _BYTES = 0, _ASCII = 1


cdef class TextColumn:
    """Values ready to be written; `kind` is BYTES, ASCII or UTF8.

    Args:
        values: all str, or all bytes; values of a subclass, such as numpy's, come back as str or bytes.
    Raises:
        TypeError: the values have other or mixed types.
    """

    cdef list _pieces
    cdef readonly uint64_t nbytes
    cdef readonly int kind

    def __init__(self, list values):
        cdef uint64_t total = 0
        cdef object value
        cdef bint is_bytes = len(values) > 0 and PyBytes_Check(values[0])
        self._pieces = []
        self.kind = BYTES if is_bytes else ASCII
        for value in values:
            if is_bytes:
                if not PyBytes_Check(value):
                    raise TypeError(f"all values of a bytes column must be bytes, got {type(value).__name__}")
                total += PyBytes_GET_SIZE(value)
            else:
                if not PyUnicode_Check(value):
                    raise TypeError(f"all values of a str column must be str, got {type(value).__name__}")
                if PyUnicode_IS_COMPACT_ASCII(value):
                    total += PyUnicode_GET_LENGTH(value)
                else:
                    self.kind = UTF8
                    value = PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass")
                    total += PyBytes_GET_SIZE(value)
            self._pieces.append(value)
        self.nbytes = 8 * len(values) + total

    def write(self, uint8_t[::1] room not None):
        """Write the column to the start of `room`, which has at least `nbytes`."""
        cdef Py_ssize_t i, nbytes, count = len(self._pieces)
        cdef uint64_t end = 0
        cdef object piece
        if <uint64_t>room.shape[0] < self.nbytes:
            raise ValueError(f"the buffer of {room.shape[0]} bytes is too small for a column of {self.nbytes}")
        if count == 0:
            return
        cdef uint8_t *ends = &room[0]
        cdef uint8_t *text = ends + 8 * count
        for i in range(count):
            piece = self._pieces[i]
            if PyBytes_Check(piece):
                nbytes = PyBytes_GET_SIZE(piece)
                memcpy(text + end, PyBytes_AS_STRING(piece), nbytes)
            else:
                nbytes = PyUnicode_GET_LENGTH(piece)
                memcpy(text + end, PyUnicode_DATA(piece), nbytes)
            end += nbytes
            memcpy(ends + 8 * i, &end, 8)


def read_text(uintptr_t address, uint64_t nbytes, Py_ssize_t count, int kind):
    """Return the column of `count` values of a kind at an address as a new list; `nbytes` may be read there.

    Raises:
        ValueError: the column is corrupt.
    """
    cdef const uint8_t *ends = <const uint8_t *>address
    cdef const char *text = <const char *>address + 8 * count
    cdef uint64_t end, start = 0
    cdef Py_ssize_t i
    cdef object value
    if count < 0 or <uint64_t>count > nbytes // 8:
        raise ValueError(f"the memory of {nbytes} bytes is too small for a text column of {count} values")
    cdef uint64_t limit = nbytes - 8 * <uint64_t>count
    cdef list values = PyList_New(count)
    for i in range(count):
        memcpy(&end, ends + 8 * i, 8)
        if end < start or end > limit:
            for j in range(i, count):
                Py_INCREF(None)
                PyList_SET_ITEM(values, j, None)
            raise ValueError(f"value {i} of a text column ends at {end}, beyond its {limit} bytes or before its start")
        if kind == _BYTES:
            value = PyBytes_FromStringAndSize(text + start, end - start)
        elif kind == _ASCII:
            value = PyUnicode_New(end - start, 127)
            memcpy(PyUnicode_DATA(value), text + start, end - start)
        else:
            value = PyUnicode_DecodeUTF8(text + start, end - start, "surrogatepass")
        Py_INCREF(value)
        PyList_SET_ITEM(values, i, value)
        start = end
    return values
