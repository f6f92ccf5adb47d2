# Cython declarations of file_state.h; included by mapped_file.pyx, records.pyx and tar_rows.pyx.

from libc.stdint cimport int64_t, uint64_t

cdef extern from "<sys/stat.h>":
    cdef struct stat_t "stat":
        pass

cdef extern from "file_state.h":
    ctypedef struct FileState:
        uint64_t device
        uint64_t inode
        int64_t nbytes
        int64_t mtime_ns
    void file_state_of(const stat_t *status, FileState *state) noexcept nogil
    bint file_has_changed(const char *path, const FileState *was) noexcept nogil
