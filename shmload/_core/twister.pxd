from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "twister.h" nogil:
    ctypedef struct shml_twisters:
        uint32_t plain[16][624]
        uint32_t mixed[16][624]

cdef bint integer_of(object key, int64_t *index) except -1
cpdef int64_t index_of(object key) except? -1

cdef class Reseeder:
    cdef readonly uint64_t key
    cdef public size_t random_at, numpy_at, own_at, gauss_at, torch_at
    cdef object _python, _numpy, _torch
    cdef dict _randoms, _modules, _torchs
    cdef uint64_t _stream, _seed, _epoch
    cdef int64_t _indices[16]
    cdef uint64_t _keys[16]
    cdef int _next, _count, _isa
    cdef shml_twisters *_states
    cdef int seed(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1
    cdef int _write(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1
    cdef bint _are_as_seeded(self) except -1
    cdef int _look_ahead(self, uint64_t seed, uint64_t epoch, int64_t index, list keys, Py_ssize_t row) except -1
