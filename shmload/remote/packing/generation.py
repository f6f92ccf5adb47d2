"""The objects that a packing writes to the store: its claim, its shards with a note beside each, and finally the manifest.

    packing.json                            the claim: generation of the packing that began last, and its number of parts
    <generation>/shard-000000.tar.json      the note of a shard (`Record`); written after the shard and its index are complete
    manifest.json                           names the newest complete generation; written last

    <generation>/versions.json              in a bucket: the ETags of a complete generation's objects, as returned by the uploads

A shard is complete if its bytes are those that were written. An object in a bucket that still has the ETag of its upload is not
read again. All other objects are read back, and their checksums are compared.

The name of a generation is a hash of the dataset and the arguments. A packing that was killed therefore finds its finished shards
when the same command runs again, and two identical packings at the same time write the same bytes under the same names. A different
packing takes over the claim; a packing that finds another name in the claim stops. After the manifest is written, all other objects
in folders of generations are removed, except those of a generation that has been claimed since. Objects with other names are never
touched.

Several machines can pack parts of one generation: ranges of its order, whose shards have their own range of numbers. They share the
claim, and each machine that finds all parts complete writes the manifest, which is the same for all.

Shards are written to a `Spool` before they are sent: a few unnamed files, which disappear with the process even if it is killed.
They are in memory if it has room. Files are reused, because writing to existing pages costs one copy, and new pages of a disk's
file system cost several times that. A few threads send finished shards while the next ones are packed, so space for a few shards is
enough.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from shmload import faults
from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.compression import zstd_pieces
from shmload.formats.tar.shard_index import ShardIndex, pack_index
from shmload.formats.tar.writer import archive_nbytes
from shmload.remote.manifest import INDEX_SUFFIX, MANIFEST_NAME, IndexEntry, Manifest, PackedObject, ShardEntry
from shmload.shm.free_memory import available_bytes
from shmload.storage.s3_store import S3Store
from shmload.storage.store import Store, StoredObject

_SHARE = 8  # of available memory, 1 / _SHARE may be used for shards


class Spool:
    """A pool of temporary files that are reused.

    Args:
        nbytes: estimated size of all files together.
        folder: where to create the files. If None, in memory, or in the system's temporary folder if memory is short.
    """

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._folder = folder
        self.is_memory = folder is None and nbytes <= available_bytes() // _SHARE
        self._free: list[IO[bytes]] = []
        self._made = ExitStack()

    def take(self) -> IO[bytes]:
        """Return a file that is not in use, at position 0. It may still have its previous contents."""
        with suppress(IndexError):  # the pool is empty; a check before would race with other threads
            file = self._free.pop()
            file.seek(0)
            return file
        if self.is_memory:
            return self._made.enter_context(open(os.memfd_create("shmload-pack"), "r+b", buffering=0))
        return self._made.enter_context(tempfile.TemporaryFile(prefix="shmload-pack-", dir=self._folder, buffering=0))

    def give(self, file: IO[bytes]) -> None:
        """Return a file to the pool."""
        self._free.append(file)

    def close(self) -> None:
        """Close all files and free their space."""
        self._made.close()


@dataclass(frozen=True)
class Record:
    """A complete shard in the store, as its note describes it, so that the packing can be continued.

    Attributes:
        first: position of its first sample in the packing order.
        extensions: extensions of its members, sorted.
        shard: its entry in the manifest.
        versions: ETags of the shard and of its index from their upload; None if unknown.
    """

    first: int
    extensions: tuple[str, ...]
    shard: ShardEntry
    versions: tuple[str, str] | None = None

    @property
    def number(self) -> int:
        """Return the number of the shard, at the end of its name; numbers of a part begin with `PackPart.first_number`."""
        return int(self.shard.name.rpartition("-")[2].partition(".")[0])

    @property
    def stop(self) -> int:
        """Return the position after its last sample."""
        return self.first + self.shard.num_samples


@dataclass(frozen=True)
class PackPart:
    """One machine's share of a packing: part `number` of `count`, counted from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def first_number(self) -> int:
        """Return the number of its first shard. Numbers of other parts are lower, or higher by at least `MOST_SHARDS`."""
        return (self.number - 1) * MOST_SHARDS

    def span(self, total: int) -> tuple[int, int]:
        """Return the positions in an order of `total` samples at which this part and the next one begin."""
        return total * (self.number - 1) // self.count, total * self.number // self.count

    def has(self, record: Record) -> bool:
        """Return whether a shard belongs to this part."""
        return self.count == 1 or self.first_number <= record.number < self.first_number + MOST_SHARDS

    def whole(self, records: Sequence[Record], total: int | None) -> list[Record]:
        """Return the shards of this part from its beginning up to the first gap.

        Args:
            records: complete shards, sorted by position.
            total: number of samples of all parts; None if unknown.
        """
        found: list[Record] = []
        at, stop = (0, None) if total is None else self.span(total)
        for record in filter(self.has, records):
            is_next = (record.first, record.number) == (at, self.first_number + len(found))
            if not is_next or (stop is not None and record.stop > stop):
                break
            found.append(record)
            at = record.stop
        return found


