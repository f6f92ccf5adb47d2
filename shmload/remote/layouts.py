"""Data as they lie: how samples are found and decoded in shards that other programs wrote.

    layout     object                           a sample is
    tar        .tar                             the members of one key, as bytes
    tfrecord   .tfrecord, .tfrecords            a record, with the features of its Example
    jsonl      .jsonl, .ndjson                  a line: the fields of its object
    npy        .npy                             a row of the first axis, as "data"
    parquet    .parquet                         a row: its columns
    mds        .mds, named by an index.json     a sample of MosaicML Streaming
    litdata    .bin, named by an index.json     an item of LitData
    files      an image, a sound, anything      the object itself, under its extension

The index of a tar shard that nobody has indexed is made out of its headers. A file's worth of address space stands for the shard.
What is read is put where it belongs, and the scan of a whole shard goes over it: the same checks, the same index. Pieces of a few
MiB are read while members are small, for those hold many headers; what a large member holds is passed over and takes no memory, as
nobody looks at it.

Formats: https://www.tensorflow.org/tutorials/load_data/tfrecord, https://parquet.apache.org/docs/file-format/,
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, https://jsonlines.org.
"""

from __future__ import annotations

import io
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np

from shmload._core import tar
from shmload._core.crc32c import crc32c, masked
from shmload._core.records import example_features, record_starts
from shmload.batch.element_types import of_any
from shmload.errors import ShardCorrupt
from shmload.formats.compression import compression_of
from shmload.formats.paths import npy_head, without_number
from shmload.formats.tar.shards import ShardIndex, pack_index, unpack_index
from shmload.remote.arrow_rows import Parquet
from shmload.remote.block_index import PIECE, BlockLayout, Bounds, Pieces, Read, RecordIndex, ShardLayout
from shmload.remote.chunk_layouts import LitData, Mds, litdata_of

__all__ = [
    "JsonLines",
    "LitData",
    "Mds",
    "NumpyRows",
    "Parquet",
    "PlainFiles",
    "TFRecords",
    "Tar",
    "example_features",
    "layout_named",
    "layout_of",
    "litdata_of",
    "members_span",
    "scan_remote",
]

_BLOCK = 512
_PEEK = 64 << 10  # bytes that the header of an array lies within
_META_LIMIT = 1 << 20  # bytes of a long name or PAX header


def scan_remote(url: str, nbytes: int, read: Read) -> bytes:
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
            stop = min(max(end, begin + PIECE), nbytes)
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


@dataclass(frozen=True)
class Tar:
    """Tar files, as WebDataset has them."""

    name: ClassVar[str] = "tar"

    def scan(self, url: str, nbytes: int, read: Read) -> bytes:
        return scan_remote(url, nbytes, read)

    def pack(self, url: str, data: Any) -> bytes:
        return pack_index(url, data)

    def unpack(self, url: str, packed: Any, nbytes: int) -> ShardIndex | None:
        return unpack_index(url, packed, nbytes)

    def known(self, url: str, nbytes: int) -> None:
        return None

    def sample(self, index: ShardIndex, number: int, read: Read) -> dict[str, Any]:
        begin, nbytes = self.span(index, number)
        data = memoryview(read(begin, nbytes))
        return {extension: bytes(data[offset - begin : offset - begin + size]) for extension, offset, size in index.members(number)}

    def span(self, index: ShardIndex, number: int) -> tuple[int, int]:
        return members_span(index.members(number))


def members_span(members: list[tuple[str, int, int]]) -> tuple[int, int]:
    """The (offset, nbytes) of a sample's members, which lie next to each other; as ranges are given everywhere."""
    begin = min(offset for _, offset, _ in members)
    return begin, max(offset + size for _, offset, size in members) - begin


# ------------------------------------------------------------ one sample each


@dataclass(frozen=True)
class PlainFiles(BlockLayout):
    """Objects that are a sample each: images, sounds. The field is the object's extension, the key its name without that."""

    name: ClassVar[str] = "files"

    def known(self, url: str, nbytes: int) -> RecordIndex:
        return RecordIndex(url, np.array([0, nbytes], np.int64))

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        return self.known(url, nbytes)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        name = index.path.rsplit("/", 1)[-1]
        extension = name.rpartition(".")[2].lower() if "." in name else "data"
        return {"__key__": index.path.rpartition(".")[0] if "." in name else index.path, extension: bytes(data)}


