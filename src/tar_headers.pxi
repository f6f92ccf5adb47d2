# The headers of a tar file: names, sizes, kinds; included by tar.pyx.
#
# Supported are ustar headers (with a prefix), GNU headers (with 'L' and 'K' members for long names, numbers in base 256) and
# headers older than ustar; PAX 'x' and 'g' members override path and size. Every header's checksum is verified.
#
# Source: POSIX.1-2017 pax; GNU tar manual, "Basic Tar Format"; CPython's tarfile.py for the quirks of old archives.

cdef enum:
    BLOCK = 512
    NAME_LIMIT = 65536  # bytes of a name; every system limits a path to 4096

END, FILE, OTHER, LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL = range(7)

cdef enum Kind:
    _BAD = -1
    _END = 0
    _FILE = 1
    _OTHER = 2
    _LONG_NAME = 3
    _LONG_LINK = 4
    _PAX = 5
    _PAX_GLOBAL = 6


cdef struct Name:
    uint8_t *at  # room for NAME_LIMIT bytes
    Py_ssize_t nbytes  # -1 if there is no name


cdef bint _keep(Name *name, const uint8_t *at, Py_ssize_t nbytes) noexcept nogil:
    if nbytes >= NAME_LIMIT:
        return False
    if nbytes:  # an empty payload has no address
        memcpy(name.at, at, nbytes)
    name.nbytes = nbytes
    return True


cdef inline Py_ssize_t _length(const uint8_t *at, Py_ssize_t limit) noexcept nogil:
    cdef Py_ssize_t n = 0
    while n < limit and at[n]:
        n += 1
    return n


cdef int64_t _octal(const uint8_t *at, int nbytes) noexcept nogil:
    """Parse a number of a tar header: octal digits ended by a blank or NUL, or base 256. Return -1 if it is not a number."""
    cdef int64_t number = 0
    cdef int i = 0
    if at[0] & 0x80:
        if at[0] != 0x80:
            return -1  # negative, or beyond 2**88
        for i in range(1, nbytes):
            if number >> 54:
                return -1
            number = number << 8 | at[i]
        return number
    while i < nbytes and at[i] == c' ':
        i += 1
    while i < nbytes and c'0' <= at[i] <= c'7':
        number = number << 3 | (at[i] - c'0')
        i += 1
    while i < nbytes:
        if at[i] != c' ' and at[i] != 0:
            return -1
        i += 1
    return number


cdef bint _is_zero(const uint8_t *at, uint64_t nbytes) noexcept nogil:
    cdef uint64_t i
    for i in range(nbytes):
        if at[i]:
            return False
    return True


cdef bint _sum_holds(const uint8_t *block) noexcept nogil:
    """Return whether a header's checksum is right, over unsigned bytes or, as in some old programs, signed bytes."""
    cdef int64_t wanted = _octal(block + 148, 8), found = 8 * 32, signed_found = 8 * 32
    cdef int i
    for i in range(BLOCK):
        if not 148 <= i < 156:
            found += block[i]
            signed_found += <signed char>block[i]
    return wanted == found or wanted == signed_found


