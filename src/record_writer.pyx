"""Frame records, and encode Examples, into one growing buffer, which its owner writes to a file from time to time.

In protobuf a length precedes the data, so an Example is first sized and then written. Each value is written once, directly to its
place in the record, and a long one is summed during the copy.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef extern from "crc32c.h":
    void crc_start()
    uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil
    uint32_t crc_masked(uint32_t crc) noexcept nogil

crc_start()

BYTES, FLOATS, INTS = 1, 2, 3
cdef enum:
    KIND_BYTES = 1, KIND_FLOATS, KIND_INTS
cdef enum:
    LONG_VALUE = 16384  # values of at least this many bytes are summed while they are copied

cdef struct Feature:
    int kind
    Py_ssize_t first  # index of its first buffer
    Py_ssize_t num_buffers
    size_t values_nbytes  # bytes of a packed field's payload, or of a bytes_list's blocks
    size_t list_nbytes  # bytes of the list message
    size_t nbytes  # bytes of the Feature message

cdef inline size_t varint_nbytes(uint64_t value) noexcept nogil:
    cdef size_t nbytes = 1
    while value >= 0x80:
        value >>= 7
        nbytes += 1
    return nbytes


cdef inline uint8_t *put_varint(uint8_t *at, uint64_t value) noexcept nogil:
    while value >= 0x80:
        at[0] = <uint8_t>(value | 0x80)
        at += 1
        value >>= 7
    at[0] = <uint8_t>value
    return at + 1


cdef inline size_t block_nbytes(size_t nbytes) noexcept nogil:
    """Return the size of a one-byte tag, the length and this many bytes."""
    return 1 + varint_nbytes(nbytes) + nbytes


cdef inline uint8_t *put_head(uint8_t *at, uint8_t tag, size_t nbytes) noexcept nogil:
    at[0] = tag
    return put_varint(at + 1, nbytes)


cdef size_t ints_nbytes(const int64_t *values, size_t count) noexcept nogil:
    cdef size_t i, total = 0
    for i in range(count):
        total += varint_nbytes(<uint64_t>values[i])
    return total


cdef uint8_t *put_ints(uint8_t *at, const uint8_t *end, const uint64_t *values, size_t count) noexcept nogil:
    """Write varints up to `end` at most: the values may have grown since they were measured."""
    cdef size_t i
    for i in range(count):
        if end - at < 10 and <Py_ssize_t>varint_nbytes(values[i]) > end - at:
            break
        at = put_varint(at, values[i])
    return at


cdef inline size_t entry_nbytes(size_t name_nbytes, size_t value_nbytes) noexcept nogil:
    """Return the size of a map entry."""
    return block_nbytes(name_nbytes) + block_nbytes(value_nbytes)


cdef class RecordBuffer:
    """Framed records, end to end. A record that fails leaves the buffer unchanged."""

    cdef uint8_t *_data
    cdef size_t _room
    cdef readonly size_t nbytes
    # of the Example being written:
    cdef Py_buffer *_buffers
    cdef Py_ssize_t _num_buffers, _buffers_room
    cdef Feature *_features
    cdef Py_ssize_t _num_features, _features_room
    cdef uint8_t *_at
    cdef const uint8_t *_summed  # `_crc` is the sum up to here
    cdef uint32_t _crc

    def __dealloc__(self):
        self._release()
        free(self._data)
        free(self._buffers)
        free(self._features)

    @cython.critical_section
    def append(self, data):
        """Frame one record.

        Returns:
            the number of bytes that it takes in the file.
        """
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS)
        try:
            self._begin(view.len)
            self._copy(<const uint8_t *>view.buf, view.len)
            return self._end()
        finally:
            PyBuffer_Release(&view)

    @cython.critical_section
    def append_example(self, list fields not None):
        """Encode and frame a tf.train.Example.

        Args:
            fields: (encoded name, kind, buffers) each, in the order in which they are written: any number of buffers of BYTES, one
                of little-endian float32 for FLOATS, one of int64 for INTS.
        Returns:
            the number of bytes that it takes in the file.
        """
        cdef size_t nbytes
        try:
            nbytes = self._measure(fields)
            self._begin(block_nbytes(nbytes))
            self._at = put_head(self._at, 0x0a, nbytes)
            self._put_fields(fields, 0)
            return self._end()
        finally:
            self._release()

    @cython.critical_section
    def append_sequence(self, list context not None, list feature_lists not None):
        """Encode and frame a tf.train.SequenceExample.

        Args:
            context: like the `fields` of `append_example`.
            feature_lists: (encoded name, list of (kind, buffers)) each.
        """
        cdef size_t context_nbytes, nbytes, lists_nbytes = 0
        cdef Py_ssize_t i
        cdef list sizes = []
        try:
            context_nbytes = self._measure(context)
            for name, steps in feature_lists:
                nbytes = 0
                for kind, values in steps:
                    nbytes += block_nbytes(self._hold(kind, values))
                sizes.append(nbytes)
                lists_nbytes += block_nbytes(entry_nbytes(len(name), nbytes))
            self._begin(block_nbytes(context_nbytes) + block_nbytes(lists_nbytes))
            self._at = put_head(self._at, 0x0a, context_nbytes)
            self._put_fields(context, 0)
            self._at = put_head(self._at, 0x12, lists_nbytes)
            i = len(context)
            for (name, steps), nbytes in zip(feature_lists, sizes):
                self._put_name(name, nbytes)
                for _ in steps:
                    self._at = put_head(self._at, 0x0a, self._features[i].nbytes)
                    self._put(&self._features[i])
                    i += 1
            return self._end()
        finally:
            self._release()

    cdef size_t _measure(self, list fields) except? 0:
        """Hold the buffers of some fields. Return the size of the Features message."""
        cdef size_t nbytes = 0
        for name, kind, values in fields:
            nbytes += block_nbytes(entry_nbytes(len(name), self._hold(kind, values)))
        return nbytes

    cdef size_t _hold(self, int kind, list values) except? 0:
        """Hold the buffers of one feature. Return the size of its message."""
        cdef Feature *feature
        cdef Py_buffer *view
        cdef void *more
        cdef Py_ssize_t i
        if self._num_features == self._features_room:
            more = realloc(self._features, (2 * self._features_room + 16) * sizeof(Feature))
            if more == NULL:
                raise MemoryError
            self._features, self._features_room = <Feature *>more, 2 * self._features_room + 16
        if self._num_buffers + len(values) > self._buffers_room:
            more = realloc(self._buffers, (2 * self._buffers_room + len(values) + 16) * sizeof(Py_buffer))
            if more == NULL:
                raise MemoryError
            self._buffers, self._buffers_room = <Py_buffer *>more, 2 * self._buffers_room + len(values) + 16
        feature = &self._features[self._num_features]
        feature.kind, feature.first, feature.num_buffers, feature.values_nbytes = kind, self._num_buffers, len(values), 0
        self._num_features += 1
        for value in values:
            view = &self._buffers[self._num_buffers]
            PyObject_GetBuffer(value, view, PyBUF_C_CONTIGUOUS)
            self._num_buffers += 1
            if kind == KIND_BYTES:
                feature.values_nbytes += block_nbytes(view.len)
            elif kind == KIND_FLOATS:
                feature.values_nbytes += view.len
            else:
                feature.values_nbytes += ints_nbytes(<const int64_t *>view.buf, view.len // 8)
        feature.list_nbytes = feature.values_nbytes
        if kind != KIND_BYTES and feature.values_nbytes:  # like protobuf's own writers: an empty list has no packed field
            feature.list_nbytes = block_nbytes(feature.values_nbytes)
        feature.nbytes = block_nbytes(feature.list_nbytes)
        return feature.nbytes

    cdef void _release(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self._num_buffers):
            PyBuffer_Release(&self._buffers[i])
        self._num_buffers = self._num_features = 0

    cdef int _put_fields(self, list fields, Py_ssize_t first) except -1:
        for name, _, _ in fields:
            self._put_name(name, self._features[first].nbytes)
            self._put(&self._features[first])
            first += 1
        return 0

    cdef int _put_name(self, bytes name, size_t value_nbytes) except -1:
        """Write the map entry up to its value's bytes."""
        self._at = put_head(self._at, 0x0a, entry_nbytes(len(name), value_nbytes))
        self._at = put_head(self._at, 0x0a, len(name))
        self._copy(<const uint8_t *><const char *>name, len(name))
        self._at = put_head(self._at, 0x12, value_nbytes)
        return 0

    cdef int _put(self, const Feature *feature) except -1:
        """Write a Feature's bytes, exactly as many as were measured."""
        cdef Py_buffer *view
        cdef Py_ssize_t i
        cdef const uint8_t *end
        self._at = put_head(self._at, <uint8_t>(feature.kind << 3 | 2), feature.list_nbytes)
        end = self._at + feature.list_nbytes
        if feature.kind != KIND_BYTES and feature.values_nbytes:
            self._at = put_head(self._at, 0x0a, feature.values_nbytes)
        for i in range(feature.num_buffers):
            view = &self._buffers[feature.first + i]
            if feature.kind == KIND_INTS:
                self._at = put_ints(self._at, end, <const uint64_t *>view.buf, view.len // 8)
                continue
            if feature.kind == KIND_BYTES:
                self._at = put_head(self._at, 0x0a, view.len)
            self._copy(<const uint8_t *>view.buf, view.len)
        if self._at != end:
            raise RuntimeError("another thread changed an array while it was being written")
        return 0

    cdef int _begin(self, size_t nbytes) except -1:
        """Make room for a record and its frame."""
        cdef void *more
        cdef uint64_t length = nbytes
        cdef uint32_t crc
        if self.nbytes + nbytes + 16 > self._room:
            more = realloc(self._data, 2 * self._room + nbytes + 4096)
            if more == NULL:
                raise MemoryError(f"cannot allocate {nbytes} bytes for a record")
            self._data, self._room = <uint8_t *>more, 2 * self._room + nbytes + 4096
        self._at = self._data + self.nbytes
        memcpy(self._at, &length, 8)
        crc = crc_masked(crc32c_copied(0, NULL, self._at, 8))
        memcpy(self._at + 8, &crc, 4)
        self._at += 12
        self._summed, self._crc = self._at, 0
        return 0

    cdef size_t _end(self) except 0:
        """Sum the remaining bytes and complete the record."""
        cdef size_t nbytes
        cdef uint32_t crc = crc_masked(crc32c_copied(self._crc, NULL, self._summed, self._at - self._summed))
        memcpy(self._at, &crc, 4)
        nbytes = self._at + 4 - (self._data + self.nbytes)
        self.nbytes += nbytes
        return nbytes

    cdef void _copy(self, const uint8_t *at, size_t nbytes) noexcept:
        if nbytes >= LONG_VALUE:
            with nogil:
                self._crc = crc32c_copied(self._crc, NULL, self._summed, self._at - self._summed)
                self._crc = crc32c_copied(self._crc, self._at, at, nbytes)
                self._at += nbytes
                self._summed = self._at
        elif nbytes:
            memcpy(self._at, at, nbytes)
            self._at += nbytes

    @cython.critical_section
    def write_to(self, file):
        """Write everything to a file's `write`, and empty the buffer."""
        cdef uint8_t[::1] view
        if self.nbytes:
            view = <uint8_t[:self.nbytes]>self._data
            file.write(view)
            self.nbytes = 0
