"""The manifest of a packed dataset: which shards it is made of, how large they are, and their checksums.

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

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from typing_extensions import Buffer

from shmload.errors import ShardCorrupt

__all__ = ["MANIFEST_NAME", "IndexEntry", "Manifest", "ShardEntry"]

MANIFEST_NAME = "manifest.json"
FORMAT = "shmload-shards"
VERSION = 1
INDEX_SUFFIX = ".index"
_GENERATION = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{8}")
_SHARD = re.compile(r"shard-[0-9]{6,9}\.tar")
_LARGEST = (1 << 63) - 1

T = TypeVar("T")


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
    def of(cls, given: Any, generation: str, where: str) -> Self:
        """An entry from what `as_dict` made of it.

        Raises:
            ShardCorrupt: it is none, or of another generation; the text begins with `where`.
        """
        try:
            return cls(**_shard(given, "", generation))
        except _Wrong as error:
            raise ShardCorrupt(f"{where}: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """What JSON keeps of it."""
        return asdict(self)


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
        try:
            return cls._of(given)
        except _Wrong as error:
            raise ShardCorrupt(f"{name}: {error}") from None

    @classmethod
    def _of(cls, given: Any) -> Self:
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise _Wrong("", f"a manifest of shards, with format {FORMAT!r}, is needed; this is something else")
        if given.get("version") != VERSION or type(given["version"]) is not int:
            raise _Wrong(
                "version", f"{VERSION} is known here, got {given.get('version')!r}; a newer shmload may read it"
            )
        names = ("format", "version", "generation", "seed", "num_samples", "nbytes", "extensions", "shards")
        _has_exactly(given, names, "")
        generation = _text(given["generation"], "generation", _GENERATION, "16 hexadecimal digits")
        extensions = _each(given["extensions"], "extensions", _extension)
        if list(extensions) != sorted(set(extensions)):
            raise _Wrong("extensions", "they are sorted and each is there once; these are not")
        shards = _each(given["shards"], "shards", lambda one, at: ShardEntry(**_shard(one, at, generation)))
        found = cls(
            generation,
            _number(given["seed"], "seed", at_most=(1 << 64) - 1),
            _number(given["num_samples"], "num_samples"),
            _number(given["nbytes"], "nbytes"),
            extensions,
            shards,
        )
        if len({shard.name for shard in shards}) != len(shards):
            raise _Wrong("shards", "two of them have the same name")
        for what in ("num_samples", "nbytes"):
            told, summed = getattr(found, what), sum(getattr(shard, what) for shard in shards)
            if told != summed:
                raise _Wrong(what, f"it says {told}, and its {len(shards)} shards have {summed}")
        return found

    def dump(self) -> bytes:
        """Its bytes: the same ones for equal manifests."""
        told = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "nbytes": self.nbytes,
            "extensions": list(self.extensions),
            "shards": [shard.as_dict() for shard in self.shards],
        }
        return (json.dumps(told, indent=1) + "\n").encode("ascii")


class _Wrong(Exception):
    """What is wrong in a manifest, and where."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}" if where else what)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object of it says something twice, among {sorted(name for name, _ in pairs)}")
    return found


def _shard(given: Any, where: str, generation: str) -> dict[str, Any]:
    """The arguments of a ShardEntry."""
    before = f"{where}." if where else ""
    _has_exactly(given, ("name", "nbytes", "num_samples", "crc32c", "index"), where)
    name = given["name"]
    folder, _, file = name.partition("/") if isinstance(name, str) else ("", "", "")
    if folder != generation or not _SHARD.fullmatch(file):
        raise _Wrong(f"{before}name", f"{generation}/shard-000000.tar or the like is needed; got {name!r}")
    index = given["index"]
    _has_exactly(index, ("name", "nbytes", "crc32c"), f"{before}index")
    if index["name"] != name + INDEX_SUFFIX:
        raise _Wrong(f"{before}index.name", f"{name + INDEX_SUFFIX} is needed; got {index['name']!r}")
    return {
        "name": name,
        "nbytes": _number(given["nbytes"], f"{before}nbytes", at_least=1),
        "num_samples": _number(given["num_samples"], f"{before}num_samples", at_least=1),
        "crc32c": _text(given["crc32c"], f"{before}crc32c", _DIGEST, "8 hexadecimal digits"),
        "index": IndexEntry(
            index["name"],
            _number(index["nbytes"], f"{before}index.nbytes", at_least=1),
            _text(index["crc32c"], f"{before}index.crc32c", _DIGEST, "8 hexadecimal digits"),
        ),
    }


def _has_exactly(given: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(given, dict):
        raise _Wrong(where, f"an object with {', '.join(names)} is needed; got {_short(given)}")
    if absent := [name for name in names if name not in given]:
        raise _Wrong(where, f"{', '.join(absent)} is missing")
    if unknown := sorted(name for name in given if name not in names):
        raise _Wrong(where, f"{_short(unknown[0])} is not known in version {VERSION}")


def _each(given: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if not isinstance(given, list):
        raise _Wrong(where, f"a list is needed; got {_short(given)}")
    return tuple(read(one, f"{where}[{number}]") for number, one in enumerate(given))


def _number(given: Any, where: str, *, at_least: int = 0, at_most: int = _LARGEST) -> int:
    if type(given) is not int or not at_least <= given <= at_most:
        raise _Wrong(where, f"an integer from {at_least} to {at_most} is needed; got {_short(given)}")
    return given


def _text(given: Any, where: str, pattern: re.Pattern[str], needed: str) -> str:
    if not isinstance(given, str) or not pattern.fullmatch(given):
        raise _Wrong(where, f"{needed} are needed; got {_short(given)}")
    return given


def _extension(given: Any, where: str) -> str:
    if not isinstance(given, str) or not given or given != given.lower() or "/" in given or "\0" in given:
        raise _Wrong(where, f"an extension in lower case, without a slash, is needed; got {_short(given)}")
    return given


def _short(given: Any) -> str:
    shown = repr(given)
    return shown if len(shown) <= 60 else shown[:57] + "..."