@dataclass(frozen=True)
class JsonLines(BlockLayout):
    """Lines of JSON. What is no object becomes the field "value". Blank lines are passed over."""

    name: ClassVar[str] = "jsonl"

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        ends: list[Bounds] = []
        before = b""  # of the line that the piece begins in: its first byte that is not blank
        for at in range(0, nbytes, PIECE):
            piece = bytes(memoryview(read(at, min(PIECE, nbytes - at))).cast("B"))
            if at == 0 and (packing := compression_of(piece)):
                raise ShardCorrupt(f"{url}: at byte 0: JSON is needed, and this is compressed ({packing})")
            found = np.flatnonzero(np.frombuffer(piece, np.uint8) == 10) + 1
            starts = np.concatenate([[0], found[:-1]]) if len(found) else found
            maybe = np.flatnonzero(np.isin(np.frombuffer(piece, np.uint8)[starts], list(_BLANKS)))
            blank = [k for k in maybe.tolist() if not (k == 0 and before) and not piece[starts[k] : found[k]].strip(_BLANKS)]
            before = (piece[found[-1] :] if len(found) else before + piece).lstrip(_BLANKS)[:1]
            ends.append(np.delete(found, blank) + at)  # a blank line goes with the line behind it
        if before:
            ends.append(np.array([nbytes]))
        bounds = np.concatenate([np.zeros(1, np.int64), *ends]).astype(np.int64)
        return RecordIndex(url, bounds)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        found = json.loads(bytes(data))
        return found if isinstance(found, dict) else {"value": found}


_BLANKS = b" \t\r\n"  # white space of JSON


@dataclass(frozen=True)
class NumpyRows(BlockLayout):
    """Rows of an array in C order, counted by its first axis, as the field "data"."""

    name: ClassVar[str] = "npy"

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        file = io.BytesIO(bytes(memoryview(read(0, min(_PEEK, nbytes))).cast("B")))
        try:
            shape, is_fortran, dtype = npy_head(file)
        except Exception as error:  # numpy's parser raises whatever a hostile header provokes
            raise ShardCorrupt(f"{url}: is no .npy file: {error}") from error
        if (is_fortran and len(shape) > 1) or dtype.kind not in "biufc" or not shape:
            raise ShardCorrupt(
                f"{url}: rows of an array in C order, of numbers, are needed; this is {dtype} of shape {shape}"
                + (", in Fortran order: save it again with numpy.ascontiguousarray" if is_fortran else "")
            )
        begin, stride = file.tell(), dtype.itemsize * math.prod(shape[1:])
        if begin + stride * shape[0] != nbytes or min(shape) < 0 or shape[0] > nbytes:
            raise ShardCorrupt(
                f"{url}: {dtype} of shape {shape} takes {begin + stride * shape[0]} bytes, and the object has {nbytes}"
            )
        bounds = begin + stride * np.arange(shape[0] + 1, dtype=np.int64)
        return RecordIndex(url, bounds, extra=json.dumps([dtype.str, shape[1:]]).encode())

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        stored, native, shape = _row_of(index.extra)
        return {"data": np.frombuffer(data, stored).reshape(shape).astype(native)[()]}


@lru_cache(maxsize=16)
def _row_of(extra: bytes) -> tuple[np.dtype[Any], np.dtype[Any], list[int]]:
    dtype, shape = json.loads(extra)
    return np.dtype(dtype), np.dtype(dtype).newbyteorder("="), shape


# ------------------------------------------------------------ TFRecord


