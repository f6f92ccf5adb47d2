"""Where bytes of an object go as they come: into memory, or into a file.

A file is not written through a mapping: each page would be made by a fault, cleared, and only then filled. Measured (ext4), CPU per
MiB: 0.63 ms through a new mapping, 0.22 by pwrite out of a buffer that stays in the processor's cache, where the checksum finds it,
too. A full disk is an error then, no SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

from shmload._core.crc32c import crc32c
from shmload.errors import StoreError
from shmload.storage.transport import Answer

__all__ = ["FilePart", "Memory", "Target", "joined_crc32c"]

_BUFFER_NBYTES = (
    64 << 10
)  # more makes larger pages, out of memory that virtual machines give back to their hosts when free
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its highest power in the lowest bit


class Target(Protocol):
    """A place for a range of an object.

    Attributes:
        nbytes: of the range.
        done: how many of them are in place.
    """

    nbytes: int
    done: int

    def receive(self, answer: Answer) -> Iterator[None]:
        """Takes what an answer brings, from `done` on; stops at each look to see whether it is still wanted."""


class Memory:
    """A range that goes into memory."""

    def __init__(self, out: memoryview) -> None:
        self._out = out
        self.nbytes = len(out)
        self.done = 0

    def receive(self, answer: Answer) -> Iterator[None]:
        begin = self.done
        for got in answer.reading(self._out[begin:]):
            self.done = begin + got
            yield


class FilePart:
    """A range that goes into a file.

    Args:
        fd: open for writing.
        offset: where the range begins in the file.
        nbytes: of the range.
    Attributes:
        crc32c: of what is in place.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd, self._offset = fd, offset
        self.nbytes = nbytes
        self.done = 0
        self.crc32c = 0
        self._room = memoryview(bytearray(min(nbytes, _BUFFER_NBYTES)))

    def receive(self, answer: Answer) -> Iterator[None]:
        try:
            if answer.is_plain():
                yield from self._by_reading(answer, answer.num_read_ahead())
                yield from self._straight(answer, self.nbytes - self.done - 1)
            yield from self._by_reading(answer, self.nbytes - self.done)  # the client itself sees the body's end
        except OSError as error:
            raise StoreError(
                f"a copy of {self.nbytes:,} bytes cannot be written: {error.strerror}. Give the cache a folder on a disk with "
                "more room, or fewer bytes"
            ) from error

    def _straight(self, answer: Answer, nbytes: int) -> Iterator[None]:
        begin = self.done
        for done, crc in answer.to_file(self._fd, self._offset + begin, nbytes, self.crc32c):
            self.done, self.crc32c = begin + done, crc
            yield

    def _by_reading(self, answer: Answer, nbytes: int) -> Iterator[None]:
        end = min(self.done + nbytes, self.nbytes)
        got = -1
        while got and self.done < end:
            got = 0
            try:
                for got in answer.reading(self._room[: end - self.done]):  # noqa: B007  # kept when it breaks off
                    pass
            finally:
                self._write(self._room[:got])
            yield

    def _write(self, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._offset + self.done + written)
        self.crc32c = crc32c(data, self.crc32c)
        self.done += len(data)


def joined_crc32c(parts: list[tuple[int, int]]) -> int:
    """The checksum of bytes of which parts were checked apart.

    Args:
        parts: (checksum, bytes) of each, in order.
    Source: M. Adler, zlib, crc32_combine: to append n bytes is to multiply by x^(8n), modulo the polynomial.
    """
    crc = 0
    for part, nbytes in parts:
        crc = _times(_power_of_x(8 * nbytes), crc) ^ part
    return crc


def _power_of_x(exponent: int) -> int:
    found, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            found = _times(square, found)
        square = _times(square, square)
        exponent >>= 1
    return found


def _times(one: int, other: int) -> int:
    """The product of two polynomials, modulo that of the checksum."""
    found, bit = 0, 1 << 31
    while bit:
        if one & bit:
            found ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return found
