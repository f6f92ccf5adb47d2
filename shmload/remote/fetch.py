"""Fetching: the bytes of a shard, all of them or one sample's, checked; and its index.

The index of a shard that lies in a store and that nobody has indexed: its headers are read through ranges.

A file's worth of address space stands for the shard. What is read is put where it belongs, and the scan of a whole shard goes over
it: the same checks, the same index. Pieces of a few MiB are read while members are small, for those hold many headers; what a large
member holds is passed over and takes no memory, as nobody looks at it.

Which shards a dataset is made of: by its manifest, by listing a folder, or by their names.

It is looked up once, where the dataset is made, and goes with it to every worker: so all of them read the same shards, whatever
happens in the store meanwhile.

The manifest of a packed dataset: which shards it is made of, how large they are, and their checksums.

It is one JSON object, `manifest.json` in the dataset's folder, and it is written last, by one atomic put: what it names is
there, whole. Shards lie in a folder named after their *generation*. Another packing has another one, so that a reader that goes
by one manifest never sees shards of two.

    manifest.json                           this
    <generation>/shard-000000.tar           samples
    <generation>/shard-000000.tar.index     where they lie in it: `formats.tar.shard.ShardIndex`, packed

What is read here decides what is fetched and how much memory it gets, and may come from anywhere. So nothing in it is believed
unchecked, and what is not known is an error rather than left out.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Self

import numpy as np
from typing_extensions import Buffer

from shmload._core import tar
from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.paths import shard_paths, write_if_possible
from shmload.formats.tar.shards import ShardIndex, map_file, pack_index, unpack_index
from shmload.storage.cache import Fetch
from shmload.storage.client import split_url
from shmload.storage.http import WebReader
from shmload.storage.local import Store

__all__ = [
    "MANIFEST_NAME",
    "IndexEntry",
    "Manifest",
    "RemoteShard",
    "ShardEntry",
    "Shards",
    "fetch_index",
    "fetch_of",
    "fetch_range",
    "name_of",
    "scan_remote",
    "shards_in",
    "shards_of_urls",
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
                raise ShardCorrupt(f"{url}: at byte {at}: a name of {headers.size} bytes; at most {_META_LIMIT} are read")
            if not headers.read_payload(kind, need(at, headers.size)):
                break
        at += -(-headers.size // _BLOCK) * _BLOCK
    return pack_index(url, shard)


def name_of(shard: RemoteShard) -> str:
    """What a copy of the shard is called here: another one for another content."""
    return sha256(f"{shard.url}\0{shard.version}\0{shard.nbytes}".encode()).hexdigest()[:40]


def fetch_of(shards: Shards, shard: RemoteShard) -> Fetch:
    """How a cache gets a shard's bytes: by ranges in parallel; once more if their checksum is another than the manifest's.

    What it raises:
        ShardCorrupt: the shard is not what it was when the dataset was made, or what the manifest says.
        StoreError: the store does not answer, or the disk is full.
    """

    def read(fd: int) -> int:
        if isinstance(shard.store, WebReader):
            return shard.store.read_to_file(shard.key, fd, shard.nbytes, etag=shard.etag or None)
        if not shard.nbytes:
            return 0
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as own:  # without the lock of `fd`, which a child of a fork would keep
            out = mmap.mmap(own.fileno(), shard.nbytes)  # ends with its last view, which an error's traceback may have
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
            f"{shard.url}: its checksum is {' and then '.join(found)}, and the manifest says {shard.crc32c}: the object is "
            "damaged, or was replaced. Remove it and upload the dataset again"
        )

    return fetch


def fetch_range(shards: Shards, shard: RemoteShard, offset: int, nbytes: int) -> Buffer:
    """Some of a shard's bytes.

    Raises:
        ShardCorrupt: it is not what it was when the dataset was made.
        StoreError: the store does not answer.
    """
    out = np.empty(nbytes, np.uint8).data
    try:
        shard.store.read_into(shard.key, out, offset=offset, etag=shard.etag or None)
    except StoreError as error:
        raise _explained(shards, shard, error) from error
    return out.toreadonly()


def fetch_index(shards: Shards, shard: RemoteShard, folder: str, copy: Any) -> ShardIndex:
    """Where a shard's samples lie: as kept in the folder, else as the store or the shard itself says, and kept then.

    Args:
        copy: the shard's bytes, if they are here; None: its headers are read through ranges.
    Raises:
        ShardCorrupt: the shard is no sound tar file, or its index not what the manifest says.
    """
    path = f"{folder}/{name_of(shard)}.index"
    with contextlib.suppress(OSError):
        if (kept := unpack_index(shard.url, map_file(path)[0], shard.nbytes)) is not None:
            return kept
    packed = _made(shards, shard, copy)
    found = unpack_index(shard.url, packed, shard.nbytes)
    if found is None or shard.num_samples not in (None, found.num_samples):
        says = "nothing sound" if found is None else f"{found.num_samples} samples"
        raise ShardCorrupt(
            f"{shard.url}: its index says {says}, and the manifest {shard.num_samples} samples in {shard.nbytes} bytes: upload the "
            "dataset again"
        )
    write_if_possible(path, packed)  # or not: the folder's owner, another process, may have ended it
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
        f"{(entry.nbytes, entry.crc32c)}: the object is damaged, or was replaced. Remove it and upload the dataset again"
    )


MANIFEST_NAME = "manifest.json"
FORMAT = "shmload-shards"
VERSION = 1
INDEX_SUFFIX = ".index"
_SHARD = re.compile(r"shard-[0-9]{6,9}\.tar")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The packed index of a shard, an object of its own.

    Attributes:
        name: relative to the dataset's folder.
        nbytes: of it.
        crc32c: of its bytes, 8 hexadecimal digits.
    """

    name: str
    nbytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard.

    Attributes:
        name: relative to the dataset's folder: "<generation>/shard-000000.tar".
        nbytes: of the whole file.
        num_samples: in it.
        crc32c: of its bytes, 8 hexadecimal digits.
        index: the object beside it that says where its samples lie.
    """

    name: str
    nbytes: int
    num_samples: int
    crc32c: str
    index: IndexEntry

    @classmethod
    def of(cls, given: Any, generation: str, where: str, place: str = "") -> Self:
        """An entry from what JSON has kept of it.

        Raises:
            ShardCorrupt: it is none, or of another generation; the text begins with `where` and names the place in that.
        """
        before = f"{place}." if place else ""
        _check(given, _SHARD_KINDS, where, place)
        name, index = given["name"], given["index"]
        folder, _, file = name.partition("/") if isinstance(name, str) else ("", "", "")
        if folder != generation or not _SHARD.fullmatch(file):
            raise _wrong(where, f"{before}name", f"{generation}/shard-000000.tar or the like is needed; got {name!r}")
        _check(index, _INDEX_KINDS, where, f"{before}index")
        if index["name"] != name + INDEX_SUFFIX:
            raise _wrong(where, f"{before}index.name", f"{name + INDEX_SUFFIX} is needed; got {index['name']!r}")
        return cls(**{**given, "index": IndexEntry(**index)})


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a packed dataset is made of.

    Attributes:
        generation: of these shards, 16 hexadecimal digits; other contents have another.
        seed: of the order in which samples were packed.
        num_samples: in all shards.
        nbytes: of all shards, without their indexes.
        extensions: of all members, sorted.
        shards: in their order.
    """

    generation: str
    seed: int
    num_samples: int
    nbytes: int
    extensions: tuple[str, ...]
    shards: tuple[ShardEntry, ...]

    @classmethod
    def parse(cls, data: Buffer, *, name: str = MANIFEST_NAME) -> Self:
        """Reads a manifest.

        Args:
            data: the object's bytes.
            name: of the object, for errors: its URL.
        Raises:
            ShardCorrupt: it is none, of an unknown version, or contradicts itself; the text says where.
        """
        try:
            given = json.loads(bytes(data), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise ShardCorrupt(f"{name}: is no manifest of shards: {error}") from error
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise _wrong(name, "", f"a manifest of shards, with format {FORMAT!r}, is needed; this is something else")
        if given.get("version") != VERSION or type(given["version"]) is not int:
            raise _wrong(name, "version", f"{VERSION} is known here, got {given.get('version')!r}; a newer shmload may read it")
        _check(given, _MANIFEST_KINDS, name, "")
        generation, extensions = given["generation"], given["extensions"]
        for number, one in enumerate(extensions):
            if not isinstance(one, str) or not one or one != one.lower() or "/" in one or "\0" in one:
                raise _wrong(
                    name, f"extensions[{number}]", f"an extension in lower case, without a slash, is needed; got {_short(one)}"
                )
        if extensions != sorted(set(extensions)):
            raise _wrong(name, "extensions", "they are sorted and each is there once; these are not")
        shards = tuple(ShardEntry.of(one, generation, name, f"shards[{number}]") for number, one in enumerate(given["shards"]))
        found = cls(generation, given["seed"], given["num_samples"], given["nbytes"], tuple(extensions), shards)
        if len({shard.name for shard in shards}) != len(shards):
            raise _wrong(name, "shards", "two of them have the same name")
        for what in ("num_samples", "nbytes"):
            said, summed = getattr(found, what), sum(getattr(shard, what) for shard in shards)
            if said != summed:
                raise _wrong(name, what, f"it says {said}, and its {len(shards)} shards have {summed}")
        return found

    def dump(self) -> bytes:
        """Its bytes: the same ones for equal manifests."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(content, indent=1) + "\n").encode("ascii")


def _wrong(name: str, place: str, what: str) -> ShardCorrupt:
    """What is wrong in a manifest, and where."""
    return ShardCorrupt(f"{name}: {place}: {what}" if place else f"{name}: {what}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object of it says something twice, among {sorted(name for name, _ in pairs)}")
    return found


Kind = tuple[Callable[[Any], bool], str]  # what a value has to be: a test, and its words


def _text(pattern: str, needed: str) -> Kind:
    return lambda given: isinstance(given, str) and re.fullmatch(pattern, given) is not None, f"{needed} are"


def _number(at_least: int = 0, at_most: int = (1 << 63) - 1) -> Kind:
    return lambda given: type(given) is int and at_least <= given <= at_most, f"an integer from {at_least} to {at_most} is"


_ANY: Kind = (lambda _: True, "")
_LIST: Kind = (lambda given: isinstance(given, list), "a list is")
_DIGEST = _text("[0-9a-f]{8}", "8 hexadecimal digits")
_INDEX_KINDS = {"name": _ANY, "nbytes": _number(1), "crc32c": _DIGEST}
_SHARD_KINDS = {"name": _ANY, "nbytes": _number(1), "num_samples": _number(1), "crc32c": _DIGEST, "index": _ANY}
_MANIFEST_KINDS = {
    "format": _ANY,
    "version": _ANY,
    "generation": _text("[0-9a-f]{16}", "16 hexadecimal digits"),
    "seed": _number(at_most=(1 << 64) - 1),
    "num_samples": _number(),
    "nbytes": _number(),
    "extensions": _LIST,
    "shards": _LIST,
}


def _check(given: Any, kinds: dict[str, Kind], name: str, where: str) -> None:
    """Whether it is an object that has these values and no others."""
    if not isinstance(given, dict):
        raise _wrong(name, where, f"an object with {', '.join(kinds)} is needed; got {_short(given)}")
    if absent := [key for key in kinds if key not in given]:
        raise _wrong(name, where, f"{', '.join(absent)} is missing")
    if unknown := sorted(key for key in given if key not in kinds):
        raise _wrong(name, where, f"{_short(unknown[0])} is not known in version {VERSION}")
    for key, (is_right, needed) in kinds.items():
        if not is_right(given[key]):
            raise _wrong(name, f"{where}.{key}" if where else key, f"{needed} needed; got {_short(given[key])}")


def _short(given: Any) -> str:
    shown = repr(given)
    return shown if len(shown) <= 60 else shown[:57] + "..."


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
        RemoteShard(store, entry.name, entry.nbytes, "", entry.num_samples, entry.crc32c, entry.index) for entry in manifest.shards
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
        raise ValueError(f"{folders[0]!r} is no .tar object, and a folder stands alone: give its URL, or those of shards")
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

    def look(place: tuple[str, str]) -> RemoteShard:
        store, key = stores[place[0]], place[1]
        found = store.head(key)
        return RemoteShard(store, key, found.nbytes, found.etag)

    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "shmload-head") as pool:
        return Shards(tuple(pool.map(look, places)))
