# Parse member payloads: the header of a .npy, a number in ASCII; included by tar_rows.pyx.
#
# Only headers as numpy itself writes them are accepted, and nothing past a payload's end is read. Python reads the rest.

cdef enum:
    MAX_DIMENSIONS = 32

cdef struct Npy:
    const uint8_t *data
    uint64_t nbytes  # of the data
    uint64_t header_nbytes
    int ndim
    int64_t shape[MAX_DIMENSIONS]


cdef inline const uint8_t *_blanks(const uint8_t *at, const uint8_t *end) noexcept nogil:
    while at < end and (at[0] == c' ' or at[0] == c'\n'):
        at += 1
    return at


cdef const uint8_t *_shape(const uint8_t *at, const uint8_t *end, Npy *npy) noexcept nogil:
    """Parse the tuple of a header's shape. Return the position after it, or NULL if it is not a shape."""
    cdef int64_t number
    npy.ndim = 0
    if at >= end or at[0] != c'(':
        return NULL
    at = _blanks(at + 1, end)
    while at < end and at[0] != c')':
        if not c'0' <= at[0] <= c'9' or npy.ndim == MAX_DIMENSIONS:
            return NULL
        number = 0
        while at < end and c'0' <= at[0] <= c'9':
            if number >> 56:
                return NULL
            number = 10 * number + (at[0] - c'0')
            at += 1
        npy.shape[npy.ndim] = number
        npy.ndim += 1
        at = _blanks(at, end)
        if at < end and at[0] == c',':
            at = _blanks(at + 1, end)
        elif at < end and at[0] != c')':
            return NULL
    return at + 1 if at < end else NULL


cdef bint _parse(const uint8_t *at, uint64_t size, const uint8_t *descr, Py_ssize_t descr_nbytes, Npy *npy) noexcept nogil:
    """Parse the header of a C-order array of type `descr`. Return whether it is one, in the plain form that numpy writes."""
    cdef const uint8_t *end
    cdef const uint8_t *key
    cdef int found = 0
    cdef bint is_fortran = False
    cdef uint64_t head
    if size < 12 or memcmp(at, b"\x93NUMPY", 6) != 0 or not 1 <= at[6] <= 3:
        return False
    head = at[8] | <uint64_t>at[9] << 8
    if at[6] > 1:
        head |= <uint64_t>at[10] << 16 | <uint64_t>at[11] << 24
    npy.header_nbytes = head + (10 if at[6] == 1 else 12)
    if npy.header_nbytes > size:
        return False
    npy.data, npy.nbytes = at + npy.header_nbytes, size - npy.header_nbytes
    end = npy.data
    at = _blanks(at + (10 if at[6] == 1 else 12), end)
    if at >= end or at[0] != c'{':
        return False
    at = _blanks(at + 1, end)
    while at < end and at[0] == c"'":
        key = at + 1
        at = <const uint8_t *>memchr(key, c"'", end - key)
        if at == NULL:
            return False
        head = at - key
        at = _blanks(at + 1, end)
        if at >= end or at[0] != c':':
            return False
        at = _blanks(at + 1, end)
        if head == 5 and memcmp(key, b"descr", 5) == 0:
            if end - at < descr_nbytes + 2 or at[0] != c"'" or at[descr_nbytes + 1] != c"'":
                return False
            if memcmp(at + 1, descr, descr_nbytes) != 0:
                return False
            at += descr_nbytes + 2
            found |= 1
        elif head == 13 and memcmp(key, b"fortran_order", 13) == 0:
            if end - at >= 4 and memcmp(at, b"True", 4) == 0:
                is_fortran = True
                at += 4
            elif end - at >= 5 and memcmp(at, b"False", 5) == 0:
                at += 5
            else:
                return False
            found |= 2
        elif head == 5 and memcmp(key, b"shape", 5) == 0:
            at = _shape(at, end, npy)
            if at == NULL:
                return False
            found |= 4
        else:
            return False
        at = _blanks(at, end)
        if at < end and at[0] == c',':
            at = _blanks(at + 1, end)
    if at >= end or at[0] != c'}' or _blanks(at + 1, end) != end:
        return False
    return found == 7 and not (is_fortran and npy.ndim > 1)


cdef bint _fits(
    Npy *npy, const int64_t[::1] shape, uint64_t itemsize, int64_t *extents, Py_ssize_t num_extents
) noexcept nogil:
    """Return whether an array has the given shape and exactly as many bytes as it takes; write the ragged extents to `extents`."""
    cdef uint64_t numel = 1
    cdef Py_ssize_t i, k = 0
    if npy.ndim != shape.shape[0]:
        return False
    for i in range(npy.ndim):
        if numel and npy.shape[i] and numel > npy.nbytes // <uint64_t>npy.shape[i]:
            return False  # more values than bytes; the check also keeps the product from overflowing
        numel *= npy.shape[i]
        if shape[i] == -1:
            if k == num_extents:
                return False
            extents[k] = npy.shape[i]
            k += 1
        elif shape[i] != npy.shape[i]:
            return False
    return numel <= npy.nbytes and numel * itemsize == npy.nbytes


cdef bint _number(const uint8_t *at, uint64_t size, int64_t *number) noexcept nogil:
    """Parse a decimal number between blanks; it must fit in 63 bits."""
    cdef const uint8_t *end
    cdef uint64_t found = 0
    cdef bint is_negative
    while size and (at[size - 1] == c' ' or 9 <= at[size - 1] <= 13):
        size -= 1
    end = at + size
    while at < end and (at[0] == c' ' or 9 <= at[0] <= 13):
        at += 1
    is_negative = at < end and at[0] == c'-'
    if is_negative:
        at += 1
    if at == end or end - at > 18:
        return False
    while at < end:
        if not c'0' <= at[0] <= c'9':
            return False
        found = 10 * found + (at[0] - c'0')
        at += 1
    number[0] = -<int64_t>found if is_negative else <int64_t>found
    return True
