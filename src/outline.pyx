"""Split a batch into an outline, which marshal can write, and its leaves; and join them again.

The outline is the batch with Ellipsis in place of each leaf. None, numbers and text stay in the outline; lists, tuples and dicts
are copied. A leaf is anything else: arrays, tensors, objects of other classes, large text and long lists of text. The
structure is walked in C, because a Python function for each value made such batches cost several times what torch's cost.
"""

from cpython.bytes cimport PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.complex cimport PyComplex_CheckExact
from cpython.dict cimport PyDict_CheckExact, PyDict_SetItem
from cpython.float cimport PyFloat_CheckExact
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE, PyList_SetItem
from cpython.long cimport PyLong_CheckExact
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM

cdef extern from "Python.h":
    bint PyUnicode_CheckExact(object value)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)

cdef Py_ssize_t _LARGE = 4096  # characters or bytes from which a text is a leaf, so that it is copied once
cdef Py_ssize_t _MANY = 64  # number of values from which a list of text is a leaf
cdef int _MAX_DEPTH = 100  # a container below this depth, or one that contains itself, is a leaf


cdef inline bint _is_text(object value):
    return PyUnicode_CheckExact(value) or PyBytes_CheckExact(value)


cdef inline bint _is_large(object text):
    return (PyUnicode_GET_LENGTH(text) if PyUnicode_CheckExact(text) else PyBytes_GET_SIZE(text)) >= _LARGE


cdef inline bint _is_small_value(object value):
    """Return whether the value stays in the outline. Only exact types do, because marshal writes a subclass as its base class."""
    if value is None or value is True or value is False:
        return True
    if PyLong_CheckExact(value) or PyFloat_CheckExact(value) or PyComplex_CheckExact(value):
        return True
    return _is_text(value) and not _is_large(value)


cdef bint _is_column(list values):
    """Return whether a list consists of many or large texts of one type, which are packed as a column."""
    cdef Py_ssize_t count = PyList_GET_SIZE(values)
    if count == 0:
        return False
    cdef object value, head = values[0]
    if not _is_text(head) or not (count >= _MANY or _is_large(head)):
        return False
    for value in values:  # another thread may change the list at the same time
        if type(value) is not type(head):
            return False
    return True


cdef object _split(object value, list leaves, int depth):
    cdef Py_ssize_t i, count
    cdef object key, item, part
    cdef tuple frozen
    cdef dict mapping
    if _is_small_value(value):
        return value
    if depth < _MAX_DEPTH:
        if PyList_CheckExact(value) and not _is_column(value):
            return [_split(item, leaves, depth + 1) for item in <list>value]
        if PyTuple_CheckExact(value):
            count = PyTuple_GET_SIZE(value)
            frozen = PyTuple_New(count)
            for i in range(count):
                part = _split(<object>PyTuple_GET_ITEM(value, i), leaves, depth + 1)
                Py_INCREF(part)
                PyTuple_SET_ITEM(frozen, i, part)
            return frozen
        if PyDict_CheckExact(value) and _has_plain_keys(value):
            mapping = {}
            for key, item in (<dict>value).items():
                PyDict_SetItem(mapping, key, _split(item, leaves, depth + 1))
            return mapping
    leaves.append(value)
    return Ellipsis


cdef bint _has_plain_keys(dict value):
    for key in value:
        if not _is_small_value(key):
            return False
    return True


def split(value):
    """Return (outline, leaves) of a value, with the leaves in the order of the structure.

    The outline shares no list, tuple or dict with the value. The leaves are the value's own objects.
    """
    cdef list leaves = []
    return _split(value, leaves, 0), leaves


cdef class _Leaves:
    cdef list values
    cdef Py_ssize_t used

    cdef object take(self):
        if self.used >= PyList_GET_SIZE(self.values):
            raise ValueError(f"an outline has more places than its {self.used} leaves")
        self.used += 1
        return self.values[self.used - 1]


cdef object _join(object outline, _Leaves leaves):
    cdef Py_ssize_t i
    cdef object key, item, part
    cdef tuple frozen
    if outline is Ellipsis:
        return leaves.take()
    if PyList_CheckExact(outline):
        for i in range(PyList_GET_SIZE(outline)):
            item = <object>PyList_GET_ITEM(outline, i)
            part = _join(item, leaves)
            if part is not item:
                Py_INCREF(part)
                PyList_SetItem(outline, i, part)
    elif PyTuple_CheckExact(outline):
        frozen = PyTuple_New(PyTuple_GET_SIZE(outline))
        for i in range(PyTuple_GET_SIZE(outline)):
            part = _join(<object>PyTuple_GET_ITEM(outline, i), leaves)
            Py_INCREF(part)
            PyTuple_SET_ITEM(frozen, i, part)
        return frozen
    elif PyDict_CheckExact(outline):
        for key, item in (<dict>outline).items():
            part = _join(item, leaves)
            if part is not item:
                PyDict_SetItem(outline, key, part)  # changes a value, never the keys, so the iteration stays valid
    return outline


def join(outline, list values):
    """Return the value that has this outline and these leaves. Lists and dicts of the outline are changed and become the value's.

    Args:
        outline: an outline, as of `split`.
        values: the leaves, in the order of `split`.
    Raises:
        ValueError: the outline has more or fewer places than there are leaves.
    """
    cdef _Leaves leaves = _Leaves()
    leaves.values = values
    result = _join(outline, leaves)
    if leaves.used != len(values):
        raise ValueError(f"an outline has {leaves.used} places for {len(values)} leaves")
    return result
