"""Find the shards of a dataset: by its manifest, by listing a folder, or by their URLs.

This is done once, when the dataset is created. The list is then passed to every worker, so that all of them read the same shards,
even if the store changes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from typing_extensions import Buffer

from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.braces import shard_paths
from shmload.formats.compression import packing_of
from shmload.formats.file_names import is_about, is_hidden
from shmload.formats.format import ShardFormat
from shmload.formats.head import head_of_object
from shmload.formats.index_json import INDEX_NAME, ListedShard
from shmload.formats.known_formats import is_shard_format, layout_named, layout_of, named_by_index, recognize
from shmload.formats.plain_files import PlainFiles
from shmload.formats.tar.tar_format import Tar
from shmload.formats.tfrecord.record_file import FOREIGN_SUFFIXES
from shmload.remote.fetch import SIDECAR, expanded, fetch_index, index_beside, pack_beside, packing_at
from shmload.remote.layouts import Parquet
from shmload.remote.manifest import MANIFEST_NAME, Manifest, ShardEntry
from shmload.remote.packing.generation import CLAIM, unfinished
from shmload.remote.shards import TAR, RemoteShard, Shards, ShardTable
from shmload.storage.http_store import HttpStore
from shmload.storage.keys import checked_key
from shmload.storage.store import Store, StoredObject
from shmload.storage.store_urls import split_query, split_url

__all__ = ["indexes_beside", "indexes_kept", "shards_in", "shards_of", "shards_of_urls"]

log = logging.getLogger("shmload")

_AT_ONCE = 16  # headers requested in parallel


def shards_in(store: Store, layout: str | ShardFormat | None = None, generation: str | None = None) -> Shards:
    """Return the shards of a folder: from its manifest, from another loader's index.json, or all objects of one layout.

    Args:
        store: the folder.
        layout: the layout; None detects it from names and index.
        generation: the newest generation to include, for a dataset that was appended to (manifest.py); None includes all.
    Raises:
        ObjectMissing: there are no shards.
        ShardCorrupt: the manifest is damaged.
        ValueError: the folder contains several layouts.
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
    return found if entry.packed is None else replace(found, packing="zst", packed_nbytes=entry.packed.nbytes)


def _foreign(store: Store, layout: str | ShardFormat | None) -> Shards:
    """Return the shards of a folder without a manifest: those of its index.json, or the objects of one layout."""
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
    groups = _groups(listed, asked)
    if not groups:
        num_hidden = sum(is_hidden(entry.key) for entry in listed)
        hidden = f", of which {num_hidden} are ignored because a name in their path begins with . or _" if num_hidden else ""
        raise ObjectMissing(
            f"{store.url}: contains no shards, neither {MANIFEST_NAME} nor files of a known layout, only {len(listed)} other "
            f"objects{hidden}: check the bucket and folder, pass layout=, or pack a dataset into it with "
            "upload_cv_dataset or `shmload pack`"
        )
    if len(groups) > 1:
        found = ", ".join(f"{len(entries)} of {name}" for name, entries in sorted(groups.items()))
        raise ValueError(f"{store.url} contains {found}: choose the dataset with layout={next(iter(groups))!r} or another")
    _tell_ignored(store.url, listed, next(iter(groups.values())))
    ((_, entries),) = groups.items()
    kind = asked or layout_of(packing_of(entries[0].key)[0]) or TAR
    if isinstance(kind, Parquet):
        kind = kind.in_folder(store.url, [entry.key for entry in entries])
    there = [RemoteShard(store, e.key, e.nbytes, e.etag, has_index=e.key + SIDECAR in names) for e in entries]
    return _all_sized(there, kind)


def _groups(listed: list[StoredObject], asked: ShardFormat | None) -> dict[str, list[StoredObject]]:
    """Return the objects that may be a folder's shards, by layout; a single layout if the other objects are clearly not shards.

    Hidden objects are never shards. If a layout is requested, the shards are the objects whose names have its endings. If there are
    none, they are the objects whose names indicate no format, without those that describe a dataset. If no layout is requested,
    pictures and JSON next to tar files are ignored, and so are pictures next to any other shards, which usually belong to a page
    about them.
    """
    entries = [entry for entry in listed if not is_hidden(entry.key) and not entry.key.endswith(SIDECAR)]
    if isinstance(asked, PlainFiles):
        return {asked.name: entries} if entries else {}
    groups: dict[str, list[StoredObject]] = {}
    for entry in entries:
        kind = layout_of(packing_of(entry.key)[0])
        is_beside = kind is None and (is_about(entry.key) or entry.key.endswith(FOREIGN_SUFFIXES))
        if not is_beside and (kind is not None or asked is not None):
            groups.setdefault("" if kind is None else kind.name, []).append(entry)
    if asked is not None:
        entries = groups.get(asked.name) or groups.get("", [])
        return {asked.name: entries} if entries else {}
    if "tar" in groups:
        return {"tar": groups["tar"]}
    if len(groups) == 2 and PlainFiles.name in groups:
        (other,) = groups.keys() - {PlainFiles.name}
        if not all(_ABOUT_PICTURES.match(entry.key.rpartition("/")[2]) for entry in groups[other]):
            return {other: groups[other]}
    return groups


