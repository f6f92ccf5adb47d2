"""Scan tar headers, and whole shards: which samples a shard contains, and where their members are.

    header 512 bytes | payload, padded to 512 | header ... | two blocks of zeros | zeros to the end

Anything that would make a reader silently see less than was written is an error: a missing end marker, data after it, a sparse
member, a link in place of a sample's member, a long name without its member.

`TarHeaders` is the state of one reader. It is fed block by block by a stream, or by `TarScan` from a mapped shard without the GIL.
Samples are adjacent members with the same key, as in webdataset; dot files and `__meta__` members are ignored.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

cdef enum:
    EXTENSION_LIMIT = 65535  # different extensions in a shard; they are numbered in 16 bits
    NUM_SLOTS = 1 << 17  # size of the table of extensions, a power of two

include "tar_headers.pxi"


cdef Py_ssize_t _split(const uint8_t *name, Py_ssize_t nbytes) noexcept nogil:
    """Return the position of the dot between key and extension, or -1 if the member belongs to no sample."""
    cdef Py_ssize_t i, base = 0, first = nbytes
    for i in range(nbytes):
        if name[i] == c'/':
            if first == nbytes:
                first = i
            base = i + 1
    if first >= 4 and name[0] == c'_' and name[1] == c'_' and name[first - 1] == c'_' and name[first - 2] == c'_':
        return -1  # metadata
    for i in range(base, nbytes):
        if name[i] == c'.':
            return i if i > base else -1  # a dot file
    return -1


def split_name(const uint8_t[::1] name not None):
    """Return (key, extension in lower case) of a member's name, or None if it belongs to no sample."""
    cdef Py_ssize_t at = _split(&name[0], name.shape[0]) if name.shape[0] else -1
    if at < 0:
        return None
    whole = bytes(name)
    return whole[:at], whole[at + 1 :].lower()


cdef struct Buffer:
    uint8_t *at
    uint64_t nbytes
    uint64_t capacity


cdef bint _push(Buffer *buffer, const void *at, uint64_t nbytes) noexcept nogil:
    cdef uint64_t capacity = buffer.capacity
    cdef uint8_t *moved
    if nbytes > capacity - buffer.nbytes:
        capacity = 2 * (capacity + nbytes) + 256
        moved = <uint8_t *>realloc(buffer.at, capacity)
        if moved == NULL:
            return False
        buffer.at, buffer.capacity = moved, capacity
    memcpy(buffer.at + buffer.nbytes, at, nbytes)
    buffer.nbytes += nbytes
    return True


cdef enum:
    OFFSETS, SIZES, MEMBER_EXTENSIONS, FIRST, KEY_ENDS, KEYS, EXTENSION_ENDS, EXTENSIONS, LAST_SAMPLE, NUM_BUFFERS


