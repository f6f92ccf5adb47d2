"""Fetch and verify the bytes of a shard, all of them or a range, and fetch or build its index."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from typing_extensions import Buffer

from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, ShmloadError, StoreError
from shmload.formats.atomic_write import write_if_possible
from shmload.formats.compression import compression_of, expanded_pieces
from shmload.formats.format import ShardFormat
from shmload.formats.index_json import INDEX_NAME
from shmload.formats.tar.shard_index import map_file
from shmload.formats.tfrecord.record_file import compression_of_records
from shmload.remote.manifest import MANIFEST_NAME
from shmload.remote.shards import RemoteShard, Shards
from shmload.storage.cache import Fetch
from shmload.storage.web_reader import WebReader

__all__ = [
    "SIDECAR",
    "compression_at",
    "expanded",
    "fetch_index",
    "fetch_of",
    "fetch_range",
    "index_beside",
    "name_of",
    "pack_beside",
]

SIDECAR = ".shmload-index"  # suffix of the index next to a shard
_SIDECAR_MAGIC = b"SHMLOAD INDEX BESIDE 1\n"
_AHEAD = 8 << 20  # bytes per request for an object that is decompressed while it is read


def name_of(shard: RemoteShard) -> str:
    """Return the name under which the shard's index is kept locally. It depends on the shard's version."""
    return sha256(f"{shard.url}\0{shard.version}\0{shard.nbytes}".encode()).hexdigest()[:40]


def fetch_of(shards: Shards, shard: RemoteShard) -> Fetch:
    """Return a function that fetches a shard for the cache: parallel range requests, repeated once if the checksum is wrong.

    The function raises:
        ShardCorrupt: the shard has changed since the dataset was created, or does not match the manifest.
        StoreError: the store does not answer, or the disk is full.
    """

    def read(fd: int) -> int:
        if shard.compression:
            return _expand_to(shard, fd)
        if isinstance(shard.store, WebReader):
            return shard.store.read_to_file(shard.key, fd, shard.nbytes, etag=shard.etag or None)
        if not shard.nbytes:
            return 0
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as own:  # without the lock of `fd`, which a forked child would keep
            out = mmap.mmap(own.fileno(), shard.nbytes)  # unmapped with its last view, which the traceback of an error may hold
        shard.store.read_into(shard.key, out, etag=shard.etag or None)
        return 0 if shard.crc32c is None else crc32c(out)

    def fetch(fd: int) -> None:
        found = []
        for _ in range(2):
            try:
                crc = f"{read(fd):08x}"
            except StoreError as error:
                raise _explained(shards, shard, error) from error
            if shard.crc32c in (None, crc):
                return
            found.append(crc)
        raise ShardCorrupt(
            f"{shard.url}: its checksum is {' and then '.join(found)}, but the manifest says {shard.crc32c}: the object is "
            "damaged, or was replaced. Pack the dataset again in the same way: this repairs damaged shards"
        )

    return fetch


class _Sequential:
    """A file that reads an object in order, by range requests."""

    def __init__(self, shard: RemoteShard) -> None:
        self._shard, self._at, self._data = shard, 0, memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        if not len(self._data):
            nbytes = min(_AHEAD, self._shard.stored_nbytes - self._at)
            self._data = self._shard.read(self._at, nbytes)
            self._at += nbytes
        taken = self._data if size < 0 else self._data[:size]
        self._data = self._data[len(taken) :]
        return bytes(taken)


def expanded(shard: RemoteShard) -> Iterator[bytes]:
    """Yield the decompressed bytes of a shard, in pieces.

    Raises:
        ShardCorrupt: it is damaged or truncated.
        StoreError: the store does not answer.
    """
    try:
        yield from expanded_pieces(shard.compression, _Sequential(shard))
    except ShmloadError:
        raise
    except ValueError as error:
        raise ShardCorrupt(f"{shard.url}: {error}") from error


def _expand_to(shard: RemoteShard, fd: int) -> int:
    at = crc = 0
    for piece in expanded(shard):
        if at + len(piece) > shard.nbytes:
            at += len(piece)
            break
        if os.pwrite(fd, piece, at) < len(piece):
            raise StoreError(f"{shard.url}: the disk of the cache is full")
        at += len(piece)
        if shard.crc32c is not None:
            crc = crc32c(piece, crc)
    if at != shard.nbytes:
        than = "more than" if at > shard.nbytes else f"{at} and not"
        raise ShardCorrupt(f"{shard.url}: expands to {than} the {shard.nbytes} bytes that its index says")
    return crc


_BEGIN_NBYTES = 12  # bytes at the beginning of a shard that indicate its compression
_COMPRESSED = ("tar", "tfrecord", "jsonl", "npy")  # formats that other tools compress as a whole


def compression_at(shard: RemoteShard, format: ShardFormat) -> str:
    """Return the compression of a shard from its first bytes: as for `split_compression`, or "zlib", or ""."""
    if format.name not in _COMPRESSED or not shard.stored_nbytes:
        return ""
    begin = bytes(shard.read(0, min(_BEGIN_NBYTES, shard.stored_nbytes)))
    if format.name == "tfrecord" and (kind := compression_of_records(begin)) is not None:
        return {"gzip": "gz", "zlib": "zlib", "none": ""}[kind]
    return compression_of(begin)


def fetch_range(shards: Shards, shard: RemoteShard, offset: int, nbytes: int) -> Buffer:
    """Return a range of a shard's bytes, from the store. For a compressed shard, all of it is fetched and decompressed.

    Args:
        shards: the dataset that contains the shard.
        shard: the shard.
        offset: offset of the range, after decompression.
        nbytes: size of the range.
    Raises:
        ShardCorrupt: it has changed since the dataset was created.
        StoreError: the store does not answer.
    """
    try:
        if shard.compression:
            return b"".join(expanded(shard))[offset : offset + nbytes]
        return shard.read(offset, nbytes).toreadonly()
    except StoreError as error:
        raise _explained(shards, shard, error) from error


def fetch_index(shards: Shards, shard: RemoteShard, folder: str, copy: Any) -> Any:
    """Return the index of a shard: the one saved in the folder, else from the store or the shard itself, and save it.

    Args:
        shards: the dataset that contains the shard.
        shard: the shard.
        folder: folder for saved indexes.
        copy: the shard's bytes, if there is a local copy; None reads its headers by range requests.
    Raises:
        ShardCorrupt: the shard does not match its format, or its index does not match the manifest.
    """
    if (known := shard.format.known(shard.url, shard.nbytes)) is not None:
        return known
    path = f"{folder}/{name_of(shard)}.index"
    with contextlib.suppress(OSError):
        if (kept := shard.format.unpack(shard.url, map_file(path)[0], shard.nbytes)) is not None:
            return kept
    packed = _made(shards, shard, copy)
    found = shard.format.unpack(shard.url, packed, shard.nbytes)
    if found is None or shard.num_samples not in (None, found.num_samples):
        says = "cannot be read" if found is None else f"says {found.num_samples} samples"
        named = MANIFEST_NAME if shard.index else INDEX_NAME
        raise ShardCorrupt(
            f"{shard.url}: its index {says}, but {named} says {shard.num_samples} samples in {shard.nbytes} bytes: upload the "
            "dataset again"
        )
    write_if_possible(path, packed)  # optional: the folder's owner, another process, may have removed it
    return found


def _explained(shards: Shards, shard: RemoteShard, error: StoreError) -> Exception:
    """Return the error to raise for a store's error: the same error, or ShardCorrupt if the shard was removed or replaced."""
    if isinstance(error, ObjectMissing):
        return shards.gone(shard, error)
    try:
        now = shard.store.head(shard.key)
    except ObjectMissing:
        return shards.gone(shard, error)
    except StoreError:
        return error
    is_same = now.nbytes == shard.stored_nbytes and (not shard.etag or now.etag == shard.etag)
    return error if is_same else shards.gone(shard, error)