class ShardFile:
    """A shard that is being written.

    Args:
        name: its name in the store.
        first: position of its first sample in the packing order.
        spool: provides the file.
    """

    def __init__(self, name: str, first: int, spool: Spool) -> None:
        self.name, self.first = name, first
        self.nbytes = self.num_samples = 0
        self._crc = 0
        self._spool, self._file = spool, spool.take()

    @property
    def path(self) -> Path:
        """Return the path under which this process can open the file."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def append(self, records: memoryview, num_samples: int) -> None:
        """Append the records of `num_samples` samples, given as consecutive bytes."""
        self._write(records)
        self.num_samples += num_samples

    def finish(self) -> tuple[Record, bytes]:
        """Finish the archive. Return its record and its index."""
        self._write(memoryview(bytes(archive_nbytes(self.nbytes) - self.nbytes)))
        self._file.truncate()  # a longer shard may have used the file before
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            packed = pack_index(self.name, data)
        extensions = tuple(sorted(ShardIndex(self.name, packed).extensions))
        index = IndexEntry(self.name + INDEX_SUFFIX, len(packed), f"{crc32c(packed):08x}")
        entry = ShardEntry(self.name, self.nbytes, self.num_samples, f"{self._crc:08x}", index)
        return Record(self.first, extensions, entry), packed

    def _write(self, data: memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        self.nbytes += len(data)
        while data:
            data = data[self._file.write(data) :]

    def compress(self, level: int) -> PackedObject:
        """Replace the finished archive by its compressed form, which is sent instead."""
        plain, self._file = self._file, self._spool.take()
        self.nbytes = self._crc = 0
        with mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            for piece in zstd_pieces(view, level):
                self._write(memoryview(piece))
        self._file.truncate()
        self._spool.give(plain)
        return PackedObject(self.nbytes, f"{self._crc:08x}")

    def close(self) -> None:
        """Return the file to the spool."""
        self._spool.give(self._file)


logger = logging.getLogger("shmload")
CLAIM = "packing.json"
MOST_PARTS, MOST_SHARDS = 999, 1_000_000  # of a packing, and of one part; numbers have at most nine digits
_NOTE = ".json"
_VERSIONS = "versions.json"
_OURS = re.compile(r"([0-9a-f]{16})/(?:shard-[0-9]{6,9}\.tar(?:\.zst)?(?:\.index|\.json)?|versions\.json)")
_AT_ONCE = 4  # files that are read in parallel for comparison
_PIECE = 8 << 20  # bytes per read


class Generation:
    """The part of a dataset's folder that belongs to one packing.

    Args:
        store: the dataset's folder.
        name: name of the generation.
        suffix: suffix of its shards.
        before: the dataset that it is appended to; None if it replaces the contents of the folder.
        part: the part that this machine packs.
        total: number of samples of all parts; None if unknown, which requires a single part.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        suffix: str = ".tar",
        before: Manifest | None = None,
        part: PackPart | None = None,
        total: int | None = None,
    ) -> None:
        self._store, self.name, self._suffix, self._before = store, name, suffix, before
        self._part, self._total = part or PackPart(), total

    def shard_name(self, number: int) -> str:
        """Return the name of shard `number` of this part."""
        return f"{self.name}/shard-{self._part.first_number + number:06d}{self._suffix}"

    def claim(self) -> None:
        """Write the claim of this packing."""
        parts = {} if self._part.count == 1 else {"parts": self._part.count, "num_samples": self._total}
        self._store.put(CLAIM, json.dumps({"generation": self.name, **parts}).encode("ascii") + b"\n")

    def check(self) -> None:
        """Check that the claim is still that of this packing.

        Raises:
            StoreError: another packing has begun or ended since.
        """
        if (other := self._claimed()) != self.name and not self.is_settled():
            now = "its claim is gone" if other is None else f"generation {other}"
            raise StoreError(
                f"{self._store.url}: another packing into this folder was begun ({now}) while generation {self.name} was being "
                "packed; this one stops. One folder holds one dataset: give each its own, or run one after the other"
            )

    def is_settled(self) -> bool:
        """Return whether this generation is the dataset and no packing is in progress."""
        return self._claimed() is None and self.committed() is not None

    def _claimed(self) -> str | None:
        try:
            return str(json.loads(bytes(self._store.get(CLAIM)))["generation"])
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError):
            return "unknown"

    def committed(self) -> Manifest | None:
        """Return the manifest if it names this generation as the newest."""
        try:
            found = manifest_of(self._store)
        except ShardCorrupt:  # a damaged manifest will be replaced
            return None
        return found if found is not None and found.generation == self.name else None

    def note(self, record: Record) -> None:
        """Write the note that a shard is complete."""
        shard = record.shard
        note = {"first": record.first, "extensions": list(record.extensions), "shard": shard.as_json(), "versions": record.versions}
        self._store.put(shard.name + _NOTE, json.dumps(note).encode("ascii"))

    def forget(self, records: Sequence[Record]) -> None:
        """Delete the notes of shards that are going to be rewritten."""
        if records:
            self._store.delete([record.shard.name + _NOTE for record in records])

    def records(self) -> list[Record]:
        """Return the complete shards of this part that are in the store, by their first positions."""
        there = self._there()
        found = list(filter(self._part.has, self._all(there)))
        with ThreadPoolExecutor(_AT_ONCE, "shmload-check") as pool:
            are_whole = list(pool.map(lambda record: self._is_as_written(record, there) or self._is_whole(record), found))
        return [record for record, is_whole in zip(found, are_whole, strict=True) if is_whole]

    def all_parts(self) -> tuple[list[Record], list[PackPart]]:
        """Return the existing shards of all parts, in order, and the parts that are incomplete."""
        return all_parts(self._all(self._there()), self._part.count, self._total or 0)

    def _all(self, there: Mapping[str, StoredObject]) -> list[Record]:
        """Return the shards of all parts that exist with their expected size, by their first positions."""
        manifest = self.committed()
        found = _noted(self._store, there) if manifest is None else _of_manifest(manifest, self.name, self._versions(there))
        return sorted((each for each in found if _is_there(each.shard, there)), key=lambda record: record.first)

    def _is_as_written(self, record: Record, there: Mapping[str, StoredObject]) -> bool:
        """Return whether a bucket's ETags show that a shard and its index are unchanged. Other stores cannot tell reliably."""
        now = tuple(there[name].etag for name in (record.shard.name, record.shard.index.name))
        return isinstance(self._store, S3Store) and all(now) and record.versions == now

    def _versions(self, there: Mapping[str, StoredObject]) -> Mapping[str, Any]:
        """Return the saved ETags of the complete generation's objects, by shard."""
        if (key := f"{self.name}/{_VERSIONS}") in there:
            with suppress(ValueError, ObjectMissing):  # objects without an ETag are read back
                found = json.loads(bytes(self._store.get(key)))
                return found if isinstance(found, dict) else {}
        return {}

    def _keep_versions(self, records: Sequence[Record]) -> None:
        """Save the ETags of the generation's objects for a later packing of the same dataset."""
        known = {
            each.shard.name: each.versions for each in records if each.versions is not None and each.shard.generation == self.name
        }
        if known and isinstance(self._store, S3Store):
            self._store.put(f"{self.name}/{_VERSIONS}", json.dumps(known).encode("ascii"))

    def _is_whole(self, record: Record) -> bool:
        """Read back a shard and its index, also from a bucket. Return whether they have the bytes that were written."""
        shard, index = record.shard, record.shard.index
        for name, nbytes, wanted in ((shard.name, *shard.stored), (index.name, index.nbytes, index.crc32c)):
            if self._checksum(name, nbytes) != wanted:
                logger.info("%s/%s is not as it was written: it is packed again", self._store.url, name)
                return False
        return True

    def _checksum(self, name: str, nbytes: int) -> str:
        """Return the CRC-32C of an object's bytes; "" if it was removed or truncated since it was listed."""
        crc, piece = 0, bytearray(min(nbytes, _PIECE))
        try:
            if self._store.head(name).nbytes != nbytes:
                return ""
            for offset in range(0, nbytes, _PIECE):
                view = memoryview(piece)[: nbytes - offset]
                self._store.read_into(name, view, offset=offset)
                crc = crc32c(view, crc)
        except ObjectMissing:
            return ""
        return f"{crc:08x}"

    def _there(self) -> dict[str, StoredObject]:
        names = [self.name] if self._before is None else [*self._before.generations, self.name]
        return {each.key: each for name in names for each in self._store.list_objects(name)}

    def manifest(self, records: Sequence[Record], seed: int, key: str = "") -> Manifest:
        """Return the manifest of these shards, appended to those of the previous dataset.

        Args:
            records: the shards, in order.
            seed: seed of the packing order.
            key: fingerprint of the key that members are encrypted with, or "".
        """
        before = self._before
        shards = tuple(record.shard for record in records)
        extensions = {extension for record in records for extension in record.extensions}
        if before is not None:
            shards, extensions = (*before.shards, *shards), extensions.union(before.extensions)
        return Manifest(
            self.name,
            seed,
            sum(shard.num_samples for shard in shards),
            sum(shard.nbytes for shard in shards),
            tuple(sorted(extensions)),
            shards,
            key,
        )

    def commit(self, records: Sequence[Record], seed: int, key: str = "") -> Manifest:
        """Make these shards the dataset: write the manifest, then remove what it replaces. Arguments are those of `manifest`.

        Raises:
            StoreError: shards are missing, or another packing was begun.
        """
        before, manifest = self._before, self.manifest(records, seed, key)
        shards = manifest.shards
        self.check()
        self._has_all(shards)
        faults.hit("before_manifest")
        if self.committed() != manifest:
            now = None if before is None else manifest_of(self._store)
            if before is not None and (now is None or (now.generation != self.name and now.digest != before.digest)):
                raise StoreError(
                    f"{self._store.url}: the dataset that generation {self.name} is appended to ({before.generation}) no longer "
                    "exists: another packing has finished since. Append again"
                )
            self._store.put(MANIFEST_NAME, manifest.dump())
        self._keep_versions(records)
        faults.hit("after_manifest")
        self._has_all(shards)  # a packing that ended between check and put may have removed them, which must not go unnoticed
        self._clean(manifest)
        return manifest

    def _has_all(self, shards: Iterable[ShardEntry]) -> None:
        there = self._there()
        if absent := [shard.name for shard in shards if not _is_there(shard, there)]:
            raise StoreError(
                f"{self._store.url}: {absent[0]} was written, but is missing or has changed ({len(absent)} shards in "
                "all): another program writes to this folder or empties it. Run the same packing again: it packs what is missing"
            )

    def _clean(self, manifest: Manifest) -> None:
        """Remove objects that are not needed any more: other generations, notes of shards, and the claim."""
        claimed = self._claimed()
        kept = {name for shard in manifest.shards for name in (shard.name, shard.index.name)}
        kept |= {f"{generation}/{_VERSIONS}" for generation in manifest.generations}
        under_way = set() if claimed == self.name else {claimed}
        found = [each.key for each in self._store.list_objects()]
        ours = [(key, match[1]) for key in found if (match := _OURS.fullmatch(key)) is not None]
        self._store.delete([key for key, generation in ours if key not in kept and generation not in under_way])
        faults.hit("cleaning")
        if claimed == self.name:
            self._store.delete([CLAIM])


