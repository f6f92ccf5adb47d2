"""Keyed bijections of [0, n) over whole arrays, and the keys of per-sample randomness. See permutation.h for the method and its
sources.

Positions and indices are int64 as in torch; seeds, epochs and streams are uint64. Values are checked before the GIL is released.
"""

cimport cython
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "permutation.h" nogil:
    const int SHML_MAX_ROUNDS
    ctypedef struct shml_words:
        uint64_t word[4]
    ctypedef struct shml_key:
        uint64_t seed, n, epoch, stream
    ctypedef struct shml_feistel:
        uint64_t n
    ctypedef void (*shml_network)(const shml_feistel *, uint64_t *, int)
    shml_words shml_sample_words(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t stream)
    void shml_shuffle(const shml_key *key, uint16_t *table)
    void shml_feistel_init(shml_feistel *feistel, const shml_key *key, int num_rounds)
    int shml_best_isa()
    shml_network shml_network_for(int isa, int is_inverse)
    void shml_map_values(const shml_feistel *feistel, shml_network network, uint64_t *values, size_t count)

MAX_N = 1 << 62
TABLE_MAX_N = 1 << 16
ISAS = ("base", "avx2", "avx512")[:shml_best_isa() + 1]


cdef object _out_of_range(seed, epoch, index, stream):
    given = {"seed": seed, "epoch": epoch, "index": index, "stream": stream}
    name = next(name for name, value in given.items() if not 0 <= value < 1 << 64)
    return ValueError(f"{name} must be an integer in [0, 2^64), got {given[name]}; value % 2**64 is one")


def sample_key(seed, epoch, index, stream=0):
    """Return the 64-bit key of one sample's randomness in one epoch; all four are in [0, 2^64).

    Args:
        stream: keys of different streams are independent: one for each use of randomness within a sample.
    Source: first word of Philox4x64-10 (Salmon et al. 2011) with key (seed, 0) and counter (index, epoch, stream, 2).
    """
    try:
        return shml_sample_words(seed, epoch, index, stream).word[0]
    except OverflowError:
        raise _out_of_range(seed, epoch, index, stream) from None


def sample_key_pair(seed, epoch, index, stream=0):
    """Return 128 bits for one sample as two words, the key of a Philox generator of its own. The first word is `sample_key`'s."""
    cdef shml_words words
    try:
        words = shml_sample_words(seed, epoch, index, stream)
    except OverflowError:
        raise _out_of_range(seed, epoch, index, stream) from None
    return words.word[0], words.word[1]


