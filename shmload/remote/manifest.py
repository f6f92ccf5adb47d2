"""The manifest of a packed dataset: its shards with their sizes and checksums.

The manifest is one JSON object, `manifest.json` in the dataset's folder. It is written last, by one atomic put, so everything that
it names exists and is complete. Shards are in a folder named after their *generation*. Each packing has its own generation, so a
reader that follows one manifest never mixes the shards of two packings. Appending to a dataset adds a generation after the existing
ones.

    manifest.json                           this file
    <generation>/shard-000000.tar           samples; .tar.zst if shards are compressed
    <generation>/shard-000000.tar.index     packed index of the samples' positions: `formats.tar.shard_index.ShardIndex`

The contents decide what is fetched and how much memory is allocated, and may come from an untrusted source. Every value is
therefore validated, and unknown fields are an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, Self

from typing_extensions import Buffer

from shmload.errors import ObjectMissing, ShardCorrupt

__all__ = ["MANIFEST_NAME", "IndexEntry", "Manifest", "PackedObject", "ShardEntry"]

MANIFEST_NAME = "manifest.json"
FORMAT = "shmload-shards"
VERSION = 1
INDEX_SUFFIX = ".index"
_SHARD = re.compile(r"[0-9a-f]{16}/shard-[0-9]{6,9}\.tar(\.zst)?")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The object that contains the packed index of a shard.

    Attributes:
        name: relative to the dataset's folder.
        nbytes: size of the index.
        crc32c: checksum of its bytes, 8 hexadecimal digits.
    """

    name: str
    nbytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class PackedObject:
    """The stored object of a compressed shard.

    Attributes:
        nbytes: size of the object.
        crc32c: checksum of its bytes, 8 hexadecimal digits.
    """

    nbytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard, as the manifest lists it.

    Attributes:
        name: relative to the dataset's folder: "<generation>/shard-000000.tar", followed by ".zst" if it is compressed.
        nbytes: size of the tar file.
        num_samples: number of samples in the shard.
        crc32c: checksum of the tar file, 8 hexadecimal digits.
        index: the object with the positions of the samples.
        packed: the stored object if the shard is compressed; None if the tar file itself is stored.
    """

    name: str
    nbytes: int
    num_samples: int
    crc32c: str
    index: IndexEntry
    packed: PackedObject | None = None

    @property
    def generation(self) -> str:
        """Return the generation that contains the shard."""
        return self.name.partition("/")[0]

    @property
    def stored(self) -> tuple[int, str]:
        """Return the size and checksum of the object in the store."""
        return (self.nbytes, self.crc32c) if self.packed is None else (self.packed.nbytes, self.packed.crc32c)

    @classmethod
    def of(cls, given: Any, where: str, place: str = "") -> Self:
        """Create an entry from its JSON form.

        Raises:
            ShardCorrupt: it is not valid; the message begins with `where` and names the place within it.
        """
        before = f"{place}." if place else ""
        _check(given, _SHARD_KINDS, where, place, optional={"packed": _ANY})
        name, index, packed = given["name"], given["index"], given.get("packed")
        if not isinstance(name, str) or not _SHARD.fullmatch(name) or name.endswith(".zst") != ("packed" in given):
            raise _wrong(where, f"{before}name", f"0123456789abcdef/shard-000000.tar or the like is needed; got {_short(name)}")
        if "packed" in given:
            _check(packed, _PACKED_KINDS, where, f"{before}packed")
        _check(index, _INDEX_KINDS, where, f"{before}index")
        if index["name"] != name + INDEX_SUFFIX:
            raise _wrong(where, f"{before}index.name", f"{name + INDEX_SUFFIX} is needed; got {index['name']!r}")
        return cls(**{**given, "index": IndexEntry(**index), "packed": None if packed is None else PackedObject(**packed)})

    def as_json(self) -> dict[str, Any]:
        """Return the entry in its JSON form, which `of` accepts."""
        found = asdict(self)
        return found if self.packed is not None else {name: value for name, value in found.items() if name != "packed"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a packed dataset.

    Attributes:
        generation: generation of the newest shards, 16 hexadecimal digits, different for different contents. Shards of earlier
            generations come first.
        seed: seed of the order in which samples were packed.
        num_samples: number of samples in all shards.
        nbytes: size of all shards, without their indexes.
        extensions: extensions of all members, sorted.
        shards: the shards, in order.
        key: fingerprint of the key that all members are encrypted with; "" if they are not.
    """

    generation: str
    seed: int
    num_samples: int
    nbytes: int
    extensions: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    key: str = ""

    @property
    def digest(self) -> str:
        """Return a hash of the shards and their order: 16 hexadecimal digits."""
        return sha256(json.dumps([shard.as_json() for shard in self.shards]).encode("ascii")).hexdigest()[:16]

    @property
    def generations(self) -> tuple[str, ...]:
        """Return the generations that were appended to each other, the oldest first."""
        return tuple(dict.fromkeys(shard.generation for shard in self.shards))

    def at(self, generation: str) -> Manifest:
        """Return the dataset as it was when `generation` was its newest.

        Args:
            generation: one of its `generations`.
        Raises:
            ObjectMissing: the dataset has no such generation.
        """
        if generation not in self.generations:
            raise ObjectMissing(
                f"the dataset has no generation {generation!r}, only {', '.join(self.generations)}: it was packed again since, or "
                "this is another dataset"
            )
        number = max(number for number, shard in enumerate(self.shards) if shard.generation == generation)
        return self._of(generation, self.shards[: number + 1])

    def before(self) -> Manifest | None:
        """Return the dataset before its newest generation was appended; None if it has only one."""
        return self.at(self.generations[-2]) if len(self.generations) > 1 else None

    def _of(self, generation: str, shards: tuple[ShardEntry, ...]) -> Manifest:
        num_samples, nbytes = (sum(getattr(shard, what) for shard in shards) for what in ("num_samples", "nbytes"))
        return replace(self, generation=generation, num_samples=num_samples, nbytes=nbytes, shards=shards)

    @classmethod
    def parse(cls, data: Buffer, *, name: str = MANIFEST_NAME) -> Self:
        """Parse and validate a manifest.

        Args:
            data: the object's bytes.
            name: URL of the object, for errors.
        Raises:
            ShardCorrupt: it is not a manifest, has an unknown version, or contradicts itself; the message names the place.
        """
        try:
            given = json.loads(bytes(data), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise ShardCorrupt(f"{name}: is not a valid manifest of shards: {error}") from error
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise _wrong(name, "", f"this is not a manifest of shards, which has format {FORMAT!r}")
        if given.get("version") != VERSION or type(given["version"]) is not int:
            raise _wrong(name, "version", f"{VERSION} is known here, got {given.get('version')!r}; a newer shmload may read it")
        _check(given, _MANIFEST_KINDS, name, "", optional={"key": _DIGEST})
        generation, extensions = given["generation"], given["extensions"]
        for number, one in enumerate(extensions):
            if not isinstance(one, str) or not one or one != one.lower() or "/" in one or "\0" in one:
                raise _wrong(
                    name, f"extensions[{number}]", f"an extension in lower case, without a slash, is needed; got {_short(one)}"
                )
        if extensions != sorted(set(extensions)):
            raise _wrong(name, "extensions", "they must be sorted and without duplicates")
        shards = tuple(ShardEntry.of(one, name, f"shards[{number}]") for number, one in enumerate(given["shards"]))
        key = given.get("key", "")
        found = cls(generation, given["seed"], given["num_samples"], given["nbytes"], tuple(extensions), shards, key)
        if shards and shards[-1].generation != generation:
            raise _wrong(name, "generation", f"its last shard is of {shards[-1].generation}, and it says {generation}")
        if len(found.generations) != sum(one.generation != other.generation for one, other in pairwise(shards)) + bool(shards):
            raise _wrong(name, "shards", "the shards of a generation must be adjacent")
        if len({shard.name for shard in shards}) != len(shards):
            raise _wrong(name, "shards", "two of them have the same name")
        for what in ("num_samples", "nbytes"):
            said, summed = getattr(found, what), sum(getattr(shard, what) for shard in shards)
            if said != summed:
                raise _wrong(name, what, f"it says {said}, and its {len(shards)} shards have {summed}")
        return found

    def dump(self) -> bytes:
        """Return the manifest as bytes. Equal manifests give the same bytes."""
        content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["shards"] = [shard.as_json() for shard in self.shards]
        if not self.key:
            del content["key"]
        return (json.dumps(content, indent=1) + "\n").encode("ascii")


def _wrong(name: str, place: str, what: str) -> ShardCorrupt:
    """Return the error for a place in a manifest."""
    return ShardCorrupt(f"{name}: {place}: {what}" if place else f"{name}: {what}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object has duplicate keys, among {sorted(name for name, _ in pairs)}")
    return found


Kind = tuple[Callable[[Any], bool], str]  # returns whether a value is valid; what is needed, in words, for errors


def _text(pattern: str, needed: str) -> Kind:
    matches = re.compile(pattern).fullmatch
    return lambda given: isinstance(given, str) and matches(given) is not None, f"{needed} are"


def _number(at_least: int = 0, at_most: int = (1 << 63) - 1) -> Kind:
    return lambda given: type(given) is int and at_least <= given <= at_most, f"an integer from {at_least} to {at_most} is"


_ANY: Kind = (lambda _: True, "")
_LIST: Kind = (lambda given: isinstance(given, list), "a list is")
_DIGEST = _text("[0-9a-f]{8}", "8 hexadecimal digits")
_INDEX_KINDS = {"name": _ANY, "nbytes": _number(1), "crc32c": _DIGEST}
_PACKED_KINDS = {"nbytes": _number(1), "crc32c": _DIGEST}
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


def _check(given: Any, kinds: dict[str, Kind], name: str, where: str, optional: dict[str, Kind] | None = None) -> None:
    """Raise unless `given` is an object with exactly the required keys, any of the optional keys, and valid values."""
    if not isinstance(given, dict):
        raise _wrong(name, where, f"an object with {', '.join(kinds)} is needed; got {_short(given)}")
    if given.keys() != kinds.keys():  # the usual case needs no more work, because there may be a million shards
        if absent := [key for key in kinds if key not in given]:
            raise _wrong(name, where, f"{', '.join(absent)} is missing")
        kinds = {**kinds, **{key: kind for key, kind in (optional or {}).items() if key in given}}
        if unknown := sorted(given.keys() - kinds.keys()):
            raise _wrong(name, where, f"{_short(unknown[0])} is not known in version {VERSION}")
    for key, (is_right, needed) in kinds.items():
        if not is_right(given[key]):
            raise _wrong(name, f"{where}.{key}" if where else key, f"{needed} needed; got {_short(given[key])}")


def _short(given: Any) -> str:
    shown = repr(given)
    return shown if len(shown) <= 60 else shown[:57] + "..."
