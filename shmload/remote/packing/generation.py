"""The objects that a packing writes to the store: its claim, its shards with a note beside each, and finally the manifest.

    packing.json                            the claim: generation of the packing that began last, and its number of parts
    <generation>/shard-000000.tar.json      the note of a shard (`ShardRecord`); written after the shard and its index are complete
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
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from shmload import faults
from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.remote.manifest import MANIFEST_NAME, Manifest, ShardEntry
from shmload.remote.packing.pack_part import PackPart, all_parts
from shmload.remote.packing.shard_record import ShardRecord
from shmload.storage.s3_store import S3Store
from shmload.storage.store import Store, StoredObject

logger = logging.getLogger("shmload")
CLAIM = "packing.json"
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
    Attributes:
        replaced: the dataset that `commit` has replaced, if it could be read.
    """

    replaced: Manifest | None = None

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
        found = self._now()
        return found if found is not None and found.generation == self.name else None

    def other_dataset(self) -> Manifest | None:
        """Return the dataset that is in the store and that this generation is going to replace; None if there is none."""
        now = self._now() if self._before is None else None
        return None if now is None or now.generation == self.name else now

    def _now(self) -> Manifest | None:
        """Return the manifest that is in the store; None without one, or if it is damaged and will be replaced."""
        try:
            return manifest_of(self._store)
        except ShardCorrupt:
            return None

    def note(self, record: ShardRecord) -> None:
        """Write the note that a shard is complete."""
        shard = record.shard
        note = {"first": record.first, "extensions": list(record.extensions), "shard": shard.as_json(), "versions": record.versions}
        self._store.put(shard.name + _NOTE, json.dumps(note).encode("ascii"))

    def forget(self, records: Sequence[ShardRecord]) -> None:
        """Delete the notes of shards that are going to be rewritten."""
        if records:
            self._store.delete([record.shard.name + _NOTE for record in records])

    def records(self) -> list[ShardRecord]:
        """Return the complete shards of this part that are in the store, by their first positions."""
        there = self._there()
        found = list(filter(self._part.has, self._all(there)))
        with ThreadPoolExecutor(_AT_ONCE, "shmload-check") as pool:
            are_whole = list(pool.map(lambda record: self._is_as_written(record, there) or self._is_whole(record), found))
        return [record for record, is_whole in zip(found, are_whole, strict=True) if is_whole]

    def all_parts(self) -> tuple[list[ShardRecord], list[PackPart]]:
        """Return the existing shards of all parts, in order, and the parts that are incomplete."""
        return all_parts(self._all(self._there()), self._part.count, self._total or 0)

    def _all(self, there: Mapping[str, StoredObject]) -> list[ShardRecord]:
        """Return the shards of all parts that exist with their expected size, by their first positions."""
        manifest = self.committed()
        found = _noted(self._store, there) if manifest is None else _of_manifest(manifest, self.name, self._versions(there))
        return sorted((each for each in found if _is_there(each.shard, there)), key=lambda record: record.first)

    def _is_as_written(self, record: ShardRecord, there: Mapping[str, StoredObject]) -> bool:
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

    def _keep_versions(self, records: Sequence[ShardRecord]) -> None:
        """Save the ETags of the generation's objects for a later packing of the same dataset."""
        known = {
            each.shard.name: each.versions for each in records if each.versions is not None and each.shard.generation == self.name
        }
        if known and isinstance(self._store, S3Store):
            self._store.put(f"{self.name}/{_VERSIONS}", json.dumps(known).encode("ascii"))

    def _is_whole(self, record: ShardRecord) -> bool:
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

    def manifest(self, records: Sequence[ShardRecord], seed: int, key: str = "") -> Manifest:
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

    def commit(self, records: Sequence[ShardRecord], seed: int, key: str = "") -> Manifest:
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
            other = self.other_dataset()
            now = None if before is None else manifest_of(self._store)
            if before is not None and (now is None or (now.generation != self.name and now.digest != before.digest)):
                raise StoreError(
                    f"{self._store.url}: the dataset that generation {self.name} is appended to ({before.generation}) no longer "
                    "exists: another packing has finished since. Append again"
                )
            self._store.put(MANIFEST_NAME, manifest.dump())
            self.replaced = other
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
        return "a packing into it was begun and is not finished: the same call, or `shmload pack`, continues it"
    if not missing:
        return f"all of its {count} parts are there, and the packing was not finished: pack any of them again"
    named = ", ".join(map(str, missing))
    verb, object_ = ("is", "it") if len(missing) == 1 else ("are", "them")
    return f"it is packed in {count} parts, of which {named} {verb} missing: pack {object_} with the same arguments"


def _noted(store: Store, there: Mapping[str, StoredObject]) -> list[ShardRecord]:
    """Read the notes of shards. Those that cannot be read are left out."""

    def read(key: str) -> ShardRecord | None:
        with suppress(ValueError, KeyError, TypeError, ObjectMissing):  # unreadable counts as missing: packed again
            note = json.loads(bytes(store.get(key)))
            shard = ShardEntry.of(note["shard"], key)
            if shard.name + _NOTE == key and type(note["first"]) is int and note["first"] >= 0:
                versions = _two_texts(note.get("versions"))
                return ShardRecord(note["first"], tuple(map(str, note["extensions"])), shard, versions)
        return None

    with ThreadPoolExecutor(_AT_ONCE, "shmload-notes") as pool:
        found = pool.map(read, (key for key in there if key.endswith(_NOTE) and _OURS.fullmatch(key)))
        return [record for record in found if record is not None]


def _two_texts(given: Any) -> tuple[str, str] | None:
    """Return the ETags of a shard and its index from JSON, or None if it contains something else."""
    is_sound = isinstance(given, list) and len(given) == 2 and all(isinstance(each, str) for each in given)
    return (given[0], given[1]) if is_sound else None


def _of_manifest(manifest: Manifest, generation: str, versions: Mapping[str, Any]) -> list[ShardRecord]:
    found, first = [], 0
    for shard in (each for each in manifest.shards if each.generation == generation):
        found.append(ShardRecord(first, manifest.extensions, shard, _two_texts(versions.get(shard.name))))
        first += shard.num_samples
    return found