cdef class TarScan:
    """The samples of a shard, found by reading every header of it.

    Attributes:
        num_samples, num_members: number of samples, and of the members that belong to them.
        cause, offset: the defect of the shard and its offset; if there is none, "" and the offset where the scan ended.
        offsets, sizes: of the members' payloads; uint64.
        member_extensions: numbers of the members' extensions; uint16.
        first: number of each sample's first member, and the number of all members; uint64.
        key_ends, keys: the samples' keys, end to end; uint64, text.
        extensions: in lower case, in the order of their numbers.
    """

    cdef Buffer _buffers[NUM_BUFFERS]
    cdef uint32_t *_slots
    cdef TarHeaders _headers
    cdef readonly uint64_t num_samples, num_members, offset
    cdef readonly str cause

    def __cinit__(self, const uint8_t[::1] shard not None):
        cdef const uint8_t *at = &shard[0] if shard.shape[0] else NULL
        cdef bint is_sound
        self._headers = TarHeaders()
        self._slots = <uint32_t *>calloc(NUM_SLOTS, sizeof(uint32_t))
        if self._slots == NULL:
            raise MemoryError("cannot allocate memory for the index of a tar file")
        with nogil:
            is_sound = self._scan(at, shard.shape[0])
        free(self._slots)
        self._slots = NULL
        self.cause = "" if is_sound else self._headers.cause
        if self.cause == "memory":
            raise MemoryError("cannot allocate memory for the index of a tar file")

    def __dealloc__(self):
        cdef int i
        free(self._slots)
        for i in range(NUM_BUFFERS):
            free(self._buffers[i].at)

    @property
    def offsets(self):
        return self._bytes(OFFSETS)

    @property
    def sizes(self):
        return self._bytes(SIZES)

    @property
    def member_extensions(self):
        return self._bytes(MEMBER_EXTENSIONS)

    @property
    def first(self):
        return self._bytes(FIRST)

    @property
    def key_ends(self):
        return self._bytes(KEY_ENDS)

    @property
    def keys(self):
        return self._bytes(KEYS)

    @property
    def extensions(self):
        cdef uint64_t begin = 0, i
        cdef uint64_t *ends = <uint64_t *>self._buffers[EXTENSION_ENDS].at
        found = []
        for i in range(self._buffers[EXTENSION_ENDS].nbytes // 8):
            found.append(PyBytes_FromStringAndSize(<const char *>self._buffers[EXTENSIONS].at + begin, ends[i] - begin))
            begin = ends[i]
        return found

    cdef bytes _bytes(self, int which):
        return PyBytes_FromStringAndSize(<const char *>self._buffers[which].at, self._buffers[which].nbytes)

    cdef bint _fail(self, const char *cause) noexcept nogil:
        self._headers._fail(cause)
        return False

    cdef bint _scan(self, const uint8_t *shard, uint64_t nbytes) noexcept nogil:
        cdef int kind
        cdef uint64_t at = 0, end
        while True:
            self.offset = at
            if nbytes - at < BLOCK:
                return self._fail(b"the file ends without the end marker of a tar file: it is truncated")
            kind = self._headers._header(shard + at)
            if kind == _BAD:
                return False
            at += BLOCK
            if kind == _END:
                if not _is_zero(shard + at, nbytes - at):
                    return self._fail(b"there is data after the end marker; join tar files with tar --concatenate, not cat")
                return _push(&self._buffers[FIRST], &self.num_members, 8) or self._fail(b"memory")
            end = at + <uint64_t>self._headers._size
            if <uint64_t>self._headers._size > nbytes - at or nbytes - at < _whole(<uint64_t>self._headers._size):
                return self._fail(b"a member reaches beyond the end of the file: it is truncated")
            if kind == _FILE:
                if not self._add(at):
                    return False
            elif not self._headers._payload(kind, shard + at, end - at):
                return False
            at += _whole(<uint64_t>self._headers._size)

    cdef bint _add(self, uint64_t at) noexcept nogil:
        cdef const uint8_t *name = self._headers._name.at
        cdef Py_ssize_t nbytes = self._headers._name.nbytes, dot = _split(name, nbytes)
        cdef Buffer *keys = &self._buffers[KEYS]
        cdef uint64_t *ends = <uint64_t *>self._buffers[KEY_ENDS].at
        cdef uint64_t begin = ends[self.num_samples - 2] if self.num_samples > 1 else 0
        cdef uint64_t size = self._headers._size
        if dot < 0:
            return True
        if not self.num_samples or keys.nbytes - begin != <uint64_t>dot or memcmp(keys.at + begin, name, dot) != 0:
            if not (
                _push(&self._buffers[FIRST], &self.num_members, 8)
                and _push(keys, name, dot)
                and _push(&self._buffers[KEY_ENDS], &keys.nbytes, 8)
            ):
                return self._fail(b"memory")
            self.num_samples += 1
        cdef int32_t extension = self._extension(name + dot + 1, nbytes - dot - 1)
        if extension < 0:
            return False
        cdef uint64_t *last = <uint64_t *>self._buffers[LAST_SAMPLE].at
        if last[extension] == self.num_samples:
            return self._fail(b"a sample has two members of one extension")
        last[extension] = self.num_samples
        cdef uint16_t number = extension
        if not (
            _push(&self._buffers[OFFSETS], &at, 8)
            and _push(&self._buffers[SIZES], &size, 8)
            and _push(&self._buffers[MEMBER_EXTENSIONS], &number, 2)
        ):
            return self._fail(b"memory")
        self.num_members += 1
        return True

    cdef int32_t _extension(self, const uint8_t *at, Py_ssize_t nbytes) noexcept nogil:
        """Return the number of an extension; a new extension is added."""
        cdef Buffer *all = &self._buffers[EXTENSIONS]
        cdef uint64_t begin = all.nbytes, start, zero = 0
        cdef uint32_t hashed = 2166136261, slot, number  # FNV-1a
        cdef Py_ssize_t i
        cdef uint8_t letter
        for i in range(nbytes):
            letter = at[i] + 32 if c'A' <= at[i] <= c'Z' else at[i]
            hashed = (hashed ^ letter) * 16777619
            if not _push(all, &letter, 1):
                self._fail(b"memory")
                return -1
        cdef uint64_t *ends = <uint64_t *>self._buffers[EXTENSION_ENDS].at
        slot = hashed & (NUM_SLOTS - 1)
        while self._slots[slot]:
            number = self._slots[slot] - 1
            start = ends[number - 1] if number else 0
            if ends[number] - start == <uint64_t>nbytes and memcmp(all.at + start, all.at + begin, nbytes) == 0:
                all.nbytes = begin
                return number
            slot = (slot + 1) & (NUM_SLOTS - 1)
        number = self._buffers[EXTENSION_ENDS].nbytes // 8
        if number == EXTENSION_LIMIT:
            self._fail(b"there are more than 65,535 different extensions: the names are no samples'")
            return -1
        if not (_push(&self._buffers[EXTENSION_ENDS], &all.nbytes, 8) and _push(&self._buffers[LAST_SAMPLE], &zero, 8)):
            self._fail(b"memory")
            return -1
        self._slots[slot] = number + 1
        return number


cdef inline uint64_t _whole(uint64_t nbytes) noexcept nogil:
    return (nbytes + BLOCK - 1) // BLOCK * BLOCK