@dataclass(frozen=True)
class TFRecords(BlockLayout):
    """Records of Examples. Checksums are compared.

    Args:
        schema: the features that samples have, with type and shape as TFRecordDataset's: {"label": "int64", "name": str, "x":
            ("float32", (3,)), "image": bytes}. None: all there are, numbers as arrays of shape `(n,)`, bytes as bytes or a list.
        is_example: False: the record itself, as the field "data".
    """

    name: ClassVar[str] = "tfrecord"
    schema: Mapping[str, Any] | None = None
    is_example: bool = True

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        pieces = Pieces(nbytes, read)
        bounds, at = [0], 0
        while at < nbytes:
            head = bytes(pieces(at, 12))
            if len(head) < 12 or masked(crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
                what = "the record's header is cut" if len(head) < 12 else "the checksum of the record's length differs"
                raise ShardCorrupt(f"{url}: record {len(bounds) - 1}, at byte {at}: {what}, or this is no TFRecord file")
            at += 16 + int.from_bytes(head[:8], "little")
            bounds.append(at)
        return self._whole(url, nbytes, np.array(bounds, np.int64))

    def pack(self, url: str, data: Any) -> bytes:
        text, problem, _ = record_starts(data)
        if problem:
            return super().pack(url, data)  # which says what and where
        nbytes = memoryview(data).nbytes
        return self._packed(url, nbytes, self._whole(url, nbytes, np.frombuffer(text, np.int64)))

    def _whole(self, url: str, nbytes: int, bounds: Bounds) -> RecordIndex:
        if bounds[-1] != nbytes:
            raise ShardCorrupt(f"{url}: record {len(bounds) - 2}, at byte {bounds[-2]}: goes beyond the end of the object")
        return RecordIndex(url, bounds)

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        record = bytes(data[12:-4])
        if masked(crc32c(record)) != int.from_bytes(data[-4:], "little"):
            raise ValueError("the checksum of its data differs")
        if not self.is_example:
            return {"data": record}
        try:
            found = example_features(record)
        except ValueError as error:
            raise ValueError(f"is no Example ({error}): TFRecords(is_example=False) gives its bytes") from error
        if self.schema is None:
            return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in found.items()}
        return {name: _of_schema(name, spec, found) for name, spec in self.schema.items()}


def _of_schema(name: str, spec: Any, features: Mapping[str, Any]) -> Any:
    """A feature as the schema has it, and as TFRecordDataset would: no number is rounded, and one of several bytes is none."""
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    if name not in features and None not in shape:
        raise ValueError(f"has no feature {name!r}; it has {sorted(features)}")
    values = features.get(name, [])  # one that differs in length is empty where it is lacking
    if dtype in (str, bytes):
        if not isinstance(values, list) or len(values) != 1:
            raise ValueError(f"feature {name!r}: one value of bytes is needed for {dtype.__name__}; it has {_shown(values)}")
        return values[0].decode() if dtype is str else values[0]
    if (wanted := of_any(dtype).numpy) is None:
        raise ValueError(f"feature {name!r}: {dtype} is no type of numpy's; convert it later")
    if isinstance(values, list):
        is_kept, found = len(values) <= 1, np.frombuffer(b"".join(values), wanted).copy()
    elif values.dtype.kind == "f":
        is_kept, found = not values.size or wanted in (np.float32, np.float64), values.astype(wanted)
    else:
        found = values.astype(wanted)
        is_kept = not values.size or (wanted.kind in "iub" and np.array_equal(found, values))
    sizes = [-1 if size is None else int(size) for size in shape]
    if is_kept and sizes.count(-1) <= 1 and (found.size == np.prod(sizes, dtype=int) or -1 in sizes):
        return (found.reshape(sizes) if found.size else found.reshape([max(size, 0) for size in sizes]))[()]
    raise ValueError(f"feature {name!r}: {wanted} of shape {tuple(shape)} is needed; it has {_shown(values)}")


def _shown(values: Any) -> str:
    if isinstance(values, list):
        return f"{len(values)} values of bytes"
    return f"{values.size} values of {values.dtype}" + (f", from {values.min()} to {values.max()}" if values.size else "")


# ------------------------------------------------------------ which is it?

_SUFFIXES: dict[str, type[Any]] = {
    ".tar": Tar,
    ".tfrecord": TFRecords,
    ".tfrecords": TFRecords,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".npy": NumpyRows,
    ".parquet": Parquet,
    ".mds": Mds,
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"), PlainFiles),
    **dict.fromkeys((".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4"), PlainFiles),
}
_NAMED = {each.name: each for each in (Tar, TFRecords, JsonLines, NumpyRows, Parquet, Mds, PlainFiles)}


def layout_of(key: str) -> ShardLayout | None:
    """What a name, without the ending of a compression, tells of an object's layout."""
    name = without_number(key.rsplit("/", 1)[-1].lower())
    return next((kind() for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def layout_named(given: str | ShardLayout) -> ShardLayout:
    """The layout of a name, or a fresh one like what is given: what it keeps of shards is one dataset's, as they may be replaced.

    Raises:
        ValueError: none has that name.
    """
    if not isinstance(given, str):
        return replace(cast(Any, given)) if is_dataclass(given) else given
    if given not in _NAMED:
        raise ValueError(f"layout is one of {', '.join(_NAMED)}, or of the classes of shmload.remote.layouts; got {given!r}")
    return _NAMED[given]()
