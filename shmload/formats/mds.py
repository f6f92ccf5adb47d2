"""The format MDS: shards of MosaicML Streaming, version 2. Each shard defines what the bytes of its columns mean.

An index.json lists the shards of a dataset.

Format: https://github.com/mosaicml/streaming (its MDSWriter).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import SCALARS, Read, RecordIndex
from shmload.formats.chunk_values import offsets_table, raw_image, sized_parts, text_of, unpickled
from shmload.formats.compression import split_compression
from shmload.formats.head import Head
from shmload.formats.index_json import IndexJson, ListedShard, UnsupportedIndex, describe_folder, peek_index, read_index
from shmload.formats.litdata.litdata_values import nested_value
from shmload.formats.summary import Summary

_MDS_CODES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_MDS_PLAIN: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes,
    "str": text_of,
    "int": lambda data: int.from_bytes(bytes(data), "little", signed=True),
    "str_int": lambda data: int(text_of(data)),
    "str_float": lambda data: float(text_of(data)),
    "str_decimal": lambda data: Decimal(text_of(data)),
    "json": nested_value,
    "jpeg": bytes,
    "png": bytes,
    "pil": raw_image,
    "jpeg_array": lambda data: [bytes(part) for part in sized_parts(data, 0)],
    "jpegarray": lambda data: [bytes(part) for part in sized_parts(data, 0)],
}


def _mds_array(data: Any, config: str) -> NDArray[Any]:
    """Return a new array. Its dtype and shape are in `config`, such as "int32:2,3"; what is missing there precedes the values."""
    dtype, _, sizes = config.partition(":")
    at = 0
    if not dtype:
        dtype, at = _MDS_CODES[data[0]], 1
    if sizes:
        shape = [int(size) for size in sizes.split(",")]
    else:
        ndim, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = np.frombuffer(data, f"<u{width}", ndim, at + 1).tolist()
        at += 1 + ndim * width
    return np.frombuffer(data, np.dtype(dtype), offset=at).reshape(shape).copy()


def _mds_value(encoding: str, data: Any, allow_pickle: bool) -> Any:
    name, _, config = encoding.partition(":")
    if name == "ndarray":
        return _mds_array(data, config)
    if name == "pkl":
        return unpickled(data, allow_pickle)
    if name in SCALARS:
        return np.frombuffer(data, name)[0]
    if name.startswith("list[") and name.endswith("]"):
        return [_mds_value(name[5:-1], part, allow_pickle) for part in sized_parts(data, 4)]
    if name not in _MDS_PLAIN:
        raise ValueError(f"encoding {encoding!r} is not known here")
    return _MDS_PLAIN[name](data)


@lru_cache(maxsize=64)
def _columns_of(extra: bytes) -> tuple[list[str], list[str], list[int | None]]:
    config = json.loads(extra)
    return config["column_names"], config["column_encodings"], config["column_sizes"]


@dataclass(frozen=True)
class Mds(BlockFormat):
    """Shards of MosaicML Streaming, version 2. Encoded images stay bytes; raw PIL images become arrays (height, width, channels).

    Args:
        allow_pickle: read columns of pickles, which can run any code.
    """

    name: ClassVar[str] = "mds"
    title: ClassVar[str] = "MDS"
    endings: ClassVar[tuple[str, ...]] = (".mds",)
    allow_pickle: bool = False

    def recognize(self, head: Head) -> bool:
        return "shards" in peek_index(head.path) if head.is_folder else super().recognize(head)

    def describe(self, head: Head, num_samples: int) -> Summary:
        if not head.is_folder:
            return super().describe(head, num_samples)
        return describe_folder(read_index(head.path, self), head, num_samples)

    def listed(self, index: Mapping[str, Any], where: str) -> IndexJson | None:
        if "shards" not in index:
            return None
        return IndexJson(self, [_listed_shard(shard, where) for shard in index["shards"]])

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        bounds, end = offsets_table(url, nbytes, read)
        extra = bytes(memoryview(read(end, int(bounds[0]) - end)).cast("B"))
        try:
            config = json.loads(extra)
            columns = [config[f"column_{what}"] for what in ("names", "encodings", "sizes")]
            is_sound = len(set(map(len, columns))) == 1 and all(isinstance(name, str) for each in columns[:2] for name in each)
            is_sound &= all(size is None or (isinstance(size, int) and size >= 0) for size in columns[2])
        except (ValueError, KeyError, TypeError, RecursionError):
            is_sound = False
        if not is_sound:
            raise ShardCorrupt(f"{url}: at byte {end}: the columns of an MDS shard are needed; there is {extra[:40]!r}")
        return RecordIndex(url, bounds, extra=extra)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        names, encodings, fixed = _columns_of(index.extra)
        varying = [k for k, size in enumerate(fixed) if not size]
        sizes = [size or 0 for size in fixed]
        for k, size in zip(varying, np.frombuffer(data, "<u4", len(varying)).tolist(), strict=True):
            sizes[k] = size
        if (end := 4 * len(varying) + sum(sizes)) != len(data):
            raise ValueError(f"its columns have {end} bytes, and it has {len(data)}")
        at, found = 4 * len(varying), {}
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            try:
                found[name] = _mds_value(encoding, data[at : at + size], self.allow_pickle)
            except (ValueError, LookupError, ArithmeticError, struct.error) as error:
                raise ValueError(f"column {name!r} ({encoding}): {error}") from error
            at += size
        return found


def _listed_shard(shard: Mapping[str, Any], where: str) -> ListedShard:
    """Parse the entry of a shard in an index.json."""
    if shard["format"] != "mds" or shard["version"] != 2:
        found = f"{shard['format']} in version {shard['version']}"
        raise UnsupportedIndex(f"{where}: has shards of {found}; only mds in version 2 is supported")
    zipped = shard["zip_data"]
    compression = split_compression(zipped["basename"])[1] if zipped else ""
    if zipped and not compression:
        found = shard["compression"]
        raise UnsupportedIndex(f"{where}: shards are compressed by {found}; only zstd, gz, bz2, br and snappy are supported")
    key, nbytes = (zipped or shard["raw_data"])["basename"], shard["raw_data"]["bytes"]
    return ListedShard(str(key), int(nbytes), int(shard["samples"]), compression)
