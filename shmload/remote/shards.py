"""Which shards a dataset is made of: by its manifest, by listing a folder, or by their names.

It is looked up once, where the dataset is made, and goes with it to every worker: so all of them read the same shards, whatever
happens in the store meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shmload.errors import ObjectMissing, ShardCorrupt
from shmload.formats.tar.braces import shard_paths
from shmload.remote.manifest import MANIFEST_NAME, IndexEntry, Manifest
from shmload.storage.store import Store
from shmload.storage.urls import split_url

__all__ = ["RemoteShard", "Shards", "shards_in", "shards_of_urls"]

_AT_ONCE = 16  # heads under way
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """One shard in a store.

    Attributes:
        key: in the store.
        nbytes, etag: of the object; the etag is "" where a manifest stands for it.
        num_samples, crc32c, index: as the manifest says; None: there is none.
    """

    store: Store
    key: str
    nbytes: int
    etag: str
    num_samples: int | None = None
    crc32c: str | None = None
    index: IndexEntry | None = None

    @property
    def url(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"

    @property
    def version(self) -> str:
        """What another content would have another of."""
        return self.etag or f"crc32c-{self.crc32c}"


@dataclass(frozen=True)
class Shards:
    """The shards of a dataset, in their order.

    Attributes:
        generation: of the manifest; None: there is none.
        home: the store that the manifest is in.
    """

    all: tuple[RemoteShard, ...]
    generation: str | None = None
    home: Store | None = None

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.all)

    @property
    def largest(self) -> int:
        """Bytes of the largest shard."""
        return max(shard.nbytes for shard in self.all)

    def gone(self, shard: RemoteShard, error: Exception) -> Exception:
        """The error for a shard that is not there, or not the same any more: what has happened, as far as can be told."""
        if self.home is not None:
            try:
                now = Manifest.parse(self.home.get(MANIFEST_NAME), name=f"{self.home.url}/{MANIFEST_NAME}").generation
            except (ObjectMissing, ShardCorrupt):
                now = "none"
            if now != self.generation:
                return ShardCorrupt(
                    f"{shard.url}: the dataset was packed anew while it was read: this is of generation {self.generation}, and "
                    f"{self.home.url} holds {now} by now. Make the dataset anew; a state of the old one does not fit the new one"
                )
        return ShardCorrupt(f"{shard.url}: was removed or written to since the dataset was made: {error}. Make it anew")


def shards_in(store: Store) -> Shards:
    """The shards of a folder: those of its manifest, or, without one, all .tar files in it.

    Raises:
        ObjectMissing: there is none.
        ShardCorrupt: its manifest is damaged.
    """
    try:
        data = store.get(MANIFEST_NAME)
    except ObjectMissing:
        return Shards(tuple(_listed(store)))
    manifest = Manifest.parse(data, name=f"{store.url}/{MANIFEST_NAME}")
    if not manifest.shards:
        raise ObjectMissing(f"{store.url}: its manifest names no shard: pack at least one sample")
    found = tuple(
        RemoteShard(store, entry.name, entry.nbytes, "", entry.num_samples, entry.crc32c, entry.index)
        for entry in manifest.shards
    )
    return Shards(found, manifest.generation, store)


def _listed(store: Store) -> Iterable[RemoteShard]:
    num_others, compressed = 0, ""
    found = []
    for entry in store.list_objects():
        if entry.key.endswith(".tar"):
            found.append(RemoteShard(store, entry.key, entry.nbytes, entry.etag))
        else:
            num_others += 1
            compressed = compressed or (entry.key if entry.key.endswith(_COMPRESSED) else "")
    if compressed:
        raise ValueError(
            f"{store.url}/{compressed} is compressed, and its samples cannot be reached one by one: store plain .tar files"
        )
    if not found:
        raise ObjectMissing(
            f"{store.url}: holds no shards, neither {MANIFEST_NAME} nor .tar files, only {num_others} other objects: check "
            "bucket and folder, or pack a dataset into it with upload_cv_dataset or `shmload pack`"
        )
    return found


def shards_of_urls(urls: str | Iterable[str], open_store: Callable[[str], Store]) -> Shards:
    """The shards that URLs name: .tar objects, in which braces expand, or one folder.

    Args:
        open_store: (URL of a folder) -> the store.
    Raises:
        ObjectMissing: one is not there.
        ValueError: a folder stands among others; a compressed shard.
    """
    names = shard_paths(urls)
    folders = [name for name in names if not name.endswith((".tar", *_COMPRESSED))]
    if folders and len(names) > 1:
        raise ValueError(
            f"{folders[0]!r} is no .tar object, and a folder stands alone: give its URL, or those of shards"
        )
    if folders:
        return shards_in(open_store(names[0]))
    for name in names:
        if name.endswith(_COMPRESSED):
            raise ValueError(
                f"{name} is compressed, and its samples cannot be reached one by one: store plain .tar files, or read it in order "
                "with shmload.formats.TarStream"
            )
    places = [split_url(name) for name in names]
    stores = {parent: open_store(parent) for parent, _ in places}
    return Shards(tuple(_looked_up([(stores[parent], key) for parent, key in places])))


def _looked_up(places: Sequence[tuple[Store, str]]) -> list[RemoteShard]:
    def look(place: tuple[Store, str]) -> RemoteShard:
        store, key = place
        found = store.head(key)
        return RemoteShard(store, key, found.nbytes, found.etag)

    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "shmload-head") as pool:
        return list(pool.map(look, places))
