"""Shards for tests: plain ones as other programs write them, packed ones with a manifest, and stores that inject faults or count
calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Buffer

from shmload._core.crc32c import crc32c
from shmload.errors import StoreError
from shmload.formats import TarWriter
from shmload.formats.tar.shard_index import pack_index
from shmload.remote import RemoteDataset
from shmload.remote.listing import shards_in
from shmload.remote.manifest import MANIFEST_NAME, IndexEntry, Manifest, ShardEntry
from shmload.remote.shards import Shards
from shmload.storage.local_store import LocalStore
from shmload.storage.store import Store, StoredObject

NBYTES = 20480  # of a shard with five of these samples


def sample(number: int, nbytes: int = 32) -> dict[str, Any]:
    """Returns a sample that contains its number."""
    return {"__key__": f"k{number:05d}", "npy": np.full(nbytes // 4, number, np.float32), "cls": number}


def write_plain(folder: Path, counts: Sequence[int], nbytes: int = 32) -> int:
    """Writes plain shards with these numbers of samples, without a manifest; returns the total number of samples."""
    number = 0
    for shard, count in enumerate(counts):
        with TarWriter(folder / f"part-{shard:06d}.tar") as writer:
            for _ in range(count):
                writer.write(sample(number, nbytes))
                number += 1
    return number


def write_packed(folder: Path, counts: Sequence[int], generation: str = "0" * 16, nbytes: int = 32) -> Manifest:
    """Writes packed shards with a manifest that replaces an existing one; old shards remain."""
    (folder / generation).mkdir(parents=True)
    shards, number = [], 0
    for shard, count in enumerate(counts):
        name = f"{generation}/shard-{shard:06d}.tar"
        with TarWriter(folder / name) as writer:
            for _ in range(count):
                writer.write(sample(number, nbytes))
                number += 1
        data = (folder / name).read_bytes()
        index = pack_index(name, data)
        (folder / f"{name}.index").write_bytes(index)
        entry = IndexEntry(f"{name}.index", len(index), f"{crc32c(index):08x}")
        shards.append(ShardEntry(name, len(data), count, f"{crc32c(data):08x}", entry))
    manifest = Manifest(generation, 0, number, sum(s.nbytes for s in shards), ("cls", "npy"), tuple(shards))
    (folder / MANIFEST_NAME).write_bytes(manifest.dump())
    return manifest


def uploaded(server: Any, files: Path) -> tuple[str, str]:
    """Uploads a folder's files to a new bucket; returns the bucket and the folder in it."""
    bucket, folder = server.bucket("reading"), os.urandom(6).hex()
    upload(server.store(bucket, folder), files)
    return bucket, folder


def upload(store: Store, files: Path) -> None:
    """Uploads a folder's files to a store."""
    for path in sorted(files.rglob("*")):
        if path.is_file():
            store.put_file(str(path.relative_to(files)), path)


def label(item: Any) -> int:
    """Returns a sample's number from its bytes or value."""
    return int(item["cls"])


def labels(dataset: Iterable[Any]) -> list[int]:
    """Returns the numbers of all samples, decoded or not, that a pass yields."""
    return [label(item) for item in dataset]


def batch_labels(loader: Iterable[Any]) -> list[list[int]]:
    """Returns the numbers in each batch of tuples (array, number)."""
    return [np.asarray(batch[1]).tolist() for batch in loader]


def concatenated(lists: Iterable[list[int]]) -> list[int]:
    """Returns the numbers of all lists in one list."""
    return [number for part in lists for number in part]


@dataclass
class WatchedStore:
    """A folder's store that records its calls and can inject faults.


    Attributes:
        asked: the calls as (method, key), in order.
        harm: called with method and key before each call; may raise.
        spoil: called with the key and the bytes that were read; returns the bytes to deliver instead.
    """

    inner: LocalStore
    asked: list[tuple[str, str]] = field(default_factory=list)
    harm: Callable[[str, str], None] = lambda method, key: None
    spoil: Callable[[str, memoryview], None] = lambda key, out: None

    @property
    def url(self) -> str:
        return self.inner.url

    def _note(self, method: str, key: str) -> None:
        self.asked.append((method, key))
        self.harm(method, key)

    def head(self, key: str) -> StoredObject:
        self._note("head", key)
        return self.inner.head(key)

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        self._note("get", key)
        data = bytearray(self.inner.get(key, etag=etag))
        self.spoil(key, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        is_whole = memoryview(out).nbytes == self.inner.head(key).nbytes
        self._note("read_into" if is_whole else "range", key)
        self.inner.read_into(key, out, offset=offset, etag=etag)
        self.spoil(key, memoryview(out).cast("B"))

    def put(self, key: str, data: Buffer) -> StoredObject:
        raise StoreError("this store is only read")

    def put_file(self, key: str, path: Path) -> StoredObject:
        raise StoreError("this store is only read")

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return self.inner.list_objects(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        raise StoreError("this store is only read")

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _ in self.asked)


@dataclass(frozen=True)
class CountedStore(LocalStore):
    """A folder's store that counts, in a file, the bytes that all processes read of its shards."""

    log: Path = Path("/dev/null")

    def _read(self, key: str, nbytes: int) -> None:
        if key.endswith(".tar"):
            with open(self.log, "a") as file:
                file.write(f"{nbytes}\n")

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        self._read(key, memoryview(out).nbytes)
        super().read_into(key, out, offset=offset, etag=etag)

    def num_read(self) -> int:
        """Returns the number of bytes read so far."""
        return sum(map(int, self.log.read_text().split()))


def dataset_of(shards: Shards, **options: Any) -> RemoteDataset:
    """Returns a dataset of shards that have been looked up already, e.g. in a store of the test's."""
    return RemoteDataset(None, shards, **{"cache_bytes": 1 << 30, **options})


def watched(folder: Path, **options: Any) -> tuple[RemoteDataset, WatchedStore]:
    """Returns a dataset over a folder, and the store it reads from."""
    store = WatchedStore(LocalStore(folder))
    return dataset_of(shards_in(store), **options), store
