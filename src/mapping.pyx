"""Memory mapped from a descriptor, unmapped when its last user is gone.

A Mapping is a buffer: memoryview and numpy keep it alive by themselves. Leases hold the C mapping directly, so that neither
`close()` of a loader nor the death of its Python objects unmaps memory under a tensor.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from libc.errno cimport errno
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import os


cdef extern from "lease.h" nogil:
    ctypedef struct shml_map:
        void *base
        size_t nbytes
        int refs
    void shml_map_drop(shml_map *map)

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int madvise(void *addr, size_t length, int advice)
    int munmap(void *addr, size_t length)
    void *mremap(void *addr, size_t length, size_t new_length, int flags, void *new_addr)
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_POPULATE, MAP_ANONYMOUS, MAP_NORESERVE, MADV_DONTFORK
    int MREMAP_MAYMOVE, MREMAP_FIXED
    void *MAP_FAILED

cdef int MADV_POPULATE_WRITE = 23  # since Linux 5.14; older headers lack it
cdef size_t PAGE_NBYTES = os.sysconf("SC_PAGESIZE")


def _can_populate():
    cdef void *page = mmap(NULL, PAGE_NBYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if page == MAP_FAILED:
        return False
    cdef int failed = madvise(page, PAGE_NBYTES, MADV_POPULATE_WRITE)
    munmap(page, PAGE_NBYTES)
    return not failed


CAN_POPULATE = _can_populate()  # whether the kernel supports `Mapping.populate`


cdef extern from "fcntl.h" nogil:
    int fallocate(int fd, int mode, long offset, long nbytes)
    int FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


def give_back_pages(int fd, size_t nbytes):
    """Free the memory of a segment although others still map it: from now on they read zeros there."""
    if fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, nbytes):
        raise OSError(errno, f"cannot release {nbytes} bytes (fallocate): {os.strerror(errno)}")


cdef class Mapping:
    """A shared mapping of `nbytes` of the file `fd`. The descriptor may be closed afterwards.

    Args:
        fd: descriptor of a segment, opened for reading and writing.
        nbytes: length of the mapping from the file's start.
        populate: set up the whole page table now.
        inherit: whether forked children see it. Workers pass False: a process forked by a sample must not write into a slot.
        writable: if False, a stray write crashes this process instead of changing what others read.
        private: writes are visible to this process only (until MADV_DONTNEED); in pages that it has not written, others' writes are
            visible.
    """

    cdef shml_map *_map
    cdef readonly size_t nbytes
    cdef bint _is_readonly

    def __cinit__(self, int fd, size_t nbytes, *, bint inherit=True, bint populate=False, bint writable=True,
                  bint private=False):
        cdef void *base
        cdef int protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        if nbytes == 0:
            raise ValueError("nbytes must be positive, got 0")
        with nogil:
            base = mmap(NULL, nbytes, protection, (MAP_PRIVATE if private else MAP_SHARED) | (MAP_POPULATE if populate else 0), fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"cannot map {nbytes} bytes (mmap): {os.strerror(errno)}")
        if not inherit:
            madvise(base, nbytes, MADV_DONTFORK)
        self._map = <shml_map *>malloc(sizeof(shml_map))
        if self._map == NULL:
            raise MemoryError
        self._map.base = base
        self._map.nbytes = nbytes
        self._map.refs = 1
        self.nbytes = nbytes
        self._is_readonly = not writable

    def __dealloc__(self):
        shml_map_drop(self._map)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._map.base, <Py_ssize_t>self.nbytes, self._is_readonly, flags)

    def __len__(self):
        return self.nbytes

    def populate(self, size_t begin, size_t end):
        """Allocate memory for these bytes where there is none yet, so that writing to them cannot raise SIGBUS.

        Raises:
            OSError: there is not enough memory (ENOMEM, or EFAULT if /dev/shm is full), or the kernel does not support it
                (`CAN_POPULATE`).
        """
        cdef int failed
        if begin > end or end > self.nbytes:
            raise ValueError(f"bytes {begin} to {end} are not inside the mapping of {self.nbytes} bytes")
        begin -= begin % PAGE_NBYTES
        with nogil:
            failed = madvise(<char *>self._map.base + begin, end - begin, MADV_POPULATE_WRITE)
        if failed:
            raise OSError(errno, f"cannot allocate {end - begin} bytes: {os.strerror(errno)}")

    def divert(self, bint keep):
        """Put private memory at the addresses of this mapping, so that its users reach the file no more.

        The exchange is one step of the kernel: a write of another thread goes to the file before it, and to the private memory after
        it, also within one copy. Only a device that writes by itself (a read with O_DIRECT that has begun) still reaches the file.
        What other threads write while the contents are copied (`keep`) may be missing from the copy. The GIL is held throughout, so
        they run no Python code; without the GIL, the caller excludes such writes, as WorkerRing.detach does.

        Args:
            keep: copy the present contents; otherwise the private memory is zero.
        Raises:
            OSError: there is not enough memory; the mapping is unchanged.
        """
        cdef int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        cdef void *fresh = mmap(NULL, self.nbytes, PROT_READ | PROT_WRITE, flags, -1, 0)
        if fresh == MAP_FAILED:
            raise OSError(errno, f"cannot map {self.nbytes} bytes (mmap): {os.strerror(errno)}")
        if keep:
            memcpy(fresh, self._map.base, self.nbytes)
        if mremap(fresh, self.nbytes, self.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, self._map.base) == MAP_FAILED:
            error = errno
            munmap(fresh, self.nbytes)
            raise OSError(error, f"cannot replace {self.nbytes} mapped bytes (mremap): {os.strerror(error)}")

    @property
    def address(self):
        """Return the address of the mapping in this process."""
        return <uintptr_t>self._map.base

    @property
    def handle(self):
        """Return the address of the C mapping, for the other compiled modules."""
        return <uintptr_t>self._map