_ABOUT_PICTURES = re.compile(r"metadata\.")  # `datasets` stores captions and labels here; the pictures next to them are the samples


def _tell_ignored(url: str, listed: list[StoredObject], taken: list[StoredObject]) -> None:
    """Log the objects of a folder that are ignored."""
    if log.isEnabledFor(logging.DEBUG):
        keys = {entry.key for entry in taken}
        if others := [entry.key for entry in listed if entry.key not in keys]:
            log.debug("%s: %d objects are no shards and are ignored: %s", url, len(others), ", ".join(others[:5]))


def _all_sized(there: list[RemoteShard], layout: ShardFormat) -> Shards:
    """Return the shards with their layout and, if they are compressed, their decompressed size.

    If the first shard is compressed although its name does not indicate that, as TensorFlow writes TFRecord files, the first bytes
    of each shard are read. Files named .tar are never compressed, so this request is saved for them.
    """
    is_whole = isinstance(layout, PlainFiles) or not there
    name, packing = ("", "") if is_whole else packing_of(there[0].key)
    may_be_unnamed = not is_whole and not packing and not isinstance(layout_of(name), Tar)
    is_unnamed = may_be_unnamed and bool(packing_at(there[0], layout))
    is_compressed = is_unnamed or (not is_whole and any(packing_of(shard.key)[1] for shard in there))
    with ThreadPoolExecutor(_AT_ONCE, "shmload-expand") as pool:  # starts threads only when they are used
        sized = partial(_sized, layout=layout, is_unnamed=is_unnamed)
        return Shards(tuple((pool.map if is_compressed else map)(sized, there)))


def _sized(shard: RemoteShard, layout: ShardFormat, is_unnamed: bool) -> RemoteShard:
    """Return a shard with its layout. If it is compressed and has no index, its decompressed size is determined once."""
    packing = "" if isinstance(layout, PlainFiles) else packing_of(shard.key)[1]
    if is_unnamed and not packing:
        packing = packing_at(shard, layout)
    one = 1 if isinstance(layout, PlainFiles) else None
    shard = replace(shard, layout=layout, packing=packing, packed_nbytes=shard.nbytes, num_samples=one)
    if not packing:
        return shard
    kept = index_beside(shard)
    return replace(shard, nbytes=sum(map(len, expanded(shard))) if kept is None else kept[0], has_index=kept is not None)


def _named_by_index(store: Store, asked: ShardFormat | None) -> Shards:
    """Return the shards that an index.json of MosaicML Streaming or LitData lists."""
    where = f"{store.url}/{INDEX_NAME}"
    index = named_by_index(bytes(store.get(INDEX_NAME)), asked, where)
    if not index.shards:
        raise ObjectMissing(f"{where}: names no shard")

    def look(shard: ListedShard) -> RemoteShard:
        key, nbytes = shard.key, shard.nbytes
        found = store.head(checked_key(key, where))
        if not shard.packing and found.nbytes != nbytes:
            raise ShardCorrupt(
                f"{store.url}/{key}: has {found.nbytes} bytes, and {INDEX_NAME} says {nbytes}: one of them is of another version"
            )
        return RemoteShard(
            store,
            key,
            nbytes,
            found.etag,
            shard.num_samples,
            layout=index.layout,
            packing=shard.packing,
            packed_nbytes=found.nbytes,
        )

    with ThreadPoolExecutor(min(len(index.shards), _AT_ONCE), "shmload-head") as pool:
        return Shards(tuple(pool.map(look, index.shards)))


