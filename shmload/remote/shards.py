"""The shards of a dataset in a store, whether a manifest, an index or a listing names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ObjectMissing, ShardCorrupt
from shmload.formats.format import ShardFormat
from shmload.formats.tar.tar_format import Tar
from shmload.remote.field_columns import FieldColumns
from shmload.remote.manifest import MANIFEST_NAME, IndexEntry, Manifest
from shmload.storage.store import Store

__all__ = ["TAR", "RemoteShard", "ShardTable", "Shards"]

TAR = Tar()


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """One shard in a store, whether or not a manifest lists it.

    Attributes:
        store: the store.
        key: key of the object in the store.
        nbytes: size of the object, uncompressed.
        etag: ETag of the object; "" if the manifest identifies it.
        num_samples, crc32c, index: from the manifest; None without one.
        format: the format of its samples.
        compression: its compression, or "" if it is not compressed.
        compressed_nbytes: size of the stored object if it is compressed.
        has_index: whether there is an index next to it, made by `shmload index`.
    """

    store: Store
    key: str
    nbytes: int
    etag: str
    num_samples: int | None = None
    crc32c: str | None = None
    index: IndexEntry | None = None
    format: ShardFormat = TAR
    compression: str = ""
    compressed_nbytes: int = 0
    has_index: bool = False

    @property
    def url(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"

    @property
    def stored_nbytes(self) -> int:
        """Return the size of the object in the store."""
        return self.compressed_nbytes if self.compression else self.nbytes

    @property
    def version(self) -> str:
        """Return a value that changes with the contents of the shard."""
        return self.etag or f"crc32c-{self.crc32c}"

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of the stored object's bytes. A compressed shard is not decompressed.

        Raises:
            StoreError: the store does not answer, or the object has changed.
        """
        out = np.empty(nbytes, np.uint8).data
        if nbytes:
            self.store.read_into(self.key, out, offset=offset, etag=self.etag or None)
        return out


class ShardTable(Sequence[RemoteShard]):
    """Shards stored as columns. A million take 100 MB, which forked workers share; as objects they took 900 MB in each process.

    Args:
        shards: at least one.
    """

    def __init__(self, shards: Iterable[RemoteShard]) -> None:
        self._columns = FieldColumns(RemoteShard, shards)
        self._begin()

    def _begin(self) -> None:
        self._recent: dict[int, RemoteShard] = {}

    def __len__(self) -> int:
        return self._columns.size

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        found = self._recent.get(number)
        if found is None:
            if not -len(self) <= number < len(self):
                raise IndexError(number)
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            found = self._recent[number] = self._columns.row(number % len(self))
        return found

    def values(self, name: str) -> list[Any]:
        """Return one attribute of each shard."""
        return list(map(self._columns.of[name], range(len(self))))

    def __getstate__(self) -> Any:
        return self._columns

    def __setstate__(self, columns: Any) -> None:
        self._columns = columns
        self._begin()


_RECENT = 1024  # shards that are cached as objects


@dataclass(frozen=True)
class Shards:
    """The shards of a dataset, in order.

    Attributes:
        all: the shards.
        generation: generation in the manifest; None without a manifest.
        home: the store that contains the manifest.
        key: fingerprint of the encryption key, from the manifest.
        is_earlier: the shards end with a requested generation, even if newer ones exist.
    """

    all: Sequence[RemoteShard]
    generation: str | None = None
    home: Store | None = None
    key: str = ""
    is_earlier: bool = False

    def values(self, name: str) -> list[Any]:
        """Return one attribute of each shard."""
        return self.all.values(name) if isinstance(self.all, ShardTable) else [getattr(shard, name) for shard in self.all]

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each shard in bytes."""
        return np.array(self.values("nbytes"), np.int64)

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def largest(self) -> int:
        """Return the size of the largest shard in bytes."""
        return int(self.sizes.max())

    def too_large(self, nbytes: int) -> RemoteShard | None:
        """Return a compressed shard that is larger than `nbytes` uncompressed, or None."""
        large = np.flatnonzero(self.sizes > nbytes)
        return next((self.all[number] for number in large.tolist() if self.all[number].compression), None)

    def gone(self, shard: RemoteShard, error: Exception) -> Exception:
        """Return the error to raise for a shard that is missing or has changed. Reads the manifest to determine the cause.

        Args:
            shard: the shard.
            error: the store's error.
        """
        if self.home is not None:
            try:
                now = Manifest.parse(self.home.get(MANIFEST_NAME), name=f"{self.home.url}/{MANIFEST_NAME}").generation
            except (ObjectMissing, ShardCorrupt):
                now = "none"
            if now != self.generation:
                return ShardCorrupt(
                    f"{shard.url}: the dataset was packed again while it was read: this is of generation {self.generation}, but "
                    f"{self.home.url} now contains {now}. Create the dataset again; a state of the old one does not fit the new one"
                )
        return ShardCorrupt(f"{shard.url}: was removed or written to since the dataset was created: {error}. Create it again")
