"""Stateless draws: random words by position, and weighted indices from an alias table. See draws.h for the method and its sources.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "draws.h" nogil:
    ctypedef struct shml_uint128:
        pass
    ctypedef struct shml_alias_column:
        uint64_t own, alias
    void shml_draw_words(uint64_t seed, uint64_t n, uint64_t epoch, uint64_t stream, uint64_t start, uint64_t *out, size_t count)
    void shml_alias_draw(const shml_alias_column *columns, uint64_t n, uint64_t *words, size_t count)
    void shml_alias_build(const uint64_t *weights, uint64_t n, shml_alias_column *columns, shml_uint128 *held, uint64_t *pending)


def fill_words(uint64_t[::1] out, *, uint64_t seed, uint64_t epoch, uint64_t stream, uint64_t n, uint64_t start=0):
    """Write the random words of positions [start, start + len(out)) into out; n is part of the key, besides the seed."""
    if out.shape[0]:
        with nogil:
            shml_draw_words(seed, n, epoch, stream, start, &out[0], out.shape[0])


cdef class AliasTable:
    """A table for drawing indices in proportion to weights: 16 bytes an index, two memory accesses a draw.

    Args:
        weights: in units of 2^-63 of the largest, so that one of them is 2^63; fewer than 2^31.
    """

    cdef shml_alias_column *_columns
    cdef readonly uint64_t n

    def __cinit__(self, const uint64_t[::1] weights):
        cdef uint64_t n = weights.shape[0], i
        cdef uint64_t *pending
        cdef shml_uint128 *held
        for i in range(n):
            if weights[i] > <uint64_t>1 << 63:
                raise ValueError(f"weights must be at most 2^63, got {weights[i]} at index {i}")
            self.n += weights[i] == <uint64_t>1 << 63
        if self.n == 0 or n >= <uint64_t>1 << 31:
            raise ValueError(f"there must be fewer than 2^31 weights, and at least one must be 2^63, got {n} weights without one")
        self.n = n
        self._columns = <shml_alias_column *>malloc(n * sizeof(shml_alias_column))
        held = <shml_uint128 *>malloc(n * sizeof(shml_uint128))
        pending = <uint64_t *>malloc(n * sizeof(uint64_t))
        try:
            if self._columns == NULL or held == NULL or pending == NULL:
                raise MemoryError
            with nogil:
                shml_alias_build(&weights[0], n, self._columns, held, pending)
        finally:
            free(held)
            free(pending)

    def __dealloc__(self):
        free(self._columns)

    def fill(self, uint64_t start, int64_t[::1] out, *, uint64_t seed, uint64_t epoch, uint64_t stream):
        """Write the indices drawn at positions [start, start + len(out)) into out."""
        if out.shape[0]:
            with nogil:
                shml_draw_words(seed, self.n, epoch, stream, start, <uint64_t *>&out[0], out.shape[0])
                shml_alias_draw(self._columns, self.n, <uint64_t *>&out[0], out.shape[0])
