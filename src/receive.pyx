"""Receive a socket's bytes into a file, with their checksum, in one loop without the GIL.

The bytes go through a buffer that stays in the processor's nearest caches, where both the checksum and the copy into the file find
them. Python's own loop over the same calls takes 24 us of interpreter for each 64 KiB, and its threads hand over the GIL twice in
each turn; here they hand it over once a call.
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
    int64_t until_ms  # when the call has to return
    uint32_t crc
    bint is_over      # the other side has closed the connection
    bint is_late      # the time is over, or a signal has arrived
    int socket_error
    int file_error


cdef int64_t _now_ms() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * 1000 + now.tv_nsec // 1000000


cdef int64_t _gather(Way *way, uint8_t *room, int64_t wanted) noexcept nogil:
    """Fill the room while bytes arrive; if it stops earlier, set the reason in `way`."""
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
    """Write bytes from a socket into a file, until all have arrived or something else happens.

    Args:
        socket: read without blocking, whatever its own mode.
        file: open for writing.
        offset: position in the file.
        nbytes: number of bytes wanted.
        crc: the CRC-32C of the preceding bytes.
        look_ms: time after which it returns the bytes received so far if it would have to wait for more.
    Returns:
        bytes written, the checksum of `crc`'s bytes followed by these, whether the other side has closed, error numbers of socket
            and file (0: none).
    """
    cdef uint8_t room[ROOM]
    cdef int64_t done = 0, have
    cdef Way way
    way.socket, way.file, way.crc, way.until_ms = socket, file, crc, _now_ms() + look_ms
    way.is_over = way.is_late = False
    way.socket_error = way.file_error = 0
    with nogil:
        while done < nbytes and not (way.is_over or way.is_late or way.socket_error or way.file_error):
            # write whole pages of the file: a page that is begun twice is looked up twice
            have = _gather(&way, room, min(<int64_t>ROOM - (offset + done) % ROOM, nbytes - done))
            done += _put(&way, room, have, offset + done)
    return done, way.crc, way.is_over, way.socket_error, way.file_error