def _is_there(shard: ShardEntry, there: Mapping[str, StoredObject]) -> bool:
    """Return whether a shard and its index exist with their expected size."""
    found = [there.get(each.name) for each in (shard, shard.index)]
    return [each and each.nbytes for each in found] == [shard.stored[0], shard.index.nbytes]


def manifest_of(store: Store) -> Manifest | None:
    """Return the manifest of the folder, or None without one.

    Raises:
        ShardCorrupt: the manifest is damaged.
    """
    try:
        return Manifest.parse(store.get(MANIFEST_NAME), name=f"{store.url}/{MANIFEST_NAME}")
    except ObjectMissing:
        return None


def unfinished(store: Store) -> str:
    """Return a message about what is missing in a folder that has an unfinished packing and no manifest."""
    there = {each.key: each for each in store.list_objects()}
    try:
        claim = json.loads(bytes(store.get(CLAIM)))
        count, total = claim.get("parts", 1), claim.get("num_samples", 0)
        records = [each for each in _noted(store, there) if each.shard.generation == claim["generation"]]
        _, missing = all_parts(sorted(records, key=lambda each: each.first), count, total)
    except (ObjectMissing, ValueError, KeyError, TypeError, AttributeError):
        count, missing = 1, []
    if count == 1:
        return "a packing into it was begun and is not at its end: the same call, or `shmload pack`, goes on with it"
    if not missing:
        return f"all of its {count} parts are there, and nobody has ended the packing: pack any of them again"
    named = ", ".join(map(str, missing))
    return f"it is packed in {count} parts, and {named} of them is missing: pack that with the same arguments"


