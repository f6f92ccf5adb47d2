"""Rows that lie anywhere in memory, copied to stand one after the other: how columns of arrow files get into a batch.

Addresses come from the caller, who has checked every index and every offset against the buffers they belong to and keeps these
alive; `out` is checked here. No Python object is made for a value, and the GIL is given up.
"""

from libc.stdint cimport int64_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy


def gather_rows(const int64_t[::1] addresses not None, Py_ssize_t nbytes, uint8_t[::1] out not None):
    """Copies rows of `nbytes` each.

    Raises:
        ValueError: `out` has not exactly room for them.
    """
    cdef Py_ssize_t i, count = addresses.shape[0]
    if nbytes < 0 or out.shape[0] != count * nbytes:
        raise ValueError(f"{count} rows of {nbytes} bytes do not fit {out.shape[0]} bytes")
    if out.shape[0] == 0:
        return
    cdef uint8_t *to = &out[0]
    with nogil:
        if nbytes == 8:  # the compiler makes one load and one store of a copy whose size it knows
            for i in range(count):
                memcpy(to + 8 * i, <const void *><uintptr_t>addresses[i], 8)
        elif nbytes == 4:
            for i in range(count):
                memcpy(to + 4 * i, <const void *><uintptr_t>addresses[i], 4)
        elif nbytes == 1:
            for i in range(count):
                to[i] = (<const uint8_t *><uintptr_t>addresses[i])[0]
        else:
            for i in range(count):
                memcpy(to + nbytes * i, <const void *><uintptr_t>addresses[i], nbytes)


def gather_runs(const int64_t[::1] addresses not None, const int64_t[::1] nbytes not None, uint8_t[::1] out not None):
    """Copies runs of different lengths, end to end.

    Raises:
        ValueError: a length is missing or negative, or `out` has not exactly room for them.
    """
    cdef Py_ssize_t i, count = addresses.shape[0]
    cdef uint64_t total = 0
    if nbytes.shape[0] != count:
        raise ValueError(f"{count} runs need as many lengths; got {nbytes.shape[0]}")
    for i in range(count):
        if nbytes[i] < 0:
            raise ValueError(f"run {i} is {nbytes[i]} bytes long")
        if total <= <uint64_t>out.shape[0]:  # beyond it there is nothing to count, and sums wrap
            total += nbytes[i]
    if total != <uint64_t>out.shape[0]:
        raise ValueError(f"{count} runs of {total} bytes do not fit {out.shape[0]} bytes")
    if total == 0:
        return
    cdef uint8_t *to = &out[0]
    with nogil:
        for i in range(count):
            if nbytes[i]:
                memcpy(to, <const void *><uintptr_t>addresses[i], nbytes[i])
                to += nbytes[i]
