"""Copy members of mapped tar shards into rows of a batch: .npy payloads, numbers in ASCII, raw bytes, text.

`TarRows` knows where the shards are mapped and finds a field's member for each index of a batch; the `Members` it returns copies
them. Each method copies without the GIL as many rows as it can, and returns the first row that it cannot handle: a missing member,
a byte order or array order that needs a conversion, a damaged payload. Python reads that row, or raises an error for it, and
continues.

A .npy header that equals the last accepted one byte for byte is not parsed again: within a shard all rows of a fixed field have the
same header.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint16_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memchr, memcmp, memcpy

include "file_state.pxi"

cdef extern from *:
    """
    /* Words that several threads read and write at once. */
    static void shml_publish_base(const uint8_t **word, const uint8_t *base) { __atomic_store_n(word, base, __ATOMIC_RELEASE); }
    static const uint8_t *shml_base(const uint8_t **word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static uint64_t shml_next_look(uint64_t *word) { return __atomic_add_fetch(word, 1, __ATOMIC_RELAXED); }
    static uint64_t shml_ask(uint64_t *word, uint64_t look) { /* most rows of a batch find their own look, and write nothing */
        uint64_t found = __atomic_load_n(word, __ATOMIC_RELAXED);
        return found == look ? found : __atomic_exchange_n(word, look, __ATOMIC_RELAXED);
    }
    """
    void shml_publish_base(const uint8_t **word, const uint8_t *base)
    const uint8_t *shml_base(const uint8_t **word) nogil
    uint64_t shml_next_look(uint64_t *word)
    uint64_t shml_ask(uint64_t *word, uint64_t look) nogil

cdef enum:
    NO_RANK = 255

cdef struct Shard:
    const uint8_t *base  # of the mapped file; NULL until it is opened
    const uint64_t *offsets  # of the members' payloads
    const uint64_t *sizes
    const uint16_t *extensions  # number of each member's extension
    const uint64_t *first  # first member of each sample
    const uint8_t *ranks  # (field, extension) -> rank among the field's alternatives, NO_RANK if none
    uint64_t num_extensions
    const char *path  # NULL for memory that does not change
    FileState was  # when it was mapped
    uint64_t asked  # number of the last check of its file

include "tar_payloads.pxi"


cdef class TarRows:
    """The shards of a dataset that are mapped so far.

    Args:
        starts: index of each shard's first sample, and the number of all samples.
    """

    cdef Shard *_shards
    cdef const int64_t[::1] _starts
    cdef list _keepers
    cdef Py_ssize_t _num_shards
    cdef uint64_t _num_looks

    def __cinit__(self, const int64_t[::1] starts not None):
        self._starts = starts
        self._num_shards = starts.shape[0] - 1
        self._shards = <Shard *>calloc(max(self._num_shards, 1), sizeof(Shard))
        self._keepers = []
        if self._shards == NULL:
            raise MemoryError("cannot allocate memory for the shards' addresses")

    def __dealloc__(self):
        free(self._shards)

    def open(
        self,
        Py_ssize_t shard,
        const uint8_t[::1] data not None,
        const uint64_t[::1] offsets not None,
        const uint64_t[::1] sizes not None,
        const uint16_t[::1] extensions not None,
        const uint64_t[::1] first not None,
        const uint8_t[:, ::1] ranks not None,
        bytes path=None,
        tuple state=None,
    ):
        """Add a mapped shard and its index, whose numbers the caller has checked.

        Args:
            path, state: of the file, as returned by `MappedFile`; None for private memory.
        """
        if not 0 <= shard < self._num_shards or data.shape[0] == 0 or first.shape[0] < 1:
            raise ValueError(f"shard {shard} of {data.shape[0]} bytes is out of range: there are {self._num_shards}")
        self._keepers.append((data, offsets, sizes, extensions, first, ranks, path))
        cdef Shard *opened = self._shards + shard
        if path is not None:
            opened.was.device, opened.was.inode, opened.was.nbytes, opened.was.mtime_ns = state
            opened.path = path
        opened.num_extensions = ranks.shape[1]
        opened.ranks = &ranks[0, 0] if ranks.shape[0] and ranks.shape[1] else NULL
        opened.first = &first[0]
        if offsets.shape[0]:
            opened.offsets, opened.sizes, opened.extensions = &offsets[0], &sizes[0], &extensions[0]
        shml_publish_base(&opened.base, &data[0])  # last, because other threads then read the other fields

    def unopened(self, const int64_t[::1] indices not None):
        """Return the number of a shard that these samples need and that is not open, or -1."""
        cdef Py_ssize_t i, shard, found = -1
        with nogil:
            for i in range(indices.shape[0]):
                shard = self._shard_of(indices[i])
                if shml_base(&self._shards[shard].base) == NULL:
                    found = shard
                    break
        return found

    def changed(self, const int64_t[::1] indices not None):
        """Return the number of an open shard of these samples whose file was written to since it was mapped, or -1."""
        cdef Py_ssize_t i, found = -1
        cdef Shard *shard
        cdef uint64_t look
        look = shml_next_look(&self._num_looks)  # unique to this call, so files that another thread has checked are checked again
        with nogil:
            for i in range(indices.shape[0]):
                shard = self._shards + self._shard_of(indices[i])
                if shard.path != NULL and shml_ask(&shard.asked, look) != look:
                    if file_has_changed(shard.path, &shard.was):
                        found = shard - self._shards
                        break
        return found

    def find(self, const int64_t[::1] indices not None, int field):
        """Return a field's members of these samples, whose shards must be open."""
        cdef Members found = Members.__new__(Members, self, indices.shape[0])
        cdef Py_ssize_t i
        with nogil:
            for i in range(indices.shape[0]):
                self._find(indices[i], field, found, i)
        return found

    cdef Py_ssize_t _shard_of(self, int64_t index) noexcept nogil:
        cdef Py_ssize_t low = 0, high = self._num_shards, middle
        while high - low > 1:
            middle = (low + high) // 2
            if self._starts[middle] <= index:
                low = middle
            else:
                high = middle
        return low

    cdef void _find(self, int64_t index, int field, Members found, Py_ssize_t row) noexcept nogil:
        cdef Py_ssize_t number = self._shard_of(index)
        cdef Shard *shard = self._shards + number
        cdef uint64_t sample = index - self._starts[number], member
        cdef uint8_t rank, best = NO_RANK
        for member in range(shard.first[sample], shard.first[sample + 1]):
            rank = shard.ranks[field * shard.num_extensions + shard.extensions[member]]
            if rank < best:
                best = rank
                found.at[row] = shard.base + shard.offsets[member]
                found.sizes[row] = shard.sizes[member]


cdef class Members:
    """One field's members in a batch; a missing member has address NULL."""

    cdef const uint8_t **at
    cdef uint64_t *sizes
    cdef const uint8_t **_data  # of .npy payloads accepted by `extents`
    cdef readonly Py_ssize_t count
    cdef object _keeper

    def __cinit__(self, keeper, Py_ssize_t count):
        self._keeper = keeper
        self.count = count
        self.at = <const uint8_t **>calloc(max(count, 1), sizeof(void *))
        self.sizes = <uint64_t *>calloc(max(count, 1), sizeof(uint64_t))
        self._data = <const uint8_t **>calloc(max(count, 1), sizeof(void *))
        if self.at == NULL or self.sizes == NULL or self._data == NULL:
            raise MemoryError(f"cannot allocate memory for the positions of {count} members")

    def __dealloc__(self):
        free(self.at)
        free(self.sizes)
        free(self._data)

    def read_npy(self, rows, Py_ssize_t row, bytes descr not None, const int64_t[::1] shape not None):
        """Copy arrays to `rows` from `row` on while they have this type and shape. Return the row where it stopped."""
        cdef Py_buffer out
        cdef Npy npy
        cdef const uint8_t *accepted = NULL
        cdef const uint8_t *wanted = descr
        cdef Py_ssize_t descr_nbytes = len(descr)
        cdef uint64_t nbytes, header = 0
        PyObject_GetBuffer(rows, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if self.count == 0 or out.len % self.count or row < 0:
                raise ValueError(f"the buffer of {out.len} bytes does not divide into {self.count} rows")
            nbytes = out.len // self.count
            with nogil:
                while row < self.count and self.at[row] != NULL:
                    if accepted == NULL or self.sizes[row] != header + nbytes or memcmp(self.at[row], accepted, header) != 0:
                        if not _parse(self.at[row], self.sizes[row], wanted, descr_nbytes, &npy) or npy.nbytes != nbytes:
                            break
                        if npy.ndim != shape.shape[0]:
                            break
                        if npy.ndim and memcmp(npy.shape, &shape[0], npy.ndim * sizeof(int64_t)) != 0:
                            break
                        accepted, header = self.at[row], npy.header_nbytes
                    memcpy(<uint8_t *>out.buf + row * nbytes, self.at[row] + header, nbytes)
                    row += 1
        finally:
            PyBuffer_Release(&out)
        return row

    def extents(
        self,
        int64_t[:, ::1] found not None,
        Py_ssize_t row,
        bytes descr not None,
        const int64_t[::1] shape not None,
        uint64_t itemsize,
    ):
        """Write the ragged extents (-1 in `shape`) of the arrays from `row` on to `found`. Return the row where it stopped."""
        cdef Npy npy
        cdef const uint8_t *wanted = descr
        cdef Py_ssize_t descr_nbytes = len(descr)
        if found.shape[0] != self.count or row < 0:
            raise ValueError(f"there must be one row of extents for each of {self.count} members, got {found.shape[0]}")
        with nogil:
            while row < self.count and self.at[row] != NULL:
                if not _parse(self.at[row], self.sizes[row], wanted, descr_nbytes, &npy):
                    break
                if not _fits(&npy, shape, itemsize, &found[row, 0], found.shape[1]):
                    break
                self._data[row] = npy.data
                row += 1
        return row

    def raw_extents(self, int64_t[:, ::1] found not None, Py_ssize_t row, uint64_t itemsize):
        """The same for members that consist only of values, end to end."""
        if found.shape[0] != self.count or found.shape[1] != 1 or row < 0:
            raise ValueError(f"there must be one row of extents for each of {self.count} members, got {found.shape[0]}")
        with nogil:
            while row < self.count and self.at[row] != NULL and self.sizes[row] % itemsize == 0:
                found[row, 0] = self.sizes[row] // itemsize
                self._data[row] = self.at[row]
                row += 1
        return row

    def copy_ragged(self, values, const uint64_t[::1] ends not None):
        """Copy the data accepted by `extents` to `values`, row after row; each row ends at its byte offset in `ends`."""
        cdef Py_buffer out
        cdef Py_ssize_t row
        cdef uint64_t begin = 0
        PyObject_GetBuffer(values, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if ends.shape[0] != self.count or (self.count and ends[self.count - 1] != <uint64_t>out.len):
                raise ValueError(f"the buffer of {out.len} bytes is too small for the rows of {self.count} members")
            with nogil:
                for row in range(self.count):
                    if self._data[row] != NULL:
                        memcpy(<uint8_t *>out.buf + begin, self._data[row], ends[row] - begin)
                    begin = ends[row]
        finally:
            PyBuffer_Release(&out)

    def read_ints(self, rows, Py_ssize_t row, int itemsize, bint is_signed):
        """Parse numbers into `rows` from `row` on while they are valid and fit. Return the row where it stopped."""
        cdef Py_buffer out
        cdef int64_t number, low, high
        PyObject_GetBuffer(rows, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if out.len != self.count * itemsize or row < 0:
                raise ValueError(f"the buffer must have {self.count * itemsize} bytes for {self.count} rows of {itemsize}, got {out.len}")
            low, high = -<int64_t>9223372036854775807, 9223372036854775807
            if itemsize < 8:
                high = (<int64_t>1 << (8 * itemsize - is_signed)) - 1
                low = -high - 1
            if not is_signed:
                low = 0
            with nogil:
                while row < self.count and self.at[row] != NULL:
                    if not _number(self.at[row], self.sizes[row], &number) or not low <= number <= high:
                        break
                    memcpy(<uint8_t *>out.buf + row * itemsize, &number, itemsize)  # little-endian, so the low bytes come first
                    row += 1
        finally:
            PyBuffer_Release(&out)
        return row

    def read_raw(self, rows, Py_ssize_t row):
        """Copy members from `row` on while they are as large as a row. Return the row where it stopped."""
        cdef Py_buffer out
        cdef uint64_t nbytes
        PyObject_GetBuffer(rows, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if self.count == 0 or out.len % self.count or row < 0:
                raise ValueError(f"the buffer of {out.len} bytes does not divide into {self.count} rows")
            nbytes = out.len // self.count
            with nogil:
                while row < self.count and self.at[row] != NULL and self.sizes[row] == nbytes:
                    memcpy(<uint8_t *>out.buf + row * nbytes, self.at[row], nbytes)
                    row += 1
        finally:
            PyBuffer_Release(&out)
        return row

    def payloads(self, bint is_text):
        """Return the members as a list of bytes, or of str; None for a member that is missing or not UTF-8."""
        found = []
        cdef Py_ssize_t row
        for row in range(self.count):
            if self.at[row] == NULL:
                found.append(None)
            elif is_text:
                try:
                    found.append(PyUnicode_DecodeUTF8(<const char *>self.at[row], self.sizes[row], NULL))
                except UnicodeDecodeError:
                    found.append(None)
            else:
                found.append(PyBytes_FromStringAndSize(<const char *>self.at[row], self.sizes[row]))
        return found
