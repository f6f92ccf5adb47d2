"""Fetching: the bytes of a shard, all of them or one sample's, checked; and its index.

The index of a shard that lies in a store and that nobody has indexed: its headers are read through ranges.

A file's worth of address space stands for the shard. What is read is put where it belongs, and the scan of a whole shard goes over
it: the same checks, the same index. Pieces of a few MiB are read while members are small, for those hold many headers; what a large
member holds is passed over and takes no memory, as nobody looks at it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from typing_extensions import Buffer

from shmload._core import tar
from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.tar.shard import ShardIndex, map_file, pack_index, unpack_index
from shmload.remote.shards import RemoteShard, Shards
from shmload.storage.cache import Fetch, FileFetch
from shmload.storage.http import WebReader

__all__ = [
    "fetch_index",
    "fetch_of",
    "fetch_range",
    "name_of",
    "scan_remote",
]

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


def name_of(shard: RemoteShard) -> str:
    """What a copy of the shard is called here: another one for another content."""
    return sha256(f"{shard.url}\0{shard.version}\0{shard.nbytes}".encode()).hexdigest()[:40]


def fetch_of(shards: Shards, shard: RemoteShard) -> Fetch | FileFetch:
    """How a cache gets a shard's bytes: by ranges in parallel; once more if their checksum is another than the manifest's.

    What it raises:
        ShardCorrupt: the shard is not what it was when the dataset was made, or what the manifest says.
        StoreError: the store does not answer, or the disk is full.
    """
    store = shard.store
    if isinstance(store, WebReader):

        def write(fd: int) -> None:
            _checked(shards, shard, lambda: store.read_to_file(shard.key, fd, shard.nbytes, etag=shard.etag or None))

        return FileFetch(write)

    def fill(out: memoryview) -> None:
        def read() -> int:
            store.read_into(shard.key, out, etag=shard.etag or None)
            return 0 if shard.crc32c is None else crc32c(out)

        _checked(shards, shard, read)

    return fill


def _checked(shards: Shards, shard: RemoteShard, read: Callable[[], int]) -> None:
    """Reads a shard, and once more if the checksum that comes out is another than the manifest's."""
    found = []
    for _ in range(2):
        try:
            crc = f"{read():08x}"
        except StoreError as error:
            raise _explained(shards, shard, error) from error
        if shard.crc32c in (None, crc):
            return
        found.append(crc)
    raise ShardCorrupt(
        f"{shard.url}: its checksum is {' and then '.join(found)}, and the manifest says {shard.crc32c}: the object is damaged, or "
        "was replaced. Upload the dataset again"
    )


def fetch_range(shards: Shards, shard: RemoteShard, offset: int, nbytes: int) -> Buffer:
    """Some of a shard's bytes.

    Raises:
        ShardCorrupt: it is not what it was when the dataset was made.
        StoreError: the store does not answer.
    """
    try:
        return shard.store.get_ranges(shard.key, [(offset, nbytes)], etag=shard.etag or None)[0]
    except StoreError as error:
        raise _explained(shards, shard, error) from error


def fetch_index(shards: Shards, shard: RemoteShard, folder: str, copy: Any) -> ShardIndex:
    """Where a shard's samples lie: as kept in the folder, else as the store or the shard itself says, and kept then.

    Args:
        copy: the shard's bytes, if they are here; None: its headers are read through ranges.
    Raises:
        ShardCorrupt: the shard is no sound tar file, or its index not what the manifest says.
    """
    path = f"{folder}/{name_of(shard)}.index"
    try:
        found = unpack_index(shard.url, map_file(path)[0], shard.nbytes)
    except OSError:
        found = None
    if found is not None:
        return found
    packed = _made(shards, shard, copy)
    found = unpack_index(shard.url, packed, shard.nbytes)
    if found is None or shard.num_samples not in (None, found.num_samples):
        told = "nothing sound" if found is None else f"{found.num_samples} samples"
        raise ShardCorrupt(
            f"{shard.url}: its index says {told}, and the manifest {shard.num_samples} samples in {shard.nbytes} bytes: upload the "
            "dataset again"
        )
    with contextlib.suppress(FileNotFoundError):  # the folder's owner, another process, has ended it
        fd, temporary = tempfile.mkstemp(prefix=".", dir=folder)
        with open(fd, "wb") as file:
            file.write(packed)
        os.replace(temporary, path)
    return found


def _explained(shards: Shards, shard: RemoteShard, error: StoreError) -> Exception:
    """What to raise for a store's error: itself, unless the shard is gone or another one by now."""
    if isinstance(error, ObjectMissing):
        return shards.gone(shard, error)
    try:
        now = shard.store.head(shard.key)
    except ObjectMissing:
        return shards.gone(shard, error)
    except StoreError:
        return error
    is_same = now.nbytes == shard.nbytes and (not shard.etag or now.etag == shard.etag)
    return error if is_same else shards.gone(shard, error)


def _made(shards: Shards, shard: RemoteShard, copy: Any) -> bytes:
    entry = shard.index
    if entry is None:
        if copy is not None:
            return pack_index(shard.url, copy)
        return scan_remote(shard.url, shard.nbytes, lambda at, nbytes: fetch_range(shards, shard, at, nbytes))
    found = None
    for _ in range(2):
        try:
            packed = bytes(shard.store.get(entry.name))
        except ObjectMissing as error:
            raise shards.gone(shard, error) from error
        found = (len(packed), f"{crc32c(packed):08x}")
        if found == (entry.nbytes, entry.crc32c):
            return packed
    raise ShardCorrupt(
        f"{shard.store.url}/{entry.name}: it has {found} as bytes and checksum, and the manifest says "
        f"{(entry.nbytes, entry.crc32c)}: the object is damaged, or was replaced. Upload the dataset again"
    )