def all_parts(records: Sequence[Record], count: int, total: int) -> tuple[list[Record], list[PackPart]]:
    """Return the shards of all parts, by their first positions, and the parts that are incomplete.

    Args:
        records: the shards of the generation, by their first positions.
        count: number of parts.
        total: number of samples of all parts.
    """
    kept: list[Record] = []
    missing = []
    for part in (PackPart(number, count) for number in range(1, count + 1)):
        found = part.whole(records, total)
        first, stop = part.span(total)
        if (found[-1].stop if found else first) != stop:
            missing.append(part)
        kept += found
    return kept, missing


def _noted(store: Store, there: Mapping[str, StoredObject]) -> list[Record]:
    """Read the notes of shards. Those that cannot be read are left out."""

    def read(key: str) -> Record | None:
        with suppress(ValueError, KeyError, TypeError, ObjectMissing):  # unreadable counts as missing: packed again
            note = json.loads(bytes(store.get(key)))
            shard = ShardEntry.of(note["shard"], key)
            if shard.name + _NOTE == key and type(note["first"]) is int and note["first"] >= 0:
                versions = _two_texts(note.get("versions"))
                return Record(note["first"], tuple(map(str, note["extensions"])), shard, versions)
        return None

    with ThreadPoolExecutor(_AT_ONCE, "shmload-notes") as pool:
        found = pool.map(read, (key for key in there if key.endswith(_NOTE) and _OURS.fullmatch(key)))
        return [record for record in found if record is not None]