cdef class KeyedPermutation:
    """A bijection of [0, n) chosen by (seed, epoch, stream, n).

    Args:
        n: 1 to 2^62; all other arguments are keyword-only.
        num_rounds: rounds of the Feistel network, 2 to 8 and even. Fewer than 8 only in tests that must fail.
        table_max_n: largest n that is shuffled into a table. 0 only in tests of the network on small n.
        isa: one of ISAS, the slowest first; None: the fastest of this CPU. Values do not depend on it.
    """

    cdef shml_key _key
    cdef shml_feistel _feistel
    cdef shml_network _forward, _backward
    cdef uint16_t *_table            # NULL until first used, and always if the network is used
    cdef uint16_t *_inverse_table    # NULL until first used
    cdef bint _has_table

    def __cinit__(self, uint64_t n, *, uint64_t seed, uint64_t epoch, uint64_t stream=0, int num_rounds=8,
                  uint64_t table_max_n=TABLE_MAX_N, isa=None):
        if not 1 <= n <= <uint64_t>1 << 62:
            raise ValueError(f"n must be in [1, 2^62], got {n}")
        if not 2 <= num_rounds <= SHML_MAX_ROUNDS or num_rounds % 2 or table_max_n > <uint64_t>1 << 16:
            raise ValueError(f"num_rounds must be 2, 4, 6 or 8 and table_max_n at most 65536, got {num_rounds}, {table_max_n}")
        self._key = shml_key(seed=seed, n=n, epoch=epoch, stream=stream)
        self._has_table = n <= table_max_n
        shml_feistel_init(&self._feistel, &self._key, num_rounds)
        cdef int level = len(ISAS) - 1 if isa is None else ISAS.index(isa)
        self._forward = shml_network_for(level, 0)
        self._backward = shml_network_for(level, 1)

    def __dealloc__(self):
        free(self._table)
        free(self._inverse_table)

    def fill(self, uint64_t start, int64_t[::1] out):
        """Write the values at positions [start, start + len(out)) into out."""
        cdef size_t count = out.shape[0], i
        cdef const uint16_t *table
        if start > self._key.n or count > self._key.n - start:
            raise IndexError(f"positions [{start}, {start + count}) reach beyond n={self._key.n}")
        if count == 0:
            return
        if self._has_table:
            table = self._forward_table()
            with nogil:
                for i in range(count):
                    out[i] = table[start + i]
            return
        with nogil:
            for i in range(count):
                out[i] = <int64_t>(start + i)
            shml_map_values(&self._feistel, self._forward, <uint64_t *>&out[0], count)

    def take(self, const int64_t[::1] positions, int64_t[::1] out):
        """Write the values at `positions` into `out`, which has the same length; they may be the same memory."""
        self._map(positions, out, False)

    def at(self, int64_t position):
        """Return the value at one position."""
        cdef uint64_t value = <uint64_t>position
        if value >= self._key.n:  # negative numbers are the largest
            raise IndexError(f"position {position} is outside [0, {self._key.n})")
        if self._has_table:
            return self._forward_table()[value]
        shml_map_values(&self._feistel, self._forward, &value, 1)
        return <int64_t>value

    def inverse(self, const int64_t[::1] values, int64_t[::1] out):
        """Write the positions of `values` into `out`, which has the same length; they may be the same memory."""
        self._map(values, out, True)

    cdef int _map(self, const int64_t[::1] given, int64_t[::1] out, bint is_inverse) except -1:
        cdef size_t count = given.shape[0], i
        cdef uint64_t largest = 0
        cdef const uint16_t *table = NULL
        cdef shml_network network = self._backward if is_inverse else self._forward
        if <size_t>out.shape[0] != count:
            raise ValueError(f"out must have {count} elements, got {out.shape[0]}")
        if count == 0:
            return 0
        for i in range(count):  # converted to unsigned, negative numbers are the largest
            if <uint64_t>given[i] > largest:
                largest = <uint64_t>given[i]
        if largest >= self._key.n:
            raise IndexError(f"{'value' if is_inverse else 'position'} {<int64_t>largest} is outside [0, {self._key.n})")
        if self._has_table:
            table = self._backward_table() if is_inverse else self._forward_table()
            with nogil:
                for i in range(count):
                    out[i] = table[given[i]]
            return 0
        with nogil:
            for i in range(count):
                out[i] = given[i]
            shml_map_values(&self._feistel, network, <uint64_t *>&out[0], count)
        return 0

    @cython.critical_section
    cdef uint16_t *_forward_table(self) except NULL:
        cdef uint16_t *table
        if self._table == NULL:
            table = <uint16_t *>malloc(self._key.n * sizeof(uint16_t))
            if table == NULL:
                raise MemoryError
            with nogil:
                shml_shuffle(&self._key, table)
            if self._table == NULL:
                self._table = table
            else:  # another thread was first and made the same table
                free(table)
        return self._table

    @cython.critical_section
    cdef uint16_t *_backward_table(self) except NULL:
        cdef uint16_t *table
        cdef const uint16_t *forward = self._forward_table()
        cdef uint32_t i
        if self._inverse_table == NULL:
            table = <uint16_t *>malloc(self._key.n * sizeof(uint16_t))
            if table == NULL:
                raise MemoryError
            for i in range(<uint32_t>self._key.n):
                table[forward[i]] = <uint16_t>i
            self._inverse_table = table
        return self._inverse_table
