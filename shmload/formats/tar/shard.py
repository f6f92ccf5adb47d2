"""One tar shard: its index and its bytes.

The index is made by reading every header once, and is kept beside the shard as `<shard>.index`, so that the next process maps it:

    magic | shard's bytes, time of change | counts | CRC-32 of the rest
    payload offsets, payload sizes, first member of each sample, ends of keys: uint64 | extension of each member: uint16
    extensions, ended by NUL | keys end to end

It is written under another name and moved into place. Where that is not possible (a read-only folder) it stays in memory. An
index whose shard has changed since, or that is damaged, is made anew: nothing in it is believed unchecked, since what it says
becomes addresses.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.mapped_file import MappedFile
from shmload._core.tar import TarScan
from shmload.errors import ShardCorrupt

SUFFIX = ".index"
_HEADER = struct.Struct("<8s6QI4x")
_MAGIC = b"SHMTAR\x00\x01"
# by what the file begins with
COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


class ShardIndex:
    """Where the members of a shard lie.

    Attributes:
        offsets, sizes, member_extensions: of each member; `first`: of each sample, and one for the end.
        extensions: in lower case; `member_extensions` counts them.
        nbytes, mtime_ns: of the shard.
    """

    def __init__(self, path: str, packed: Any) -> None:
        self.path = path
        _, self.nbytes, self.mtime_ns, num_samples, num_members, extensions_nbytes, keys_nbytes, _ = (
            _HEADER.unpack_from(packed)
        )
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
        """A sample's key."""
        begin = int(self._key_ends[sample - 1]) if sample else 0
        return self._keys[begin : int(self._key_ends[sample])].tobytes().decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """(extension, offset, size) of a sample's members."""
        return [
            (self.extensions[self.member_extensions[m]], int(self.offsets[m]), int(self.sizes[m]))
            for m in range(int(self.first[sample]), int(self.first[sample + 1]))
        ]

    def is_sound(self) -> bool:
        """Whether all that it says lies inside the shard and inside itself."""
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


def map_file(path: str) -> tuple[mmap.mmap | bytes, os.stat_result]:
    """A file's bytes, mapped read-only, and what the file was then."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
    return data, status


def map_shard(index: ShardIndex) -> MappedFile:
    """The shard's bytes.

    Raises:
        ShardCorrupt: it was written to since it was indexed.
    """
    file = MappedFile(os.fsencode(index.path))
    _, _, nbytes, mtime_ns = file.state
    if (nbytes, mtime_ns) != (index.nbytes, index.mtime_ns):
        raise changed(index)
    return file


def changed(index: ShardIndex) -> ShardCorrupt:
    """The error for a shard that is not what its index says any more."""
    return ShardCorrupt(
        f"{index.path}: was changed since it was indexed, with {index.nbytes} bytes: make the dataset anew"
    )


def load_index(path: str, *, cache: bool = True) -> ShardIndex:
    """The index of a shard: the one beside it if that is of this shard as it is now, else a new one, kept there if possible.

    Raises:
        ShardCorrupt: the shard is no sound tar file; names offset and cause.
        ValueError: it is compressed.
    """
    if cache and (found := _kept(path)) is not None:
        return found
    packed = _scan(path)
    if cache:
        _keep(path, packed)
    return ShardIndex(path, packed)


def _scan(path: str) -> bytes:
    data, status = map_file(path)
    if any(bytes(data[:6]).startswith(magic) for magic in COMPRESSED):
        raise ValueError(
            f"{path} is compressed, and its samples cannot be reached one by one: decompress it once, or read it in order with "
            "shmload.formats.TarStream"
        )
    return pack_index(path, data, mtime_ns=status.st_mtime_ns)


def pack_index(path: str, data: Buffer, *, mtime_ns: int = 0) -> bytes:
    """The index of a shard's bytes, as it is kept beside the shard.

    Args:
        path: of the shard, for errors.
        data: its bytes; only headers are looked at.
        mtime_ns: when it was last changed; 0 in an index that goes with the shard to other machines.
    Raises:
        ShardCorrupt: it is no sound tar file; names offset and cause.
    """
    scan = TarScan(data)
    if scan.cause:
        raise ShardCorrupt(f"{path}: at byte {scan.offset}: {scan.cause}")
    extensions = b"".join(extension + b"\0" for extension in scan.extensions)
    arrays = (scan.offsets, scan.sizes, scan.first, scan.key_ends, scan.member_extensions)
    body = b"".join((*arrays, extensions, scan.keys))
    counts = (scan.num_samples, scan.num_members, len(extensions), len(scan.keys))
    return _HEADER.pack(_MAGIC, memoryview(data).nbytes, mtime_ns, *counts, zlib.crc32(body)) + body


def _kept(path: str) -> ShardIndex | None:
    """The index beside the shard, if it can be believed."""
    try:
        packed, _ = map_file(path + SUFFIX)
        status = os.stat(path)
    except OSError:
        return None
    found = unpack_index(path, packed, status.st_size)
    return found if found is not None and found.mtime_ns == status.st_mtime_ns else None


def unpack_index(path: str, packed: Any, nbytes: int) -> ShardIndex | None:
    """An index that was packed for a shard of so many bytes, if it can be believed.

    Args:
        path: of the shard, for errors.
        packed: the bytes, which stay in use.
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


def _keep(path: str, packed: bytes) -> None:
    folder, name = os.path.split(path + SUFFIX)
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder or ".")
    except OSError:
        return
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(packed)
        os.replace(temporary, path + SUFFIX)
    except OSError:
        os.unlink(temporary)
