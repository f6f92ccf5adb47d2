"""Measure how long a thread waits for Python's lock (the GIL).

Only C code can tell the wait from a late wake-up: it reads the clock after the sleep, before it asks for the lock.
"""

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>

    static int64_t shml_clock_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    static void shml_sleep_ns(int64_t ns) {
        struct timespec pause = {ns / 1000000000, ns % 1000000000};
        nanosleep(&pause, NULL);
    }
    """
    long long shml_clock_ns() nogil
    void shml_sleep_ns(long long ns) nogil


def sleep_and_wait(long long pause_ns):
    """Sleep without the lock, then take it back.

    Returns:
        (slept, waited): nanoseconds of the sleep, and those until this thread had the lock again.
    """
    cdef long long began, woke
    with nogil:
        began = shml_clock_ns()
        shml_sleep_ns(pause_ns)
        woke = shml_clock_ns()
    return woke - began, shml_clock_ns() - woke
