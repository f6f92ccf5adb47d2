"""A socket's bytes into a file, with their checksum, in one loop without the GIL.

The bytes go through a buffer that stays in the processor's nearest caches: the checksum finds them there, and so does the copy into
the file. Python's own loop over the same calls takes 24 us of interpreter for each 64 KiB, and its threads hand the GIL to each
other twice on the way; here they meet once a look.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t
from posix.types cimport off_t

cdef extern from "crc32c.h":
    void crc_start()
    uint32_t crc32c_copied(uint32_t crc, uint8_t *to, const uint8_t *at, size_t nbytes) noexcept nogil

cdef extern from "<sys/socket.h>" nogil:
    enum: MSG_DONTWAIT
    ssize_t recv(int fd, void *to, size_t nbytes, int flags)

cdef extern from "<poll.h>" nogil:
    enum: POLLIN
    struct pollfd:
        int fd
        short events
    int poll(pollfd *fds, unsigned long count, int timeout_ms)

cdef extern from "<time.h>" nogil:
    enum: CLOCK_MONOTONIC
    struct timespec:
        int64_t tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *now)

cdef extern from "<unistd.h>" nogil:
    ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t offset)

crc_start()

cdef enum: ROOM = 1 << 16


cdef struct Way:
    int socket
    int file
    int64_t until_ms  # when it is time for a look
    uint32_t crc
    bint is_over      # the other side has ended
    bint is_late      # it is time, or a signal has come
    int socket_error
    int file_error


cdef int64_t _now_ms() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * 1000 + now.tv_nsec // 1000000


cdef int64_t _gather(Way *way, uint8_t *room, int64_t wanted) noexcept nogil:
    """Fills the room as far as bytes come; says in `way` why it stopped before."""
    cdef int64_t have = 0, left_ms
    cdef ssize_t got
    cdef pollfd waits
    waits.fd, waits.events = way.socket, POLLIN
    while have < wanted:
        got = recv(way.socket, room + have, wanted - have, MSG_DONTWAIT)
        if got > 0:
            have += got
        elif got == 0:
            way.is_over = True
            break
        elif errno == EAGAIN:
            left_ms = way.until_ms - _now_ms()
            if left_ms <= 0 or poll(&waits, 1, <int>left_ms) < 0:
                way.is_late = True
                break
        elif errno == EINTR:
            way.is_late = True
            break
        else:
            way.socket_error = errno
            break
    return have


cdef int64_t _put(Way *way, const uint8_t *room, int64_t nbytes, int64_t offset) noexcept nogil:
    cdef int64_t done = 0
    cdef ssize_t put
    while done < nbytes:
        put = pwrite(way.file, room + done, nbytes - done, offset + done)
        if put > 0:
            done += put
        elif put == 0 or errno != EINTR:
            way.file_error = errno
            break
    way.crc = crc32c_copied(way.crc, NULL, room, done)
    return done


def receive(int socket, int file, int64_t offset, int64_t nbytes, uint32_t crc, int look_ms):
    """Writes what comes from a socket into a file, until all has come or something else happens.

    Args:
        socket: read without blocking, whatever its own mode.
        file: open for writing.
        offset: in the file.
        nbytes: how many are wanted.
        crc: the CRC-32C of what came before.
        look_ms: after so long it returns with what has come, when it would have to wait for more.
    Returns:
        bytes written, their checksum behind `crc`, whether the other side has ended, error numbers of socket and file (0: none).
    """
    cdef uint8_t room[ROOM]
    cdef int64_t done = 0, have
    cdef Way way
    way.socket, way.file, way.crc, way.until_ms = socket, file, crc, _now_ms() + look_ms
    way.is_over = way.is_late = False
    way.socket_error = way.file_error = 0
    with nogil:
        while done < nbytes and not (way.is_over or way.is_late or way.socket_error or way.file_error):
            # whole pages of the file: one that is begun twice is looked up twice
            have = _gather(&way, room, min(<int64_t>ROOM - (offset + done) % ROOM, nbytes - done))
            done += _put(&way, room, have, offset + done)
    return done, way.crc, way.is_over, way.socket_error, way.file_error
