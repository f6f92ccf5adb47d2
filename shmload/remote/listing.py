"""Find the shards of a dataset: `shards_of_urls`, which the readers call.

A manifest, an index.json, the listing of a folder or a list of URLs names the objects. Without a manifest, the store is asked for
the size and version of each object (`_looked_up`; a listing has them), and compressed shards for their decompressed size
(`_all_sized`; an index.json has it).

This is done once, when the dataset is created. The list is then passed to every worker, so that all of them read the same shards,
even if the store changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import cast

from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.braces import shard_paths
from shmload.formats.compression import split_compression
from shmload.formats.file_names import is_hidden
from shmload.formats.format import ShardFormat
from shmload.formats.head import head_of_object
from shmload.formats.index_json import INDEX_NAME, ListedShard
from shmload.formats.known_formats import is_shard_format, layout_named, layout_of, named_by_index, recognize
from shmload.formats.plain_files import PlainFiles
from shmload.formats.tar.tar_format import Tar
from shmload.remote.fetch import SIDECAR, compression_at, expanded, index_beside
from shmload.remote.folder_objects import log_ignored, objects_by_format
from shmload.remote.layouts import Parquet
from shmload.remote.manifest import MANIFEST_NAME, Manifest, ShardEntry
from shmload.remote.packing.generation import CLAIM, unfinished
from shmload.remote.shards import TAR, RemoteShard, Shards, ShardTable
from shmload.storage.http_store import HttpStore
from shmload.storage.keys import checked_key
from shmload.storage.store import Store, StoredObject
from shmload.storage.store_urls import split_query, split_url

__all__ = ["shards_in", "shards_of", "shards_of_urls"]

_AT_ONCE = 16  # headers requested in parallel


def shards_in(store: Store, layout: str | ShardFormat | None = None, generation: str | None = None) -> Shards:
    """Return the shards of a folder: from its manifest, from another loader's index.json, or all objects of one format.

    Args:
        store: the folder.
        layout: the format; None detects it from names and index.
        generation: the newest generation to include, for a dataset that was appended to (manifest.py); None includes all.
    Raises:
        ObjectMissing: there are no shards.
        ShardCorrupt: the manifest is damaged.
        ValueError: the folder contains several formats, and tar is not among them.
    """
    try:
        data = store.get(MANIFEST_NAME)
    except ObjectMissing:
        if generation is not None:
            raise
        return _foreign(store, layout)
    manifest = Manifest.parse(data, name=f"{store.url}/{MANIFEST_NAME}")
    if generation is None:
        return shards_of(store, manifest)
    return replace(shards_of(store, manifest.at(generation)), is_earlier=True)


def shards_of(store: Store, manifest: Manifest) -> Shards:
    """Return the shards that a manifest lists; `store` is the folder that contains it.

    Raises:
        ObjectMissing: it names no shard.
    """
    if not manifest.shards:
        raise ObjectMissing(f"{store.url}: its manifest names no shard: pack at least one sample")
    table = ShardTable(_of_entry(store, entry) for entry in manifest.shards)
    return Shards(table, manifest.generation, store, manifest.key)


def _of_entry(store: Store, entry: ShardEntry) -> RemoteShard:
    found = RemoteShard(store, entry.name, entry.nbytes, "", entry.num_samples, entry.crc32c, entry.index)
    return found if entry.packed is None else replace(found, compression="zst", compressed_nbytes=entry.packed.nbytes)


def _foreign(store: Store, layout: str | ShardFormat | None) -> Shards:
    """Return the shards of a folder without a manifest: those of its index.json, or the objects of one format."""
    asked = None if layout is None else layout_named(layout)
    try:
        listed = list(store.list_objects())
    except StoreError as error:  # a web server
        try:
            return _named_by_index(store, asked)
        except ObjectMissing:
            raise error from None
    names = {entry.key for entry in listed}
    if CLAIM in names:
        raise ObjectMissing(f"{store.url}: is not a dataset yet: {unfinished(store)}")
    if INDEX_NAME in names and not isinstance(asked, (Tar, PlainFiles)):
        return _named_by_index(store, asked)
    groups = objects_by_format(listed, asked)
    if not groups:
        num_hidden = sum(is_hidden(entry.key) for entry in listed)
        hidden = f", of which {num_hidden} are ignored because a name in their path begins with . or _" if num_hidden else ""
        if not listed:
            raise ObjectMissing(f"{store.url}: there is no such folder, or it is empty: check the bucket and folder")
        raise ObjectMissing(
            f"{store.url}: contains no shards, neither {MANIFEST_NAME} nor files of a known format, only {len(listed)} other "
            f"objects{hidden}: check the bucket and folder, pass layout=, or pack a dataset into it with "
            "upload_cv_dataset or `shmload pack`"
        )
    if len(groups) > 1:
        found = ", ".join(f"{len(entries)} of {name}" for name, entries in sorted(groups.items()))
        choices = " or ".join(f"layout={name!r}" for name in sorted(groups))
        raise ValueError(f"{store.url} contains {found}: choose the dataset with {choices}, or by a pattern of names")
    log_ignored(store.url, listed, next(iter(groups.values())))
    ((_, entries),) = groups.items()
    kind = asked or layout_of(split_compression(entries[0].key)[0]) or TAR
    if isinstance(kind, Parquet):
        kind = kind.in_folder(store.url, [entry.key for entry in entries])
    return _all_sized([_of_object(store, entry, has_index=entry.key + SIDECAR in names) for entry in entries], kind)


def _all_sized(there: list[RemoteShard], format: ShardFormat) -> Shards:
    """Return the shards with their format and, if they are compressed, their decompressed size.

    If the first shard is compressed although its name does not indicate that, as TensorFlow writes TFRecord files, the first bytes
    of each shard are read. Files named .tar are never compressed, so this request is saved for them.
    """
    is_whole = isinstance(format, PlainFiles) or not there
    name, compression = ("", "") if is_whole else split_compression(there[0].key)
    may_be_unnamed = not is_whole and not compression and not isinstance(layout_of(name), Tar)
    is_unnamed = may_be_unnamed and bool(compression_at(there[0], format))
    is_compressed = is_unnamed or (not is_whole and any(split_compression(shard.key)[1] for shard in there))
    with ThreadPoolExecutor(_AT_ONCE, "shmload-expand") as pool:  # starts threads only when they are used
        sized = partial(_sized, format=format, is_unnamed=is_unnamed)
        return Shards(tuple((pool.map if is_compressed else map)(sized, there)))


def _sized(shard: RemoteShard, format: ShardFormat, is_unnamed: bool) -> RemoteShard:
    """Return a shard with its format. If it is compressed and has no index, its decompressed size is determined once."""
    compression = "" if isinstance(format, PlainFiles) else split_compression(shard.key)[1]
    if is_unnamed and not compression:
        compression = compression_at(shard, format)
    one = 1 if isinstance(format, PlainFiles) else None
    shard = replace(shard, format=format, compression=compression, compressed_nbytes=shard.nbytes, num_samples=one)
    if not compression:
        return shard
    kept = index_beside(shard)
    return replace(shard, nbytes=sum(map(len, expanded(shard))) if kept is None else kept[0], has_index=kept is not None)


def _named_by_index(store: Store, asked: ShardFormat | None) -> Shards:
    """Return the shards that an index.json of MosaicML Streaming or LitData lists."""
    where = f"{store.url}/{INDEX_NAME}"
    index = named_by_index(bytes(store.get(INDEX_NAME)), asked, where)
    if not index.shards:
        raise ObjectMissing(f"{where}: names no shard")

    def sized(there: RemoteShard, shard: ListedShard) -> RemoteShard:
        if not shard.compression and there.nbytes != shard.nbytes:
            raise ShardCorrupt(
                f"{there.url}: has {there.nbytes} bytes, and {INDEX_NAME} says {shard.nbytes}: one of them is of another version"
            )
        return replace(
            there,
            nbytes=shard.nbytes,
            num_samples=shard.num_samples,
            format=index.layout,
            compression=shard.compression,
            compressed_nbytes=there.nbytes,
        )

    there = _looked_up([(store, checked_key(shard.key, where)) for shard in index.shards])
    return Shards(tuple(map(sized, there, index.shards)))


def shards_of_urls(
    urls: str | Iterable[str],
    open_store: Callable[[str], Store],
    layout: str | ShardFormat | None = None,
    generation: str | None = None,
) -> Shards:
    """Return the shards that URLs name: objects of one format, with braces expanded, or one folder.

    Args:
        urls: one or several URLs.
        open_store: (URL of a folder) -> the store.
        layout: format of the objects; None detects it from their names, without the part after a "?".
        generation: as for `shards_in`, if the URL is a folder.
    Raises:
        ObjectMissing: an object does not exist.
        ValueError: a folder is given together with other URLs, or the shards have several formats.
    """
    given = [split_query(name) for name in shard_paths(urls)]
    names = [name for name, _ in given]
    asked = None if layout is None else layout_named(layout)
    kinds = {name: layout_of(split_compression(name)[0]) for name in names}
    folders = [name for name, kind in kinds.items() if kind is None]
    if folders and len(names) > 1 and asked is None:
        raise ValueError(
            f"{folders[0]!r} is not a shard of a known format, and a folder must be the only URL: pass the folder alone, or "
            "the URLs of shards"
        )
    if folders and len(names) == 1 and not (given[0][1] and asked is not None):
        if given[0][1]:
            raise ValueError(
                f"{names[0]} is not a shard of a known format, and the URL of a folder has no query: pass layout=, or the URLs "
                "of the shards"
            )
        try:
            return shards_in(open_store(names[0]), layout, generation)
        except StoreError:
            if generation is not None or (single := _single_object(names[0], open_store)) is None:
                raise
            asked = asked or _recognized(names[0], single)
    if generation is not None:
        raise ValueError(f"generation={generation!r} needs the URL of a packed folder, and no other URL; got {names[0]!r}")
    if asked is None and len(found := {kind.name for kind in kinds.values() if kind is not None}) > 1:
        raise ValueError(f"all shards of a dataset must have one format; these have {', '.join(sorted(found))}")
    kind = asked or kinds[names[0]] or TAR
    stores: dict[str, Store] = {}
    return _all_sized(_looked_up([_place(name, query, open_store, stores) for name, query in given]), kind)


def _place(url: str, query: str, open_store: Callable[[str], Store], stores: dict[str, Store]) -> tuple[Store, str]:
    """Return the store and the key of an object. `stores` has the stores that are open, by URL."""
    parent, key = split_url(url)
    if parent not in stores:
        stores[parent] = open_store(parent)
    store = stores[parent]
    if isinstance(store, HttpStore):
        store.add_object(key, url.rpartition("/")[2], query)
    return store, key


def _looked_up(places: Sequence[tuple[Store, str]]) -> list[RemoteShard]:
    """Return the objects under keys, with the size and version that the store states.

    Raises:
        ObjectMissing: an object does not exist.
    """

    def look(place: tuple[Store, str]) -> RemoteShard:
        return _of_object(place[0], place[0].head(place[1]))

    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "shmload-head") as pool:
        return list(pool.map(look, places))


def _of_object(store: Store, found: StoredObject, has_index: bool = False) -> RemoteShard:
    return RemoteShard(store, found.key, found.nbytes, found.etag, has_index=has_index)


def _single_object(url: str, open_store: Callable[[str], Store]) -> RemoteShard | None:
    """Return the object that a URL names, or None if it names none."""
    try:
        return _looked_up([_place(url, "", open_store, {})])[0]
    except StoreError:
        return None


def _recognized(url: str, shard: RemoteShard) -> ShardFormat:
    """Return the format of an object whose name does not indicate it, from its first bytes.

    Args:
        url: its URL, for errors.
        shard: the object.
    Raises:
        ValueError: the bytes do not indicate it, either.
    """
    kind = recognize(head_of_object(shard.key, shard.nbytes, shard.read)) if shard.nbytes else None
    if shard.key == MANIFEST_NAME:
        raise ValueError(f"{url}: is the manifest of a dataset: give the URL of its folder")
    if kind is None or not is_shard_format(kind):
        what = (
            "has no format that its first bytes identify"
            if kind is None
            else f"is {kind.title}, which is read from local files only"
        )
        raise ValueError(f'{url}: {what}: pass layout=, such as layout="tfrecord", or give the URL of a folder')
    return layout_named(cast(ShardFormat, kind))
