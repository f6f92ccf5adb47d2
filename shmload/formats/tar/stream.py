"""TarStream: read the samples of tar shards in order. Shards may be compressed. Samples and errors are as for TarDataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from torch.utils.data import IterableDataset, get_worker_info

from shmload._core import tar
from shmload.errors import ShardCorrupt
from shmload.formats.braces import shard_paths
from shmload.formats.compression import MAGIC_NBYTES, compression_of, expanded_file
from shmload.formats.paths import Paths
from shmload.formats.tar.decoders import Decode, Decoders
from shmload.formats.tar.shard_index import BLOCK, KEY, META_LIMIT
from shmload.processes.ranks import OwnRank

_ENDINGS = (".tar", ".tgz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "zstd")))
_PIECE = 1 << 20  # bytes per read, so that a false size in a header allocates no more than the file has


class TarStream(IterableDataset[dict[str, Any]]):
    """An IterableDataset of the samples of tar shards, in order; the shards may be compressed with gzip, bzip2, xz or zstd.

    Each worker of each rank reads whole shards, so the number of shards should be a multiple of the total number of workers.

    Args:
        shards: paths, with braces expanded. A folder means its tar files, compressed or not, sorted by name.
        decode, allow_pickle: as for TarDataset.
        rank, world_size: determine which part of the shards to read; by default from torch.distributed or the environment.
    Raises:
        FileNotFoundError: a folder has no shard, or a shard does not exist (on reading).
        ShardCorrupt: (on reading) a shard is not a valid tar file, or its compressed data is damaged.
    """

    def __init__(
        self,
        shards: Paths,
        *,
        decode: Decode = True,
        allow_pickle: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.paths = shard_paths(shards, reader="TarStream", endings=_ENDINGS)
        self._decoders = Decoders(decode, allow_pickle=allow_pickle)
        self._world = OwnRank(rank, world_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world_size = self._world()
        mine = self.paths[rank::world_size]
        worker = get_worker_info()
        for path in mine if worker is None else mine[worker.id :: worker.num_workers]:
            yield from self._samples(path)

    def _samples(self, path: str) -> Iterator[dict[str, Any]]:
        sample: dict[str, Any] = {}
        for key, extension, offset, data in _members(path):
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            sample.setdefault(KEY, key)
            if extension in sample:
                raise ShardCorrupt(f"{path}: at byte {offset}: sample {key!r} has two members of extension {extension!r}")
            decoder = self._decoders.of(extension)
            try:
                sample[extension] = data if decoder is None else decoder(data)
            except (ImportError, MemoryError):  # the member is not the cause
                raise
            except Exception as error:  # raised by a library or the user's decoder
                raise ShardCorrupt(f"{path}: field {extension!r} of sample {key!r} at byte {offset}: {error}") from error
        if sample:
            yield sample


def _members(path: str) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield (key, extension, offset of the header, payload) of every member that belongs to a sample."""
    headers = tar.TarHeaders()
    with open(path, "rb") as raw:
        compression = compression_of(raw.read(MAGIC_NBYTES))
        raw.seek(0)
        file = expanded_file(compression, raw) if compression else raw
        at = 0
        while (kind := headers.read_header(_exactly(file, BLOCK, path, at))) != tar.END:
            if kind < 0:
                raise ShardCorrupt(f"{path}: at byte {at}: {headers.cause}")
            size = headers.size
            if kind not in (tar.FILE, tar.OTHER) and size > META_LIMIT:
                raise ShardCorrupt(f"{path}: at byte {at}: a name of {size} bytes; at most {META_LIMIT} are read")
            payload = _exactly(file, -(-size // BLOCK) * BLOCK, path, at, keep=kind != tar.OTHER)[:size]
            if kind == tar.FILE:
                if (split := tar.split_name(headers.name)) is not None:
                    key, extension = (part.decode("utf-8", "surrogateescape") for part in split)
                    yield key, extension, at, payload
            elif kind != tar.OTHER and not headers.read_payload(kind, payload):
                raise ShardCorrupt(f"{path}: at byte {at}: {headers.cause}")
            at += BLOCK + -(-size // BLOCK) * BLOCK
        while rest := _read(file, _PIECE, path, at):
            if rest.strip(b"\0"):
                raise ShardCorrupt(f"{path}: at byte {at}: there is data after the end marker")


def _read(file: IO[bytes], nbytes: int, path: str, at: int) -> bytes:
    try:
        return file.read(nbytes)
    except (OSError, ValueError) as error:
        raise ShardCorrupt(f"{path}: at byte {at} of what it expands to: {error}") from error


def _exactly(file: IO[bytes], nbytes: int, path: str, at: int, *, keep: bool = True) -> bytes:
    pieces = []
    while nbytes:
        piece = _read(file, min(nbytes, _PIECE), path, at)
        if not piece:
            raise ShardCorrupt(f"{path}: at byte {at}: the file ends within a member or without the end marker: it is truncated")
        nbytes -= len(piece)
        if keep:
            pieces.append(piece)
    return b"".join(pieces)
