cdef class Part:
    cdef bint write(self, object value, Py_ssize_t row) except -1
