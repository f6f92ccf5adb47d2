"""The index of a tar shard: where the members of its samples are.

The index is built by reading every header once. It is saved next to the shard as `<shard>.index`, so that later processes only map
it:

    magic | shard's size, modification time | counts | CRC-32 of the rest
    payload offsets, payload sizes, first member of each sample, ends of keys: uint64 | extension of each member: uint16
    extensions, each terminated by NUL | concatenated keys

The file is written under a temporary name and renamed. If that is not possible (a read-only folder), the index stays in memory. An
index that is damaged, or whose shard has changed, is rebuilt. All of it is validated, because its values become memory addresses.

A file may be replaced by one of the same size and time (`cp -p`, archives without times, two writes within a tick of the clock).
So a few of the headers are also compared with the shard: two whenever an index is loaded, and more when the shard is mapped.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.mapped_file import MappedFile
from shmload._core.tar import FILE, TarHeaders, TarScan, split_name
from shmload.errors import ShardCorrupt
from shmload.formats.atomic_write import write_if_possible
from shmload.formats.compression import MAGIC_NBYTES, compression_of

SUFFIX = ".index"
KEY = "__key__"  # the field of a sample that has its key
_HEADER = struct.Struct("<8s6QI4x")
_MAGIC = b"SHMTAR\x00\x01"
BLOCK = 512  # bytes of a header; payloads are padded to a multiple of it
META_LIMIT = 1 << 20  # greatest size of a long name or PAX header
NUM_COMPARED_ON_LOAD, NUM_COMPARED_ON_MAP = 2, 16  # headers; each may be a read from the disk


class ShardIndex:
    """The positions of the members in a shard. Its arrays are views of `packed`, which must have been validated.

    Attributes:
        offsets, sizes, member_extensions: one value per member: offset and size of the payload in bytes, number of the extension.
        first: number of the first member of each sample, and the number of members; shape `(samples + 1,)`.
        extensions: extensions in lower case; `member_extensions` are indices into this list.
        nbytes, mtime_ns: size and modification time of the shard.
    """

    def __init__(self, path: str, packed: Any) -> None:
        self.path = path
        _, self.nbytes, self.mtime_ns, num_samples, num_members, extensions_nbytes, keys_nbytes, _ = _HEADER.unpack_from(packed)
        self.num_samples = num_samples
        at = _HEADER.size

        def take(dtype: str, count: int) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(packed, dtype, count, at)
            at += array.nbytes
            return array

        self.offsets, self.sizes = take("<u8", num_members), take("<u8", num_members)
        self.first, self._key_ends = take("<u8", num_samples + 1), take("<u8", num_samples)
        self.member_extensions = take("<u2", num_members)
        extensions = take("u1", extensions_nbytes).tobytes()
        self.extensions = [e.decode("utf-8", "surrogateescape") for e in extensions.split(b"\0")[:-1]]
        self._keys = take("u1", keys_nbytes)

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        begin = int(self._key_ends[sample - 1]) if sample else 0
        return self._keys[begin : int(self._key_ends[sample])].tobytes().decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """Return (extension, offset of the payload, size of the payload) of each member of a sample."""
        return [
            (self.extensions[self.member_extensions[m]], int(self.offsets[m]), int(self.sizes[m]))
            for m in range(int(self.first[sample]), int(self.first[sample + 1]))
        ]

    def fits(self, shard: Any, num_compared: int) -> bool:
        """Return whether members, evenly spread, have their headers where the index says.

        The name and the size are not compared if there may be an extension header, which would have others.

        Args:
            shard: bytes of the shard.
            num_compared: maximum number of members.
        """
        count = len(self.sizes)
        for member in sorted({round(m) for m in np.linspace(0, count - 1, min(count, num_compared)).tolist()}):
            at = int(self.offsets[member]) - BLOCK
            before = int(self.offsets[member - 1] + self.sizes[member - 1]) if member else 0
            headers = TarHeaders()
            if at < 0 or headers.read_header(bytes(shard[at : at + BLOCK])) != FILE:
                return False
            if at == -(-before // BLOCK) * BLOCK:
                sample = int(np.searchsorted(self.first, member, "right")) - 1
                key, extension = self.key(sample), self.extensions[self.member_extensions[member]]
                name = tuple(part.encode("utf-8", "surrogateescape") for part in (key, extension))
                if headers.size != self.sizes[member] or split_name(headers.name) != name:
                    return False
        return True

    def is_sound(self) -> bool:
        """Return whether all positions are inside the shard and inside the index."""
        first, ends, sizes = self.first, self._key_ends, self.sizes
        return bool(
            first[0] == 0
            and first[-1] == len(sizes)
            and np.all(first[1:] >= first[:-1])
            and np.all(ends[1:] >= ends[:-1])
            and (not len(ends) or ends[-1] == len(self._keys))
            and np.all(sizes <= self.nbytes)
            and np.all(self.offsets <= self.nbytes - sizes)
            and (not len(sizes) or self.member_extensions.max() < len(self.extensions))
        )


def map_file(path: str) -> tuple[memoryview, int]:
    """Map a file read-only, without a descriptor that stays open. Return its bytes, and its modification time in nanoseconds."""
    file = MappedFile(os.fsencode(path))
    return memoryview(file), file.state[3]


def changed(index: ShardIndex) -> ShardCorrupt:
    """Return the error for a shard that has changed since it was indexed."""
    return ShardCorrupt(f"{index.path}: was changed since it was indexed, with {index.nbytes} bytes: create the dataset again")


def load_index(path: str, *, cache: bool = True) -> ShardIndex:
    """Load the saved index of a local shard if it is valid and up to date; otherwise build it, and save it if possible.

    Args:
        path: path of the shard.
        cache: use and save indexes next to the shard; if False, the index is always built.
    Raises:
        ShardCorrupt: the shard is not a valid tar file; names offset and cause.
        ValueError: the shard is compressed.
    """
    if cache and (found := _kept(path)) is not None:
        return found
    data, mtime_ns = map_file(path)
    if compression_of(bytes(data[:MAGIC_NBYTES])):
        raise ValueError(
            f"{path} is compressed, and its samples cannot be reached one by one: decompress it once, or read it in order with "
            "shmload.formats.TarStream"
        )
    packed = pack_index(path, data, mtime_ns=mtime_ns)
    if cache and not _has_its_own(path, len(data)):
        write_if_possible(path + SUFFIX, packed)
    return ShardIndex(path, packed)


def pack_index(path: str, data: Buffer, *, mtime_ns: int = 0) -> bytes:
    """Build the index of a shard, in its saved form.

    Args:
        path: path of the shard, for errors.
        data: the shard's bytes; only headers are read.
        mtime_ns: modification time of the shard; 0 for an index that is distributed with the shard.
    Raises:
        ShardCorrupt: the shard is not a valid tar file; names offset and cause.
    """
    scan = TarScan(data)
    if scan.cause:
        raise ShardCorrupt(f"{path}: at byte {scan.offset}: {scan.cause}")
    extensions = b"".join(extension + b"\0" for extension in scan.extensions)
    arrays = (scan.offsets, scan.sizes, scan.first, scan.key_ends, scan.member_extensions)
    body = b"".join((*arrays, extensions, scan.keys))
    counts = (scan.num_samples, scan.num_members, len(extensions), len(scan.keys))
    return _HEADER.pack(_MAGIC, memoryview(data).nbytes, mtime_ns, *counts, zlib.crc32(body)) + body


def _has_its_own(path: str, nbytes: int) -> bool:
    """Return whether the index next to a shard was made by `shmload pack`. The manifest has its checksum, so it is not replaced."""
    try:
        found = unpack_index(path, map_file(path + SUFFIX)[0], nbytes)
    except OSError:
        return False
    return found is not None and found.mtime_ns == 0


def _kept(path: str) -> ShardIndex | None:
    """Return the index next to the shard if it is valid and up to date, else None."""
    try:
        packed, _ = map_file(path + SUFFIX)
        shard, mtime_ns = map_file(path)
    except OSError:
        return None
    found = unpack_index(path, packed, len(shard))
    is_current = found is not None and found.mtime_ns == mtime_ns and found.fits(shard, NUM_COMPARED_ON_LOAD)
    return found if is_current else None


def unpack_index(path: str, packed: Any, nbytes: int) -> ShardIndex | None:
    """Return the index of a shard of `nbytes` bytes from its saved form; None if it is invalid.

    Args:
        path: path of the shard, for errors.
        packed: the saved index; the result refers to these bytes.
        nbytes: size of the shard.
    """
    if len(packed) < _HEADER.size:
        return None
    magic, its_nbytes, _, num_samples, num_members, extensions_nbytes, keys_nbytes, crc = _HEADER.unpack_from(packed)
    needed = _HEADER.size + 18 * num_members + 16 * num_samples + 8 + extensions_nbytes + keys_nbytes
    if (magic, its_nbytes, needed) != (_MAGIC, nbytes, len(packed)):
        return None
    if zlib.crc32(memoryview(packed)[_HEADER.size :]) != crc:
        return None
    found = ShardIndex(path, packed)
    return found if found.is_sound() else None