def _two_texts(given: Any) -> tuple[str, str] | None:
    """Return the ETags of a shard and its index from JSON, or None if it contains something else."""
    is_sound = isinstance(given, list) and len(given) == 2 and all(isinstance(each, str) for each in given)
    return (given[0], given[1]) if is_sound else None


def _of_manifest(manifest: Manifest, generation: str, versions: Mapping[str, Any]) -> list[Record]:
    found, first = [], 0
    for shard in (each for each in manifest.shards if each.generation == generation):
        found.append(Record(first, manifest.extensions, shard, _two_texts(versions.get(shard.name))))
        first += shard.num_samples
    return found


NUM_THREADS = 2


class ShardSender:
    """Uploads shards in threads: each shard, then its index, then the note that both are complete.

    Args:
        store: the dataset's folder.
        generation: the generation that the shards belong to.
        sent: called in the thread of `wait` with each record, when its shard is complete.
        level: zstd level for compressing shards; None does not compress.
    """

    def __init__(self, store: Store, generation: Generation, sent: Callable[[Record], None], level: int | None = None) -> None:
        self._store, self._generation, self._sent, self._level = store, generation, sent, level
        self._pool = ThreadPoolExecutor(NUM_THREADS, "shmload-send")
        self._under_way: set[Future[Record]] = set()

    def send(self, shard: ShardFile) -> None:
        """Send a shard that has all its samples."""
        record, index = shard.finish()
        self._generation.check()
        self._under_way.add(self._pool.submit(self._put, shard, record, index))

    def wait(self, num_left: int) -> None:
        """Wait until at most `num_left` shards are still being sent.

        Raises:
            Exception: sending a shard failed.
        """
        while len(self._under_way) > num_left:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for future in done:
                self._sent(future.result())

    def close(self) -> None:
        """Stop the threads after their current uploads."""
        self._pool.shutdown(cancel_futures=True)

    def _put(self, shard: ShardFile, record: Record, index: bytes) -> Record:
        try:
            if self._level is not None:
                record = replace(record, shard=replace(record.shard, packed=shard.compress(self._level)))
            faults.hit("sending")
            sent = self._store.put_file(record.shard.name, shard.path)
        finally:
            shard.close()
        faults.hit("shard_sent")
        index_sent = self._store.put(record.shard.index.name, index)
        record = replace(record, versions=(sent.etag, index_sent.etag))
        faults.hit("index_sent")
        self._generation.note(record)
        faults.hit("shard_noted")
        return record
