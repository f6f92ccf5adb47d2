"""Copy rows from anywhere in memory one after another: how columns of Arrow files and rows of many tensors get into a batch.

The caller passes addresses. It has checked every index and every offset against the buffers they belong to, and keeps these alive;
`out` is checked here. No Python object is created for a value, and the GIL is released.

Also pads rows that are arrays with zeros to the longest, and numbers rows that are stored end to end.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memset


def gather_rows(const int64_t[::1] addresses not None, Py_ssize_t nbytes, uint8_t[::1] out not None):
    """Copy rows of `nbytes` each.

    Raises:
        ValueError: `out` is not exactly as large as the rows.
    """
    gather_rows_to(addresses, nbytes, <uintptr_t>&out[0] if out.shape[0] else 0, out.shape[0])


def gather_rows_to(const int64_t[::1] addresses not None, Py_ssize_t nbytes, uintptr_t out, Py_ssize_t room):
    """Copy rows of `nbytes` each to memory of `room` bytes at the address `out`.

    Raises:
        ValueError: the memory is not exactly as large as the rows.
    """
    cdef Py_ssize_t i, count = addresses.shape[0]
    if nbytes < 0 or room != count * nbytes:
        raise ValueError(f"out must have the bytes of {count} rows of {nbytes}, got {room}")
    if room == 0:
        return
    cdef uint8_t *to = <uint8_t *>out
    with nogil:
        if nbytes == 8:  # if the size is a constant, the compiler makes one load and one store of a copy
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
    """Copy runs of different lengths, end to end.

    Args:
        addresses, nbytes: address and length of each run.
        out: the room for all runs.
    Raises:
        ValueError: a length is missing or negative, or `out` is not exactly as large as the runs.
    """
    cdef Py_ssize_t i, count = addresses.shape[0]
    cdef uint64_t total = 0
    if nbytes.shape[0] != count:
        raise ValueError(f"{count} runs need {count} lengths, got {nbytes.shape[0]}")
    for i in range(count):
        if nbytes[i] < 0:
            raise ValueError(f"the length of run {i} must not be negative, got {nbytes[i]}")
        if total <= <uint64_t>out.shape[0]:  # past it, counting is useless, and sums could wrap
            total += nbytes[i]
    if total != <uint64_t>out.shape[0]:
        raise ValueError(f"out must have the {total} bytes of {count} runs, got {out.shape[0]}")
    if total == 0:
        return
    cdef uint8_t *to = &out[0]
    with nogil:
        for i in range(count):
            if nbytes[i]:
                memcpy(to, <const void *><uintptr_t>addresses[i], nbytes[i])
                to += nbytes[i]


def pad_runs(list runs not None, Py_ssize_t nbytes, uint8_t[::1] out not None):
    """Copy the bytes of some arrays, each padded with zeros to `nbytes`.

    Raises:
        ValueError, BufferError: `out` is not exactly as large as the padded arrays, an array has more bytes, or its memory is not
            contiguous.
    """
    cdef Py_buffer run
    cdef Py_ssize_t i, count = len(runs)
    if nbytes <= 0 or out.shape[0] != count * nbytes:
        raise ValueError(f"out must have the bytes of {count} runs of {nbytes}, got {out.shape[0]}")
    cdef uint8_t *to = &out[0] if count else NULL
    for i in range(count):
        PyObject_GetBuffer(runs[i], &run, PyBUF_SIMPLE)
        try:
            if run.len > nbytes:
                raise ValueError(f"run {i} must have at most {nbytes} bytes, got {run.len}")
            memcpy(to, run.buf, run.len)
            memset(to + run.len, 0, nbytes - run.len)
        finally:
            PyBuffer_Release(&run)
        to += nbytes


def number_runs(list lengths not None, int64_t[::1] numbers not None, int64_t[::1] places not None):
    """For runs stored end to end, write each element's run number, from 1 on, and its position in the run, from 0 on.

    Raises:
        ValueError: the runs are longer than `numbers` or `places`.
    """
    cdef Py_ssize_t i, at = 0, run = 0, length
    for given in lengths:
        length = given
        run += 1
        if length < 0 or length > numbers.shape[0] - at or length > places.shape[0] - at:
            raise ValueError(f"run {run - 1} of {length} elements at {at} ends beyond the {min(len(numbers), len(places))} elements")
        for i in range(length):
            numbers[at + i] = run
            places[at + i] = i
        at += length
