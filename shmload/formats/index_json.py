"""Read the `index.json` of MosaicML Streaming or LitData, which lists the shards of a dataset and defines their options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shmload.errors import ShardCorrupt
from shmload.formats.format import ShardFormat
from shmload.formats.head import COMPRESSIONS, Head, head_of
from shmload.formats.summary import Summary
from shmload.storage.keys import checked_key

__all__ = [
    "INDEX_NAME",
    "IndexJson",
    "ListedShard",
    "NamedByIndex",
    "UnsupportedIndex",
    "describe_folder",
    "parse_index",
    "peek_index",
    "read_index",
]

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class ListedShard:
    """A shard that an index.json names.

    Attributes:
        key: its name, relative to the folder of the index.
        nbytes: its size in bytes, after decompression if `compression` is given.
        num_samples: number of its samples; None if the index does not define it.
        compression: the ending of the compression of the whole shard, such as "zst", or empty.
    """

    key: str
    nbytes: int
    num_samples: int | None
    compression: str = ""


@dataclass(frozen=True)
class IndexJson:
    """The contents of an index.json.

    Attributes:
        layout: the format of the shards, with the options that the index contains.
        shards: the shards, in the order of the dataset.
    """

    layout: ShardFormat
    shards: list[ListedShard]


class UnsupportedIndex(ValueError):
    """An index.json is valid, but the format cannot read its shards, or not with its options."""


@runtime_checkable
class NamedByIndex(Protocol):
    """A format whose shards may be listed in an index.json."""

    def listed(self, index: Mapping[str, Any], where: str) -> IndexJson | None:
        """Return the contents of an index.json; None if it is not of this format.

        Args:
            index: the parsed index.json.
            where: path or URL of the index.json, for errors.
        Raises:
            UnsupportedIndex: the shards cannot be read; the message begins with `where`.
            LookupError, TypeError, ValueError: the index is damaged; the caller adds `where`.
        """


def parse_index(data: bytes, formats: Iterable[Any], where: str) -> IndexJson:
    """Return the contents of an index.json, parsed by the first of the given formats that recognizes it.

    Args:
        data: the bytes of the index.json.
        formats: the formats to try; those that no index.json names are skipped.
        where: path or URL of the index.json, for errors.
    Raises:
        UnsupportedIndex: its shards cannot be read.
        ShardCorrupt: it is damaged, or of none of the formats.
    """
    try:
        index = json.loads(data)
        for each in formats:
            if isinstance(each, NamedByIndex) and (found := each.listed(index, where)) is not None:
                return found
        raise KeyError("neither shards nor chunks")
    except UnsupportedIndex:
        raise
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ShardCorrupt(f"{where}: is not a valid index of MosaicML Streaming or LitData: {error!r}") from error


def read_index(folder: Path, format: NamedByIndex) -> IndexJson:
    """Return the contents of the index.json of a local folder, which is of the given format.

    Raises:
        OSError: it cannot be read.
        ValueError: as for `parse_index`.
    """
    path = folder / INDEX_NAME
    return parse_index(path.read_bytes(), [format], str(path))


def peek_index(folder: Path) -> Mapping[str, Any]:
    """Return the JSON of the index.json of a local folder; empty if there is none, or if it is not an object of JSON."""
    try:
        found = json.loads((folder / INDEX_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def describe_folder(index: IndexJson, head: Head, num_samples: int) -> Summary:
    """Return the output of `shmload inspect` for a local folder with an index.json. Fields and samples are of its first shard.

    Args:
        index: the contents of its index.json.
        head: head of the folder.
        num_samples: number of samples to show, from the first one on.
    Raises:
        OSError, ValueError: the first shard cannot be read, or is damaged.
    """
    where = os.path.join(head.path, INDEX_NAME)
    if not index.shards:
        raise ValueError(f"{where}: names no shard")
    shard = index.shards[0]
    begin = head_of(head.path / checked_key(shard.key, where))
    begin = replace(begin, compression=begin.compression or COMPRESSIONS.get(shard.compression, ""))
    first = index.layout.describe(begin, num_samples)
    count = sum(shard.num_samples or 0 for shard in index.shards)
    notes = [f"{len(index.shards):,} shards, which {INDEX_NAME} names: fields and sizes are those of the first", *first.notes]
    return Summary(str(head.path), first.format, head.nbytes_in_all(), count, first.fields, first.sizes, first.samples, notes)