def _made(shards: Shards, shard: RemoteShard, copy: Any) -> bytes:
    entry = shard.index
    if entry is None:
        if shard.has_index and (kept := index_beside(shard)) is not None and kept[0] == shard.nbytes:
            return kept[1]
        if copy is None and shard.compression:
            copy = fetch_range(shards, shard, 0, shard.nbytes)
        try:
            if copy is not None:
                return shard.format.pack(shard.url, copy)
            return shard.format.scan(shard.url, shard.nbytes, lambda at, nbytes: fetch_range(shards, shard, at, nbytes))
        except ShardCorrupt as error:
            if not shard.compression and (compression := compression_at(shard, shard.format)):
                raise ShardCorrupt(
                    f"{shard.url}: is compressed ({compression}), which its name does not show: end the names of compressed shards "
                    f"in .{compression}, or read them as a dataset of their own"
                ) from error
            raise
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
        f"{shard.store.url}/{entry.name}: it has {found} as size and checksum, but the manifest says "
        f"{(entry.nbytes, entry.crc32c)}: the object is damaged, or was replaced. Pack the dataset again in the same "
        "way: this repairs damaged shards"
    )


def index_beside(shard: RemoteShard) -> tuple[int, bytes] | None:
    """Return (decompressed size of the shard, packed index) from the index next to it; None if there is none of this version."""
    try:
        text = bytes(shard.store.get(shard.key + SIDECAR))
    except ObjectMissing:
        return None
    head, _, packed = text.removeprefix(_SIDECAR_MAGIC).partition(b"\n")
    try:
        said = json.loads(head)
        expected = {**_identity(shard), "nbytes": said["nbytes"], "crc32c": crc32c(packed)}
        is_whole = text.startswith(_SIDECAR_MAGIC) and type(said["nbytes"]) is int and said["nbytes"] >= 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (said["nbytes"], packed) if is_whole and said == expected else None


def pack_beside(shards: Shards, shard: RemoteShard) -> tuple[bytes, int]:
    """Return a shard's index in the form that is stored next to it, and the shard's number of samples.

    Raises:
        ShardCorrupt: the shard does not match its format.
    """
    packed = _made(shards, shard, None)
    head = json.dumps({**_identity(shard), "nbytes": shard.nbytes, "crc32c": crc32c(packed)}).encode()
    found: Any = shard.format.unpack(shard.url, packed, shard.nbytes)
    return _SIDECAR_MAGIC + head + b"\n" + packed, found.num_samples


def _identity(shard: RemoteShard) -> dict[str, Any]:
    return {"layout": shard.format.name, "version": shard.version, "stored_nbytes": shard.stored_nbytes}