cdef class TarHeaders:
    """The state of a reader of one tar file between two headers.

    Attributes:
        size: bytes of the payload after the newest header.
        name: name of the file of the newest header.
        cause: the first defect found; "" before.
    """

    cdef Name _name, _pax, _pax_global, _gnu
    cdef int64_t _size, _pax_size, _pax_global_size
    cdef const char *_cause
    cdef uint8_t *_room

    def __cinit__(self):
        self._cause = b""
        self._pax_size = self._pax_global_size = -1
        self._room = <uint8_t *>malloc(4 * NAME_LIMIT)
        if self._room == NULL:
            raise MemoryError("cannot allocate memory for the names in a tar file")
        self._name.at, self._pax.at = self._room, self._room + NAME_LIMIT
        self._pax_global.at, self._gnu.at = self._room + 2 * NAME_LIMIT, self._room + 3 * NAME_LIMIT
        self._name.nbytes = self._pax.nbytes = self._pax_global.nbytes = self._gnu.nbytes = -1

    def __dealloc__(self):
        free(self._room)

    @property
    def size(self):
        return self._size

    @property
    def name(self):
        return PyBytes_FromStringAndSize(<const char *>self._name.at, max(self._name.nbytes, 0))

    @property
    def cause(self):
        return self._cause.decode()

    def read_header(self, const uint8_t[::1] block not None):
        """Read a header. Return FILE, OTHER (skipped), LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL, END, or -1: see `cause`."""
        if block.shape[0] != BLOCK:
            raise ValueError(f"a tar header must have {BLOCK} bytes, got {block.shape[0]}")
        return self._header(&block[0])

    def read_payload(self, int kind, const uint8_t[::1] payload not None):
        """Read the payload of a LONG_NAME, PAX or PAX_GLOBAL header. Return whether it is valid."""
        return self._payload(kind, &payload[0] if payload.shape[0] else NULL, payload.shape[0])

    cdef int _fail(self, const char *cause) noexcept nogil:
        self._cause = cause
        return _BAD

    cdef int _header(self, const uint8_t *block) noexcept nogil:
        cdef uint8_t flag = block[156]
        cdef bint is_pending = self._gnu.nbytes >= 0 or self._pax.nbytes >= 0 or self._pax_size >= 0
        if block[0] == 0 and _is_zero(block, BLOCK):
            return self._fail(b"a long name or PAX header has no member after it") if is_pending else _END
        if not _sum_holds(block):
            return self._fail(b"the checksum of a header is wrong")
        cdef bint is_ustar = memcmp(block + 257, b"ustar\x00", 6) == 0
        if not is_ustar and memcmp(block + 257, b"ustar  \x00", 8) != 0 and not _is_zero(block + 257, 8):
            return self._fail(b"a header is neither ustar's nor GNU's: its magic is unknown")
        self._size = _octal(block + 124, 12)
        if self._size < 0:
            return self._fail(b"the size in a header is no number")
        if flag == c'L':
            return _LONG_NAME
        if flag == c'K':
            return _LONG_LINK
        if flag == c'x' or flag == c'X':
            return _PAX
        if flag == c'g':
            return _PAX_GLOBAL
        if flag == c'S':
            return self._fail(b"a sparse member cannot be read in place; write the archive without --sparse")
        self._take_name(block, is_ustar)
        if (flag == c'1' or flag == c'2') and _split(self._name.at, self._name.nbytes) >= 0:
            return self._fail(b"a member is a link, so its data is elsewhere; write the archive with tar -h --hard-dereference")
        cdef bint is_file = flag == c'0' or flag == 0 or flag == c'7'
        if flag == 0 and self._name.nbytes and self._name.at[self._name.nbytes - 1] == c'/':
            is_file = False  # archives older than ustar mark folders this way
            self._size = 0
        if c'1' <= flag <= c'6':
            self._size = 0  # these kinds have no payload, whatever the field says
        elif self._pax_size >= 0:
            self._size = self._pax_size
        elif self._pax_global_size >= 0:
            self._size = self._pax_global_size
        self._gnu.nbytes = self._pax.nbytes = self._pax_size = -1
        return _FILE if is_file else _OTHER

    cdef void _take_name(self, const uint8_t *block, bint is_ustar) noexcept nogil:
        cdef Py_ssize_t n = _length(block, 100), prefix = _length(block + 345, 155) if is_ustar else 0
        if self._pax.nbytes >= 0:
            _keep(&self._name, self._pax.at, self._pax.nbytes)
        elif self._pax_global.nbytes >= 0:
            _keep(&self._name, self._pax_global.at, self._pax_global.nbytes)
        elif self._gnu.nbytes >= 0:
            _keep(&self._name, self._gnu.at, self._gnu.nbytes)
        elif prefix:
            memcpy(self._name.at, block + 345, prefix)
            self._name.at[prefix] = c'/'
            memcpy(self._name.at + prefix + 1, block, n)
            self._name.nbytes = prefix + 1 + n
        else:
            _keep(&self._name, block, n)

    cdef bint _payload(self, int kind, const uint8_t *at, uint64_t nbytes) noexcept nogil:
        if kind == _LONG_NAME:
            if not _keep(&self._gnu, at, _length(at, min(nbytes, <uint64_t>NAME_LIMIT))):
                self._fail(b"a name has 65,536 bytes or more")
                return False
            return True
        if kind == _PAX:
            return self._records(at, nbytes, &self._pax, &self._pax_size)
        if kind == _PAX_GLOBAL:
            return self._records(at, nbytes, &self._pax_global, &self._pax_global_size)
        return True

    cdef bint _records(self, const uint8_t *at, uint64_t nbytes, Name *path, int64_t *size) noexcept nogil:
        """Read PAX records, each "<its length> <keyword>=<value>\\n"; an empty value removes an earlier one."""
        cdef uint64_t begin = 0, cursor, length, end, value
        cdef int64_t number
        while begin < nbytes:
            cursor = begin
            length = 0
            while cursor < nbytes and c'0' <= at[cursor] <= c'9' and length < (<uint64_t>1 << 40):
                length = 10 * length + (at[cursor] - c'0')
                cursor += 1
            if cursor == begin and _is_zero(at + begin, nbytes - begin):
                return True  # some writers pad with zeros
            if cursor == begin or cursor >= nbytes or at[cursor] != c' ' or length > nbytes - begin:
                self._fail(b"a PAX header holds a broken record")
                return False
            cursor += 1
            if length <= cursor - begin:  # a length includes itself: 0 would put the end before the beginning, and never advance
                self._fail(b"a PAX header holds a broken record")
                return False
            end = begin + length - 1  # of the value; a newline is at this position
            value = cursor
            while value < end and at[value] != c'=':
                value += 1
            if value >= end or at[end] != c'\n':
                self._fail(b"a PAX header holds a broken record")
                return False
            value += 1
            if value - cursor >= 11 and memcmp(at + cursor, b"GNU.sparse.", 11) == 0:
                self._fail(b"a sparse member cannot be read in place; write the archive without --sparse")
                return False
            if value - cursor == 5 and memcmp(at + cursor, b"path=", 5) == 0:
                path.nbytes = -1
                if end > value and not _keep(path, at + value, _length(at + value, min(end - value, <uint64_t>NAME_LIMIT))):
                    self._fail(b"a name has 65,536 bytes or more")
                    return False
            elif value - cursor == 5 and memcmp(at + cursor, b"size=", 5) == 0:
                number = -1 if end == value else 0
                while value < end:
                    if not c'0' <= at[value] <= c'9' or number >> 58:
                        self._fail(b"the size in a PAX header is no number")
                        return False
                    number = 10 * number + (at[value] - c'0')
                    value += 1
                size[0] = number
            begin += length
        return True
