"""Wait for and post a semaphore: a named one, or one in a memfd where /dev/shm is not writable.

Every signal handler runs during a wait, and its exception is raised. posix_ipc runs the handlers too, but keeps only
KeyboardInterrupt of the exceptions they raise: an exit on SIGTERM or a time limit by SIGALRM would be lost. The wait uses the
monotonic clock if the C library supports that, so setting the clock does not prolong it. Support is detected at run time (glibc
2.30 and newer), because wheels are built for an older one.
"""

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <errno.h>
    #include <fcntl.h>
    #include <semaphore.h>
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>

    static int shml_sem_failed(sem_t *sem) { return sem == SEM_FAILED; }

    /* Map the semaphore at the beginning of a file. Return NULL and set errno on failure. */
    static sem_t *shml_sem_map(int fd) {
        void *at = mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        return at == MAP_FAILED ? NULL : (sem_t *)at;
    }

    static void shml_sem_unmap(sem_t *sem) { munmap(sem, sizeof(sem_t)); }

    /* Create a semaphore with the value 0 there. Return 0, or -1 and set errno. */
    static int shml_sem_make(int fd) {
        if (ftruncate(fd, sizeof(sem_t)) != 0) return -1;
        sem_t *sem = shml_sem_map(fd);
        if (sem == NULL) return -1;
        int failed = sem_init(sem, 1, 0);
        shml_sem_unmap(sem);
        return failed;
    }

    static int (*shml_clockwait)(sem_t *, clockid_t, const struct timespec *); /* NULL if this C library has none */

    static int shml_find_clockwait(void) {
        *(void **)&shml_clockwait = dlsym(RTLD_DEFAULT, "sem_clockwait");
        return shml_clockwait != NULL;
    }

    /* Return 0, or the error number: ETIMEDOUT, EINTR. */
    static int shml_sem_wait(sem_t *sem, double timeout_s) {
        struct timespec until;
        if (sem_trywait(sem) == 0) return 0;
        if (timeout_s <= 0) return ETIMEDOUT;
        clock_gettime(shml_clockwait ? CLOCK_MONOTONIC : CLOCK_REALTIME, &until);
        until.tv_sec += (time_t)timeout_s;
        until.tv_nsec += (long)((timeout_s - (double)(time_t)timeout_s) * 1e9);
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        int failed = shml_clockwait ? shml_clockwait(sem, CLOCK_MONOTONIC, &until) : sem_timedwait(sem, &until);
        return failed ? errno : 0;
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
    bint shml_find_clockwait()
    int shml_sem_failed(sem_t *sem)
    int shml_sem_make(int fd)
    sem_t *shml_sem_map(int fd)
    void shml_sem_unmap(sem_t *sem)
    int shml_sem_wait(sem_t *sem, double timeout_s) nogil

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno

import os

IS_MONOTONIC = shml_find_clockwait()  # whether waits use the clock that cannot be set


def make_semaphore(int fd):
    """Create a semaphore with the value 0 at the beginning of an empty, writable file."""
    if shml_sem_make(fd):
        PyErr_SetFromErrno(OSError)


cdef class Bell:
    """This process's handle of an existing semaphore: a named one (the name begins with a slash), or the one in a file `fd`.

    The descriptor is not needed after construction.
    """

    cdef sem_t *_sem
    cdef bint _is_mapped

    def __cinit__(self, str name, int fd=-1, *_, **__):
        cdef bytes encoded
        self._is_mapped = fd >= 0
        if self._is_mapped:
            self._sem = shml_sem_map(fd)
        else:
            encoded = os.fsencode(name)
            self._sem = sem_open(encoded, 0)
        if shml_sem_failed(self._sem):
            self._sem = NULL
        if self._sem == NULL:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self._sem == NULL:
            return
        if self._is_mapped:
            shml_sem_unmap(self._sem)
        else:
            sem_close(self._sem)

    @property
    def value(self):
        """Return the number of pending rings."""
        cdef int value
        if sem_getvalue(self._sem, &value):
            PyErr_SetFromErrno(OSError)
        return value

    def post(self):
        """Ring once."""
        if sem_post(self._sem):
            PyErr_SetFromErrno(OSError)

    def wait(self, double timeout_s):
        """Wait for a ring, without the GIL. Return False after the timeout or a signal; raise what its handler raises."""
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
        """Ring until `count` rings are pending: more would only make workers look for orders that others have claimed."""
        cdef int value
        if sem_getvalue(self._sem, &value):
            PyErr_SetFromErrno(OSError)
        while value < count:
            if sem_post(self._sem):
                PyErr_SetFromErrno(OSError)
            value += 1

    def drain(self):
        """Remove all pending rings."""
        while sem_trywait(self._sem) == 0:
            pass
