"""Gather rows of an array into a batch, by index, in one pass without the GIL.

A row is `num_runs` runs of `count` items each, `item_nbytes` wide and `item_stride` apart; contiguous rows, and slices of columns,
are one run of one item. Rows are read in random order, so a later row is prefetched while an earlier one is copied; that hides most
of the memory latency of a plain loop of copies.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #define ask_for(at) __builtin_prefetch((at), 0, 2)
    #define swap16(x) __builtin_bswap16(x)
    #define swap32(x) __builtin_bswap32(x)
    #define swap64(x) __builtin_bswap64(x)
    """
    void ask_for(const void *at) noexcept nogil
    uint16_t swap16(uint16_t x) noexcept nogil
    uint32_t swap32(uint32_t x) noexcept nogil
    uint64_t swap64(uint64_t x) noexcept nogil

cdef extern from "streamed.h":
    const size_t SHML_STREAMED_NBYTES
    void shml_copy_streamed(uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil

cdef enum:
    AHEAD = 16  # rows between prefetch and copy
    LINE = 64
    NBYTES_ASKED = 1024  # of a row; after these the processor prefetches by itself


cdef class RowGather:
    """Rows of `row_nbytes` in memory that `keeper` keeps alive.

    Args:
        address, num_rows, row_stride: address of the first row, number of rows, bytes from one row to the next.
        runs: byte offsets of a row's runs, in C order of its elements.
        count, item_nbytes, item_stride: the items of each run.
        swap: size of the numbers whose byte order is swapped; 1 swaps nothing.
        keeper: an object that keeps the memory.
    """

    cdef const uint8_t *_base
    cdef readonly int64_t num_rows
    cdef int64_t _row_stride, _count, _item_stride
    cdef size_t _item_nbytes
    cdef readonly size_t row_nbytes
    cdef const int64_t[::1] _runs
    cdef int _swap
    cdef object _keeper

    def __cinit__(
        self, uintptr_t address, int64_t num_rows, int64_t row_stride, const int64_t[::1] runs, int64_t count,
        size_t item_nbytes, int64_t item_stride, int swap, keeper,
    ):
        if swap not in (1, 2, 4, 8):
            raise ValueError(f"the byte order can be swapped only for items of 2, 4 or 8 bytes, got {swap}")
        self._base = <const uint8_t *>address
        self.num_rows = num_rows
        self._row_stride = row_stride
        self._runs = runs
        self._count = count
        self._item_nbytes = item_nbytes
        self._item_stride = item_stride
        self._swap = swap
        self._keeper = keeper
        self.row_nbytes = runs.shape[0] * count * item_nbytes

    def into(self, uintptr_t to, size_t nbytes, const int64_t[::1] indices):
        """Copy the rows with these indices, one after another; negative indices count from the end.

        Args:
            to, nbytes: address and size of the room for exactly these rows.
            indices: the indices.
        Raises:
            ValueError: the room has another size.
            IndexError: a row does not exist; nothing is written then.
        """
        cdef Py_ssize_t i, n = indices.shape[0]
        cdef int64_t at, bad = -1
        if nbytes != n * self.row_nbytes:
            raise ValueError(f"the buffer must have {n * self.row_nbytes} bytes for {n} rows of {self.row_nbytes}, got {nbytes}")
        with nogil:
            for i in range(n):
                at = indices[i]
                if at < -self.num_rows or at >= self.num_rows:
                    bad = i
                    break
            if bad < 0 and nbytes:
                self._gather(<uint8_t *>to, &indices[0], n)
        if bad >= 0:
            raise IndexError(f"index {indices[bad]} is out of range for {self.num_rows} samples")

    cdef const uint8_t *_row(self, int64_t at) noexcept nogil:
        return self._base + (at + self.num_rows if at < 0 else at) * self._row_stride

    cdef void _gather(self, uint8_t *to, const int64_t *indices, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        cdef size_t nbytes = self.row_nbytes
        if self._runs.shape[0] == 1 and self._count == 1:
            copy_rows(to, self._base + self._runs[0], indices, n, self.num_rows, self._row_stride, nbytes)
        else:
            for i in range(n):
                self._copy_runs(to + i * nbytes, self._row(indices[i]))
        if self._swap > 1:
            swap_bytes(to, n * nbytes, self._swap)

    cdef void _copy_runs(self, uint8_t *to, const uint8_t *row) noexcept nogil:
        cdef Py_ssize_t run
        cdef int64_t j
        cdef const uint8_t *at
        cdef size_t width = self._item_nbytes
        for run in range(self._runs.shape[0]):
            at = row + self._runs[run]
            if width == 1:
                for j in range(self._count):
                    to[j] = at[j * self._item_stride]
            elif width == 2:
                for j in range(self._count):
                    memcpy(to + 2 * j, at + j * self._item_stride, 2)
            elif width == 4:
                for j in range(self._count):
                    memcpy(to + 4 * j, at + j * self._item_stride, 4)
            elif width == 8:
                for j in range(self._count):
                    memcpy(to + 8 * j, at + j * self._item_stride, 8)
            else:
                for j in range(self._count):
                    memcpy(to + width * j, at + j * self._item_stride, width)
            to += width * self._count


cdef void copy_rows(
    uint8_t *to, const uint8_t *base, const int64_t *indices, Py_ssize_t n, int64_t num_rows, int64_t stride, size_t nbytes
) noexcept nogil:
    """Copy rows of one run each. A function of its own keeps its values in registers, where those of an object would be read from memory."""
    cdef Py_ssize_t i
    cdef size_t line, asked = min(nbytes, <size_t>NBYTES_ASKED)
    cdef const uint8_t *row
    if nbytes == 8:  # labels: a constant size avoids a call
        for i in range(n):
            if i + AHEAD < n:
                ask_for(base + (indices[i + AHEAD] + (num_rows if indices[i + AHEAD] < 0 else 0)) * stride)
            memcpy(to + i * 8, base + (indices[i] + (num_rows if indices[i] < 0 else 0)) * stride, 8)
        return
    if nbytes >= SHML_STREAMED_NBYTES:
        for i in range(n):
            shml_copy_streamed(to + i * nbytes, base + (indices[i] + (num_rows if indices[i] < 0 else 0)) * stride, nbytes)
        return
    for i in range(n):
        if i + AHEAD < n:
            row = base + (indices[i + AHEAD] + (num_rows if indices[i + AHEAD] < 0 else 0)) * stride
            line = 0
            while line < asked:
                ask_for(row + line)
                line += LINE
        memcpy(to, base + (indices[i] + (num_rows if indices[i] < 0 else 0)) * stride, nbytes)
        to += nbytes


cdef void swap_bytes(uint8_t *at, size_t nbytes, int width) noexcept nogil:
    """Swap the byte order of all numbers of `width` bytes."""
    cdef size_t i
    cdef uint16_t two
    cdef uint32_t four
    cdef uint64_t eight
    if width == 2:
        for i in range(0, nbytes, 2):
            memcpy(&two, at + i, 2)
            two = swap16(two)
            memcpy(at + i, &two, 2)
    elif width == 4:
        for i in range(0, nbytes, 4):
            memcpy(&four, at + i, 4)
            four = swap32(four)
            memcpy(at + i, &four, 4)
    else:
        for i in range(0, nbytes, 8):
            memcpy(&eight, at + i, 8)
            eight = swap64(eight)
            memcpy(at + i, &eight, 8)
