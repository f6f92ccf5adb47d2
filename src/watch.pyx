"""Process-wide settings of a worker: die with its parent, and keep freed memory.

The worker dies whatever its main thread is doing: a plain C thread waits on the parent's pidfd. It needs no GIL and no help from
the interpreter, so a worker inside a long call of C code is still killed within a millisecond. (PR_SET_PDEATHSIG would fire when
the parent's *thread* that started the worker ends.)
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <malloc.h>
    #include <poll.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <unistd.h>

    static void *shml_watch(void *arg) {
        struct pollfd parent = {(int)(intptr_t)arg, POLLIN, 0};
        while (poll(&parent, 1, -1) < 0 && errno == EINTR) {}
        kill(getpid(), SIGKILL);
        return NULL;
    }

    static int shml_start_watch(int pidfd) {
        pthread_t thread;
        pthread_attr_t attributes;
        sigset_t all, before;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 64 * 1024);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* the watcher takes no signals: they belong to the main thread */
        int failed = pthread_create(&thread, &attributes, shml_watch, (void *)(intptr_t)pidfd);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return failed;
    }

    static int shml_keep_freed(void) {
    #ifdef __GLIBC__
        return mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, 64 << 20);
    #else
        return 0;
    #endif
    }
    """
    int shml_start_watch(int pidfd) nogil
    int shml_keep_freed() nogil

import os


def die_with(int pid):
    """Kill this process with SIGKILL as soon as process `pid` has ended; at once if it has already ended.

    Raises:
        OSError: the kernel has no pidfd, or the thread could not be started.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    cdef int failed = shml_start_watch(pidfd)
    if failed:
        raise OSError(failed, f"cannot start the thread that watches process {pid}: {os.strerror(failed)}")


def keep_freed():
    """Make malloc keep up to 64 MiB of freed memory, and serve requests below 32 MiB from it.

    A worker allocates arrays of the same sizes again and again. Without this, each array of 128 KiB or more gets fresh pages, which
    the kernel fills with zeros: for a sample of 150 KB that costs more than copying it. These are glibc's own upper limits, which
    it reaches by itself only after it has freed an array of that size.
    """
    if not any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        shml_keep_freed()
