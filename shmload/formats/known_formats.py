"""The registry of formats: find the format for a name, or for the first bytes of a file.

Installed packages add formats by entry points of the group "shmload.formats", which name their classes.
"""

from __future__ import annotations

import logging
from dataclasses import is_dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from shmload.formats.file_names import without_number
from shmload.formats.format import Format, ShardFormat
from shmload.formats.hdf5 import HDF5
from shmload.formats.head import Head, head_of
from shmload.formats.index_json import IndexJson, parse_index
from shmload.formats.json_lines import JsonLines
from shmload.formats.litdata.litdata_format import LitData
from shmload.formats.mds import Mds
from shmload.formats.megatron import MegatronTokens
from shmload.formats.npy import NumpyRows
from shmload.formats.parquet.parquet_format import Parquet
from shmload.formats.plain_files import PlainFiles
from shmload.formats.safetensors import Safetensors
from shmload.formats.tar.tar_format import Tar
from shmload.formats.tfrecord.tfrecord_format import TFRecords
from shmload.formats.zarr import Zarr

__all__ = ["formats", "is_shard_format", "layout_named", "layout_of", "named_by_index", "recognize", "recognize_path", "register"]

log = logging.getLogger("shmload")

_FORMATS: list[type[Any]] = [  # in the order in which they are tried
    NumpyRows,
    Parquet,
    HDF5,
    Safetensors,
    Zarr,
    Tar,
    TFRecords,
    JsonLines,
    Mds,
    LitData,
    PlainFiles,
    MegatronTokens,
]


def register(format: type[Format]) -> None:
    """Make a format known by its name, by the names of files, and by their first bytes, until the program ends.

    A class with the name of a known format replaces it. Worker processes do not need to call this, because shards are sent to them
    with their format.

    Args:
        format: the class of a format; calling it without arguments returns a format with its default options.
    Raises:
        TypeError: a part of the protocol is missing.
    """
    if missing := [part for part in ("name", "recognize", "index", "decode", "describe") if not hasattr(format, part)]:
        raise TypeError(f"{format.__qualname__} is not a format: it has no {', '.join(missing)}")
    _FORMATS[:] = [format, *(known for known in _FORMATS if known.name != format.name)]


def formats() -> list[Format]:
    """Return all formats with their default options, in the order in which they are tried."""
    _load_plugins()
    return [cast(Format, kind()) for kind in _FORMATS]


@cache
def _load_plugins() -> None:
    """Register the formats of installed packages, once. A format that cannot be imported is logged and left out."""
    for entry in entry_points(group="shmload.formats"):
        try:
            register(entry.load())
        except Exception as error:  # raised by the code of another package
            log.warning("the format %s of %s is left out: %s: %s", entry.name, entry.value, type(error).__name__, error)


def is_shard_format(format: Any) -> bool:
    """Return whether `RemoteDataset` can read a format, as a `ShardFormat`."""
    return hasattr(format, "scan")


def recognize(head: Head) -> Format | None:
    """Return the format that the beginning of a file or object belongs to, or None."""
    return next((format for format in formats() if format.recognize(head)), None)


def recognize_path(path: Path) -> tuple[Format, Head]:
    """Return the format of a file or folder, and its head.

    Args:
        path: path of the file or folder.
    Raises:
        OSError: it cannot be read.
        ValueError: it is empty, or of an unknown format.
    """
    head = head_of(path)
    if (found := recognize(head)) is not None:
        return found, head
    known = ", ".join(kind.title or kind.name for kind in _FORMATS)
    inside = f"what is compressed by {head.compression} in it" if head.compression else "it"
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    remedy = ". Convert it to Parquet, or read a list of paths by SharedIndex.from_manifest (docs/arrays.md)" if is_csv else ""
    raise ValueError(f"{path}: {inside} has no known format ({known}){remedy}")


def layout_of(key: str) -> ShardFormat | None:
    """Return a format that `RemoteDataset` can read and that the name of an object indicates, or None.

    Args:
        key: key of the object, without the ending of a compression.
    """
    _load_plugins()
    name = without_number(key.rsplit("/", 1)[-1].lower())
    return next((kind() for kind in _FORMATS if kind.endings and name.endswith(kind.endings) and is_shard_format(kind)), None)


def layout_named(given: str | ShardFormat) -> ShardFormat:
    """Return the format with a given name, or a copy of a given format.

    The copy is needed because a format may have caches, which must not be shared by the shards of two datasets. A format that is
    not a dataclass is returned itself.

    Args:
        given: a name, or a format with options.
    Raises:
        ValueError: no format has that name.
    """
    if not isinstance(given, str):
        return replace(cast(Any, given)) if is_dataclass(given) else given
    _load_plugins()
    named = {kind.name: kind for kind in _FORMATS if is_shard_format(kind)}
    if given not in named:
        raise ValueError(f"layout must be one of {', '.join(named)}, or an object of shmload.remote.layouts, got {given!r}")
    return cast(ShardFormat, named[given]())


def named_by_index(data: bytes, asked: ShardFormat | None, where: str) -> IndexJson:
    """Return the contents of an index.json of any known format.

    Args:
        data: the bytes of the index.json.
        asked: a format with options for reading samples. They apply if the shards are of this format.
        where: path or URL of the index.json, for errors.
    Raises:
        UnsupportedIndex: its shards cannot be read.
        ShardCorrupt: it is damaged, or of no known format.
    """
    return parse_index(data, (asked if isinstance(asked, type(known)) else known for known in formats()), where)
