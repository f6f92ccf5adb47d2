"""What a packing keeps in the store: its claim, a record beside each shard, and at its end the manifest.

    packing.json                            generation of the packing under way; the last one that began
    <generation>/shard-000000.tar.json      written after its shard and index: these are whole
    manifest.json                           of the newest whole generation; written last

A generation is named after the dataset and the arguments, so the same packing finds what it has done, whoever killed it, and
two of the same at once write the same bytes under the same names. One of another kind takes the claim over: who finds another
name in it stops. Once the manifest is written, all other objects in folders of generations are removed, except of one that was
claimed since. Objects that are no such names are never touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from shmload import faults
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.remote.manifest import MANIFEST_NAME, Manifest, ShardEntry
from shmload.remote.packing.shard_file import Record
from shmload.storage.store import Store

CLAIM = "packing.json"
_NOTE = ".json"
_OURS = re.compile(r"([0-9a-f]{16})/shard-[0-9]{6,9}\.tar(\.index|\.json)?")


class Generation:
    """One packing's part of a dataset's folder.

    Args:
        store: the dataset's folder.
        name: of the generation.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name = store, name

    def shard_name(self, number: int) -> str:
        """Where a shard goes."""
        return f"{self.name}/shard-{number:06d}.tar"

    def claim(self) -> None:
        """Says that this is the packing under way."""
        self._store.put(CLAIM, json.dumps({"generation": self.name}).encode("ascii") + b"\n")

    def check(self) -> None:
        """Returns if this is still the packing under way.

        Raises:
            StoreError: another one has begun since, or has ended.
        """
        if (other := self._claimed()) != self.name and not self.is_settled():
            told = "its claim is gone" if other is None else f"generation {other}"
            raise StoreError(
                f"{self._store.url}: another packing into this folder was begun ({told}) while generation {self.name} was being "
                "packed; this one stops. One folder holds one dataset: give each its own, or run one after the other"
            )

    def is_settled(self) -> bool:
        """Whether this is the dataset, and no packing is under way."""
        return self._claimed() is None and self.committed() is not None

    def _claimed(self) -> str | None:
        try:
            told = json.loads(bytes(self._store.get(CLAIM)))
            return str(told["generation"])
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError):
            return "unknown"

    def committed(self) -> Manifest | None:
        """The manifest, if it is of this generation."""
        try:
            found = Manifest.parse(self._store.get(MANIFEST_NAME), name=f"{self._store.url}/{MANIFEST_NAME}")
        except (ObjectMissing, ShardCorrupt):  # one that is damaged is going to be replaced
            return None
        return found if found.generation == self.name else None

    def note(self, record: Record) -> None:
        """Says that a shard is whole."""
        told = {"first": record.first, "extensions": list(record.extensions), "shard": record.shard.as_dict()}
        self._store.put(record.shard.name + _NOTE, json.dumps(told).encode("ascii"))

    def forget(self, records: Sequence[Record]) -> None:
        """Takes back what was said of shards, which are going to be written anew."""
        if records:
            self._store.delete([record.shard.name + _NOTE for record in records])

    def records(self) -> list[Record]:
        """Shards of this generation that are in the store, whole, by their first positions."""
        sizes = self._sizes()
        manifest = self.committed()
        found = _of_manifest(manifest) if manifest is not None else self._noted(sizes)
        whole = [record for record in found if _is_there(record.shard, sizes)]
        return sorted(whole, key=lambda record: record.first)

    def _noted(self, sizes: dict[str, int]) -> list[Record]:
        found = []
        for key in sizes:
            if not key.endswith(_NOTE) or not _OURS.fullmatch(key):
                continue
            try:
                told = json.loads(bytes(self._store.get(key)))
                shard = ShardEntry.of(told["shard"], self.name, key)
                if shard.name + _NOTE == key and type(told["first"]) is int and told["first"] >= 0:
                    found.append(Record(told["first"], tuple(map(str, told["extensions"])), shard))
            except (ValueError, KeyError, TypeError, ObjectMissing):  # no record is less than a wrong one: packed again
                continue
        return found

    def _sizes(self) -> dict[str, int]:
        return {each.key: each.nbytes for each in self._store.list_objects(self.name)}

    def commit(self, records: Sequence[Record], seed: int) -> Manifest:
        """Makes these shards the dataset: writes the manifest, then removes what it replaces.

        Raises:
            StoreError: shards are not there any more, or another packing was begun.
        """
        shards = tuple(record.shard for record in records)
        manifest = Manifest(
            self.name,
            seed,
            sum(shard.num_samples for shard in shards),
            sum(shard.nbytes for shard in shards),
            tuple(sorted({extension for record in records for extension in record.extensions})),
            shards,
        )
        self.check()
        self._has_all(shards)
        faults.hit("before_manifest")
        if self.committed() != manifest:
            self._store.put(MANIFEST_NAME, manifest.dump())
        faults.hit("after_manifest")
        self._has_all(
            shards
        )  # one that ended between check and put has removed them: then the manifest must not go unnoticed
        self._clean(manifest)
        return manifest

    def _has_all(self, shards: Iterable[ShardEntry]) -> None:
        sizes = self._sizes()
        if absent := [shard.name for shard in shards if not _is_there(shard, sizes)]:
            raise StoreError(
                f"{self._store.url}: {absent[0]} was written and is not there as it was ({len(absent)} shards in all): something "
                "else writes to or empties this folder. Run the same packing again: it packs what is missing"
            )

    def _clean(self, manifest: Manifest) -> None:
        """Removes what is of no use any more: other generations, notes, the claim."""
        claimed = self._claimed()
        kept = {name for shard in manifest.shards for name in (shard.name, shard.index.name)}
        under_way = set() if claimed == self.name else {claimed}
        found = [each.key for each in self._store.list_objects()]
        ours = [(key, match[1]) for key in found if (match := _OURS.fullmatch(key)) is not None]
        self._store.delete([key for key, generation in ours if key not in kept and generation not in under_way])
        faults.hit("cleaning")
        if claimed == self.name:
            self._store.delete([CLAIM])


def _is_there(shard: ShardEntry, sizes: dict[str, int]) -> bool:
    return sizes.get(shard.name) == shard.nbytes and sizes.get(shard.index.name) == shard.index.nbytes


def _of_manifest(manifest: Manifest) -> list[Record]:
    found, first = [], 0
    for shard in manifest.shards:
        found.append(Record(first, manifest.extensions, shard))
        first += shard.num_samples
    return found
