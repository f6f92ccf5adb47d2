"""A named semaphore's steady verbs. Waiting on it is so that every signal handler gets its say:

posix_ipc runs the handlers when a signal ends its wait, but keeps only KeyboardInterrupt of what they raise: an exit on SIGTERM or
a time limit by SIGALRM would be lost. Here what a handler raises is raised. The wait is by the monotonic clock where the C library
can do that, so a clock that is set does not prolong it.
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <semaphore.h>
    #include <time.h>

    static int shml_sem_failed(sem_t *sem) { return sem == SEM_FAILED; }

    /* 0, or the error number: ETIMEDOUT, EINTR. */
    static int shml_sem_wait(sem_t *sem, double timeout_s) {
        struct timespec until;
        if (sem_trywait(sem) == 0) return 0;
        if (timeout_s <= 0) return ETIMEDOUT;
    #if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
        clock_gettime(CLOCK_MONOTONIC, &until);
    #else
        clock_gettime(CLOCK_REALTIME, &until);
    #endif
        until.tv_sec += (time_t)timeout_s;
        until.tv_nsec += (long)((timeout_s - (double)(time_t)timeout_s) * 1e9);
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
    #if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
        return sem_clockwait(sem, CLOCK_MONOTONIC, &until) == 0 ? 0 : errno;
    #else
        return sem_timedwait(sem, &until) == 0 ? 0 : errno;
    #endif
    }
    """
    ctypedef struct sem_t:
        pass
    int EINTR, ETIMEDOUT
    sem_t *sem_open(const char *name, int flags)
    int sem_close(sem_t *sem)
    int sem_getvalue(sem_t *sem, int *value) nogil
    int sem_post(sem_t *sem) nogil
    int sem_trywait(sem_t *sem) nogil
    int shml_sem_failed(sem_t *sem)
    int shml_sem_wait(sem_t *sem, double timeout_s) nogil

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno

import os


cdef class Bell:
    """One process's open end of a semaphore that exists; the name begins with a slash."""

    cdef sem_t *_sem

    def __cinit__(self, str name, *_, **__):
        cdef bytes encoded = os.fsencode(name)
        self._sem = sem_open(encoded, 0)
        if shml_sem_failed(self._sem):
            self._sem = NULL
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self._sem != NULL:
            sem_close(self._sem)

    def wait(self, double timeout_s):
        """Waits for a ring, without the GIL; False if none came in time or a signal came first. Raises what its handler does."""
        cdef int failed
        with nogil:
            failed = shml_sem_wait(self._sem, timeout_s)
        if failed == 0:
            return True
        if failed == EINTR:
            PyErr_CheckSignals()
        elif failed != ETIMEDOUT:
            raise OSError(failed, os.strerror(failed))
        return False

    def post_up_to(self, int count):
        """Rings so often that `count` rings are pending: more would only make workers scan for nothing."""
        cdef int value
        if sem_getvalue(self._sem, &value):
            PyErr_SetFromErrno(OSError)
        while value < count:
            if sem_post(self._sem):
                PyErr_SetFromErrno(OSError)
            value += 1

    def drain(self):
        """Takes back all pending rings."""
        while sem_trywait(self._sem) == 0:
            pass