def shards_of_urls(
    urls: str | Iterable[str],
    open_store: Callable[[str], Store],
    layout: str | ShardFormat | None = None,
    generation: str | None = None,
) -> Shards:
    """Return the shards that URLs name: objects of one layout, with braces expanded, or one folder.

    Args:
        urls: one or several URLs.
        open_store: (URL of a folder) -> the store.
        layout: layout of the objects; None detects it from their names, without the part after a "?".
        generation: as for `shards_in`, if the URL is a folder.
    Raises:
        ObjectMissing: an object does not exist.
        ValueError: a folder is given together with other URLs, or the shards have several layouts.
    """
    given = [split_query(name) for name in shard_paths(urls)]
    names = [name for name, _ in given]
    asked = None if layout is None else layout_named(layout)
    kinds = {name: layout_of(packing_of(name)[0]) for name in names}
    folders = [name for name, kind in kinds.items() if kind is None]
    if folders and len(names) > 1 and asked is None:
        raise ValueError(
            f"{folders[0]!r} is not a shard of a known layout, and a folder must be the only URL: pass the folder alone, or "
            "the URLs of shards"
        )
    if folders and len(names) == 1 and not (given[0][1] and asked is not None):
        if given[0][1]:
            raise ValueError(
                f"{names[0]} is not a shard of a known layout, and the URL of a folder has no query: pass layout=, or the URLs "
                "of the shards"
            )
        try:
            return shards_in(open_store(names[0]), layout, generation)
        except StoreError:
            if generation is not None or not _is_object(names[0], open_store):
                raise
            asked = asked or _recognized(names[0], open_store)
    if generation is not None:
        raise ValueError(f"generation={generation!r} needs the URL of a packed folder, and no other URL; got {names[0]!r}")
    if asked is None and len(found := {kind.name for kind in kinds.values() if kind is not None}) > 1:
        raise ValueError(f"all shards of a dataset must have one layout; these have {', '.join(sorted(found))}")
    kind = asked or kinds[names[0]] or TAR
    places = [split_url(name) for name in names]
    stores = {parent: open_store(parent) for parent, _ in places}
    for (parent, key), (_, query) in zip(places, given, strict=True):
        if isinstance(store := stores[parent], HttpStore) and query:
            store.add_query(key, query)

    def look(place: tuple[str, str]) -> RemoteShard:
        store, key = stores[place[0]], place[1]
        found = store.head(key)
        return RemoteShard(store, key, found.nbytes, found.etag)

    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "shmload-head") as pool:
        there = list(pool.map(look, places))
    return _all_sized(there, kind)


def _is_object(url: str, open_store: Callable[[str], Store]) -> bool:
    """Return whether a URL names a single object."""
    try:
        parent, key = split_url(url)
        open_store(parent).head(key)
    except StoreError:
        return False
    return True


def _recognized(url: str, open_store: Callable[[str], Store]) -> ShardFormat:
    """Return the format of an object whose name does not indicate it, from its first bytes.

    Raises:
        ValueError: the bytes do not indicate it, either.
    """
    parent, key = split_url(url)
    store = open_store(parent)
    found = store.head(key)

    def read(offset: int, nbytes: int) -> Buffer:
        out = np.empty(nbytes, np.uint8).data
        if nbytes:
            store.read_into(key, out, offset=offset, etag=found.etag or None)
        return out

    kind = recognize(head_of_object(key, found.nbytes, read)) if found.nbytes else None
    if kind is None or not is_shard_format(kind):
        what = (
            "has no format that its first bytes identify"
            if kind is None
            else f"is {kind.title}, which is read from local files only"
        )
        raise ValueError(f'{url}: {what}: pass layout=, such as layout="tfrecord", or give the URL of a folder')
    return layout_named(cast(ShardFormat, kind))


def indexes_beside(shards: Shards) -> Iterator[tuple[RemoteShard, str]]:
    """Create the index of each shard that needs one and has no current one next to it. Yield each shard and what was done.

    Raises:
        StoreError: the index cannot be written.
        ShardCorrupt: a shard does not match its layout.
    """
    for shard in shards.all:
        if shard.num_samples is not None:
            yield shard, "needs no index"
        elif index_beside(shard) is not None:
            yield shard, "has its index beside it"
        else:
            text, num_samples = pack_beside(shards, shard)
            shard.store.put(shard.key + SIDECAR, text)
            yield shard, f"{num_samples} samples, index of {len(text)} bytes written beside it"


def indexes_kept(shards: Shards, cache_folder: str | os.PathLike[str]) -> Iterator[tuple[RemoteShard, str]]:
    """Create the indexes that a RemoteDataset with this `cache_folder` would create on first use.

    Yield each shard and what was done.

    Raises:
        ShardCorrupt: a shard does not match its layout.
    """
    folder = f"{os.path.abspath(cache_folder)}/indexes"
    os.makedirs(folder, exist_ok=True)
    for shard in shards.all:
        found = fetch_index(shards, shard, folder, None)
        yield shard, f"{found.num_samples} samples, index in {folder}"
