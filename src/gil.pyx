"""Measure how long a thread waits for Python's lock (the GIL).

Only C code can tell the wait from a late wake-up: it reads the clock after the sleep, before it asks for the lock.
"""

from libc.stdint cimport uint64_t

cdef extern from "lease.h" nogil:
    uint64_t shml_now_ns()

cdef extern from *:
    """
    #include <time.h>

    static void shml_sleep_ns(int64_t ns) {
        struct timespec pause = {ns / 1000000000, ns % 1000000000};
        nanosleep(&pause, NULL);
    }
    """
    void shml_sleep_ns(long long ns) nogil


def sleep_and_wait(long long pause_ns):
    """Sleep without the lock, then take it back.

    Returns:
        (slept, waited): nanoseconds of the sleep, and those until this thread had the lock again.
    """
    cdef uint64_t began, woke
    with nogil:
        began = shml_now_ns()
        shml_sleep_ns(pause_ns)
        woke = shml_now_ns()
    return woke - began, shml_now_ns() - woke
