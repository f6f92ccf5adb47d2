"""A file as a read-only buffer. Unlike mmap.mmap it keeps no descriptor open, because there are thousands of shards."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport errno
from libc.stdint cimport int64_t

include "file_state.pxi"

cdef extern from "<sys/stat.h>":
    int fstat(int descriptor, stat_t *status)

cdef extern from "<fcntl.h>":
    int O_RDONLY, O_CLOEXEC
    int c_open "open"(const char *path, int flags)

cdef extern from "<unistd.h>":
    int c_close "close"(int descriptor)

cdef extern from "<sys/mman.h>":
    int PROT_READ, MAP_SHARED
    void *MAP_FAILED
    void *mmap(void *at, size_t nbytes, int protection, int flags, int descriptor, int64_t offset)
    int munmap(void *at, size_t nbytes)


cdef class MappedFile:
    """The bytes of a file, valid while a buffer of them is held, even if the file is removed or replaced.

    Raises:
        OSError: the file cannot be opened or mapped.
    """

    cdef void *_at
    cdef FileState _state
    cdef bytes _path

    def __cinit__(self, bytes path not None):
        cdef stat_t status
        cdef int descriptor = c_open(path, O_RDONLY | O_CLOEXEC), error = 0
        self._path = path
        if descriptor < 0:
            raise _error(errno, path)
        if fstat(descriptor, &status):
            error = errno
        else:
            file_state_of(&status, &self._state)
            if self._state.nbytes:
                self._at = mmap(NULL, self._state.nbytes, PROT_READ, MAP_SHARED, descriptor, 0)
                if self._at == MAP_FAILED:
                    self._at, error = NULL, errno
        c_close(descriptor)
        if error:
            raise _error(error, path)

    def __dealloc__(self):
        if self._at != NULL:
            munmap(self._at, self._state.nbytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        # an empty file has no mapping, and a buffer needs an address
        PyBuffer_FillInfo(view, self, self._at if self._at != NULL else <void *>&self._state, self._state.nbytes, 1, flags)

    @property
    def state(self):
        """Return the file's (device, inode, nbytes, mtime_ns) when it was mapped."""
        return self._state.device, self._state.inode, self._state.nbytes, self._state.mtime_ns

    def has_changed(self):
        """Return whether the file was written to since, if its name still refers to it."""
        return bool(file_has_changed(self._path, &self._state))


cdef object _error(int number, bytes path):
    import os

    return OSError(number, os.strerror(number), os.fsdecode(path))
