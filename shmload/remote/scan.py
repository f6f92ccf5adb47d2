"""The index of a shard that lies in a store and that nobody has indexed: its headers are read through ranges.

A file's worth of address space stands for the shard. What is read is put where it belongs, and the scan of a whole shard goes over
it: the same checks, the same index. Pieces of a few MiB are read while members are small, for those hold many headers; what a large
member holds is passed over and takes no memory, as nobody looks at it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from typing_extensions import Buffer

from shmload._core import tar
from shmload.errors import ShardCorrupt
from shmload.formats.tar.shard import pack_index

__all__ = ["scan_remote"]

_BLOCK = 512
_PIECE = 4 << 20  # bytes a request: as long as two of them take no longer than passing over would
_META_LIMIT = 1 << 20  # bytes of a long name or PAX header


def scan_remote(url: str, nbytes: int, read: Callable[[int, int], Buffer]) -> bytes:
    """The packed index of a shard.

    Args:
        url: for errors.
        nbytes: of the shard.
        read: (offset, nbytes) -> the bytes there.
    Raises:
        ShardCorrupt: it is no sound tar file; names offset and cause.
    """
    if nbytes < _BLOCK:
        raise ShardCorrupt(f"{url}: at byte 0: a tar file has at least one block of {_BLOCK} bytes, this has {nbytes}")
    shard = mmap.mmap(-1, nbytes)
    headers = tar.TarHeaders()
    have, at = range(0), 0  # the piece that is there: all before it has been passed

    def need(offset: int, size: int) -> bytes:
        """Bytes of the shard; fewer than asked for where it ends."""
        nonlocal have
        end = min(offset + size, nbytes)
        while not (offset in have and end <= have.stop) and offset < end:
            begin = have.stop if offset in have else offset
            stop = min(max(end, begin + _PIECE), nbytes)
            shard[begin:stop] = bytes(read(begin, stop - begin))
            have = range(have.start if begin == have.stop else begin, stop)
        return shard[offset:end]

    while at + _BLOCK <= nbytes:
        kind = headers.read_header(need(at, _BLOCK))
        if kind < 0:
            break  # the scan says what is wrong with it
        at += _BLOCK
        if kind == tar.END:
            need(at, nbytes - at)  # nothing but zeros, which the scan sees to
            break
        if kind not in (tar.FILE, tar.OTHER):
            if headers.size > _META_LIMIT:
                raise ShardCorrupt(
                    f"{url}: at byte {at}: a name of {headers.size} bytes; at most {_META_LIMIT} are read"
                )
            if not headers.read_payload(kind, need(at, headers.size)):
                break
        at += -(-headers.size // _BLOCK) * _BLOCK
    return pack_index(url, shard)
