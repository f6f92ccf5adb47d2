"""Chunks that other loaders wrote: MosaicML Streaming's shards and LitData's, sample by sample.

Both begin with the number of samples and a table of offsets. What a sample's bytes mean, MDS says in each shard, and LitData in
the index.json beside them.

Formats: https://github.com/mosaicml/streaming (its MDSWriter), https://github.com/Lightning-AI/litData (its BinaryWriter).
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt, ShmloadError
from shmload.formats.columns import BlockCache, PerProcess, library
from shmload.formats.compression import expanded_pieces
from shmload.remote.arrow_rows import column_of, value_of
from shmload.remote.block_index import SCALARS, BlockLayout, Bounds, Read, RecordIndex
from shmload.remote.litdata_values import nested_value

__all__ = ["LitData", "Mds", "litdata_of"]


def _table(url: str, nbytes: int, read: Read) -> tuple[Bounds, int]:
    """Where samples begin, as uint32s at the begin say behind their number, and where that table ends."""
    head = bytes(memoryview(read(0, min(4, nbytes))).cast("B"))
    count = int.from_bytes(head, "little")
    end = 4 * (count + 2)
    if len(head) < 4 or end > nbytes:
        raise ShardCorrupt(f"{url}: at byte 0: it says {count} samples, whose table of offsets alone has {end} bytes of {nbytes}")
    bounds = np.frombuffer(memoryview(read(4, end - 4)), "<u4").astype(np.int64)
    if bounds[0] < end or bounds[-1] > nbytes or np.any(bounds[1:] < bounds[:-1]):
        raise ShardCorrupt(f"{url}: at byte 4: the offsets of its {count} samples lie out of order, or beyond its {nbytes} bytes")
    return bounds, end


def _text(data: Any) -> str:
    return bytes(data).decode()


def _pil(data: Any) -> NDArray[np.uint8]:
    """A raw image of PIL: width, height, length of the mode, mode, pixels; an array of shape (height, width[, channels])."""
    width, height, length = struct.unpack_from("<3I", data)
    mode, pixels = _text(data[12 : 12 + length]), data[12 + length :]
    channels = {"L": (), "P": (), "RGB": (3,), "RGBA": (4,), "CMYK": (4,), "YCbCr": (3,), "LA": (2,), "HSV": (3,), "LAB": (3,)}
    if mode not in channels:
        raise ValueError(f"a raw image of mode {mode!r} is not known here; known are {', '.join(channels)}")
    return np.frombuffer(pixels, np.uint8).reshape(height, width, *channels[mode]).copy()


def _sized(data: Any, at: int) -> list[Any]:
    """Parts whose number and lengths stand before them, from `at` on."""
    (count,) = struct.unpack_from("<I", data, at)
    sizes = np.frombuffer(data, "<u4", count, at + 4).tolist()
    at, parts = at + 4 + 4 * count, []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    if at > len(data):
        raise ValueError(f"{count} parts end at byte {at} of {len(data)}")
    return parts


def _unpickled(data: Any, allowed: bool) -> Any:
    if not allowed:
        raise ValueError("it is a pickle, which can run any code as it is read: allow_pickle=True reads it")
    try:
        return pickle.loads(data)
    except pickle.UnpicklingError as error:
        raise ValueError(f"it is a pickle that cannot be read: {error}") from error


_MDS_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"} | {
    64: "uint64",
    65: "int64",
    66: "float64",
}
_MDS_PLAIN: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes,
    "str": _text,
    "int": lambda data: int.from_bytes(bytes(data), "little", signed=True),
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
    "json": nested_value,
    "jpeg": bytes,
    "png": bytes,
    "pil": _pil,
    "jpeg_array": lambda data: [bytes(part) for part in _sized(data, 0)],
    "jpegarray": lambda data: [bytes(part) for part in _sized(data, 0)],
}


def _mds_array(data: Any, config: str) -> NDArray[Any]:
    """An array whose dtype and shape stand in the column's encoding, or before the values."""
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
        return _unpickled(data, allow_pickle)
    if name in SCALARS:
        return np.frombuffer(data, name)[0]
    if name.startswith("list[") and name.endswith("]"):
        return [_mds_value(name[5:-1], part, allow_pickle) for part in _sized(data, 4)]
    if name not in _MDS_PLAIN:
        raise ValueError(f"encoding {encoding!r} is not known here")
    return _MDS_PLAIN[name](data)


@lru_cache(maxsize=64)
def _columns_of(extra: bytes) -> tuple[list[str], list[str], list[int | None]]:
    config = json.loads(extra)
    return config["column_names"], config["column_encodings"], config["column_sizes"]


@dataclass(frozen=True)
class Mds(BlockLayout):
    """Shards of MosaicML Streaming, version 2. Encoded images stay bytes; raw ones of PIL become arrays (height, width, channels).

    Args:
        allow_pickle: read columns of pickles, which can run any code.
    """

    name: ClassVar[str] = "mds"
    allow_pickle: bool = False

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        bounds, end = _table(url, nbytes, read)
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


_LIT_TORCH = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16", "float16"),
    *("", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),  # "" is bfloat16
)
_LIT_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)


def _lit_dtype(kind: str, code: int) -> str:
    known = _LIT_TORCH if kind.endswith("tensor") else _LIT_NUMPY
    if not 0 <= code < len(known) or not known[code]:
        raise ValueError(f"{kind} of type {code} is not known here")
    return known[code]


def _lit_array(kind: str, code: str, data: Any) -> NDArray[Any]:
    """A flat array whose type stands in the format, or one with a header: type, number of axes, axes."""
    if kind.startswith("no_header"):
        return np.frombuffer(data, _lit_dtype(kind, int(code))).copy()
    order = ">" if kind == "tensor" else "<"
    number, ndim = struct.unpack_from(f"{order}2I", data)
    shape = struct.unpack_from(f"{order}{ndim}I", data, 8)
    return np.frombuffer(data, _lit_dtype(kind, number), offset=8 + 4 * ndim).reshape(shape).copy()


_LIT_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "text": _text,
    "bool": lambda data: bytes(data) != b"\0",
    "int": lambda data: int.from_bytes(bytes(data), "little", signed=True),
    "float": lambda data: struct.unpack("<d", data)[0],
    "json": nested_value,
    "pil": _pil,
    "jpeg_array": lambda data: [bytes(part) for part in _sized(data, 0)],
    **dict.fromkeys(("bytes", "jpeg", "image", "file", "audio", "video", "tifffile", "pdf", "nifti", "mesh"), bytes),
}


@dataclass(frozen=True)
class LitData(BlockLayout):
    """Chunks of LitData, as the configuration in their index.json says. Encoded images stay bytes; tensors become arrays.

    Items that are dicts have their keys as fields; of a tuple or list the fields are "0", "1", ...; anything else is "value".

    Args:
        data_format: of each leaf: "int", "no_header_tensor:17".
        tree: how leaves make an item: None is a leaf, a list or a dict holds more of them.
        block_size: tokens of a sample, where chunks are tokens end to end.
        allow_pickle: read leaves of pickles, which can run any code.
        cache_bytes: of chunks that are rows of Arrow, as LitData writes dicts of numbers, bytes and text: what is decoded of them,
            and what is fetched where the cache does not hold them; of frames that hold several items: what they expand to. For
            each dataset in each process.
        encryption: what decrypts items or whole chunks, by its `decrypt(bytes)`: LitData's own FernetEncryption or RSAEncryption,
            or Fernet of the package cryptography. Shown nowhere; worker processes are given it. Copies stay encrypted; what a whole
            chunk decrypts to is kept within `cache_bytes`, and a chunk that is larger is decrypted for each of its items.
        is_zipped: whether each item is a frame of zstd, as its index.json says.
        is_sealed: whether whole chunks are encrypted, as it says, and not their items.
    """

    name: ClassVar[str] = "litdata"
    data_format: tuple[str, ...] = ()
    tree: Any = None
    block_size: int | None = None
    allow_pickle: bool = False
    cache_bytes: int = 1 << 28
    encryption: Any = field(default=None, compare=False, repr=False)
    is_zipped: bool = False
    is_sealed: bool = False
    _decoded: PerProcess[BlockCache] = field(default_factory=PerProcess, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.encryption is not None and not callable(getattr(self.encryption, "decrypt", None)):
            raise TypeError(
                f"encryption has a method decrypt(bytes), as LitData's FernetEncryption; got a {_kind(self.encryption)}"
            )

    @property
    def index_name(self) -> str:
        return self.name if self.block_size is None else f"{self.name}, {self.block_size} tokens"

    def find(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        if not self.is_sealed:
            return self._found(url, nbytes, read)
        (inside, _), _ = self._unsealed(url, nbytes, read)
        return RecordIndex(url, np.array([0, nbytes], np.int64), np.array([0, inside.num_samples], np.int64))

    def _found(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        if bytes(memoryview(read(0, min(nbytes, 8))).cast("B")) == _FRAMED:
            return _of_frames(url, nbytes, read)
        bounds, end = _table(url, nbytes, read)
        if self.block_size is not None:
            kind, _, code = self.data_format[0].partition(":")
            stride = self.block_size * np.dtype(_lit_dtype(kind, int(code))).itemsize
            bounds = end + stride * np.arange((nbytes - end) // stride + 1, dtype=np.int64)
        elif len(bounds) > 1 and bounds[-1] == bounds[0]:
            return _of_arrow(url, nbytes, read, len(bounds) - 1)
        return RecordIndex(url, bounds)

    def _unsealed(self, url: str, nbytes: int, read: Read) -> tuple[tuple[RecordIndex, memoryview], int]:
        """A whole chunk decrypted, where its items lie in that, and how much it holds."""
        try:
            plain = self._decrypted(memoryview(read(0, nbytes)))
        except ValueError as error:
            raise ShardCorrupt(f"{url}: {error}") from error
        return (self._found(url, len(plain), lambda at, size: plain[at : at + size]), plain), len(plain)

    def sample(self, index: RecordIndex, number: int, read: Read) -> dict[str, Any]:
        if index.firsts is None:
            return super().sample(index, number, read)
        cache = self._decoded.get(lambda: BlockCache(self.cache_bytes))
        if not self.is_sealed:
            return self._sample(index, number, read, cache)
        whole = index.span(0)[1]
        inside, plain = cache.get((index.path, "plain"), lambda: self._unsealed(index.path, whole, read))
        if inside.num_samples != index.num_samples:
            raise ShardCorrupt(f"{index.path}: holds {inside.num_samples} items, and its index says {index.num_samples}")
        return self._sample(inside, number, lambda at, nbytes: plain[at : at + nbytes], cache)

    def _sample(self, index: RecordIndex, number: int, read: Read, cache: BlockCache) -> dict[str, Any]:
        if index.firsts is None:
            return super().sample(index, number, read)
        if index.extra:
            return super().sample(index, number, lambda at, nbytes: _framed(index, number, read, cache))
        arrow = library("pyarrow", "parquet")
        try:
            file, rows = cache.get((index.path, "file"), lambda: _opened(arrow, read(*index.span(0))))
            columns = cache.get((index.path, number // rows), lambda: _batch(file, number // rows))
            where = f"{index.path}: sample {number}"
            return {name: value_of(column, number % rows, where, name) for name, column in columns.items()}
        except (arrow.ArrowException, OSError, IndexError, ValueError) as error:
            if isinstance(error, ShmloadError):
                raise
            raise ShardCorrupt(
                f"{index.path}: sample {number}, in the rows of Arrow from byte {index.bounds[0]}: {error}"
            ) from error

    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        if self.block_size is not None:
            return {"value": _lit_array(*self.data_format[0].partition(":")[::2], data)}
        data = self._plain(data)
        sizes = np.frombuffer(data, "<u4", len(self.data_format)).tolist()
        at, leaves = 4 * len(sizes), []
        if at + sum(sizes) != len(data):
            raise ValueError(f"its {len(sizes)} leaves have {at + sum(sizes)} bytes, and it has {len(data)}")
        for kind, size in zip(self.data_format, sizes, strict=True):
            leaves.append(self._leaf(kind, data[at : at + size]))
            at += size
        item = _tree_of(self.tree, iter(leaves))
        if isinstance(item, dict):
            return item
        return {str(k): value for k, value in enumerate(item)} if isinstance(item, list) else {"value": item}

    def _plain(self, data: memoryview) -> memoryview:
        """An item's bytes, decrypted or expanded."""
        if self.encryption is not None and not self.is_sealed:
            data = self._decrypted(data)
        return memoryview(b"".join(expanded_pieces("zst", io.BytesIO(data)))) if self.is_zipped else data

    def _decrypted(self, data: memoryview) -> memoryview:
        try:
            return memoryview(self.encryption.decrypt(bytes(data)))
        except Exception as error:  # a library's own
            raise ValueError(f"it was damaged, or encrypted with another key than that of encryption= ({_kind(error)})") from error

    def _leaf(self, given: str, data: Any) -> Any:
        kind, _, code = given.partition(":")
        if kind in ("tensor", "numpy", "no_header_tensor", "no_header_numpy"):
            return _lit_array(kind, code, data)
        if kind == "pickle":
            return _unpickled(data, self.allow_pickle)
        if kind not in _LIT_PLAIN:
            raise ValueError(f"a leaf of format {given!r} is not known here")
        return _LIT_PLAIN[kind](data)


_FRAMED = b"LDFZ01\0\0"  # begins a chunk whose items are compressed several at once
_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("nbytes", "<u4"), ("expanded", "<u4")])


def _of_frames(url: str, nbytes: int, read: Read) -> RecordIndex:
    """A chunk of frames: its blocks are these, and `extra` says where items lie in what all of them expand to."""
    head = bytes(memoryview(read(0, min(nbytes, 24))).cast("B"))
    if len(head) < 24:
        raise ShardCorrupt(f"{url}: at byte 8: it ends within the head of its frames")
    version, _, count, _, num_frames = struct.unpack_from("<HHIII", head, 8)
    end = 24 + 4 * (count + 1) + _FRAME.itemsize * num_frames
    if version != 1 or not num_frames or end > nbytes:
        raise ShardCorrupt(
            f"{url}: at byte 8: it says {num_frames} frames in version {version} of {count} items; version 1 is read here, and its "
            f"tables lie in its {nbytes} bytes"
        )
    tables = bytes(memoryview(read(24, end - 24)).cast("B"))
    offsets, frames = (
        np.frombuffer(tables, "<u4", count + 1).astype(np.int64),
        np.frombuffer(tables, _FRAME, offset=4 * (count + 1)),
    )
    bounds = np.append(frames["at"], frames["at"][-1:] + frames["nbytes"][-1:]).astype(np.int64)
    firsts = np.append(frames["first"], [count]).astype(np.int64)
    is_sound = bounds[0] >= end and bounds[-1] <= nbytes and firsts[0] == 0 and offsets[0] == 0
    is_sound &= all(np.array_equal(np.diff(a), frames[b]) for a, b in ((bounds, "nbytes"), (firsts, "count")))
    if not is_sound or np.any(np.diff(offsets) < 0) or not np.array_equal(np.diff(offsets[firsts]), frames["expanded"]):
        raise ShardCorrupt(f"{url}: at byte 24: its {num_frames} frames do not hold its {count} items one behind the other")
    return RecordIndex(url, bounds, firsts, tables[: 4 * (count + 1)])


def _framed(index: RecordIndex, number: int, read: Read, cache: BlockCache) -> memoryview:
    """An item's bytes, of the frame that it lies in."""
    block, _ = index.block(number)
    offsets, firsts = np.frombuffer(index.extra, "<u4"), index.firsts
    assert firsts is not None
    begin, at, stop, end = (int(offsets[n]) for n in (firsts[block], number, number + 1, firsts[block + 1]))

    def expanded() -> tuple[memoryview, int]:
        data = b""
        for piece in expanded_pieces("zst", io.BytesIO(memoryview(read(*index.span(block))))):
            data += piece
            if len(data) > end - begin:
                break
        if len(data) != end - begin:
            raise ValueError(f"its frame does not expand to {end - begin} bytes, as its chunk says")
        return memoryview(data), len(data)

    found: memoryview = cache.get((index.path, block), expanded)
    return found[at - begin : stop - begin]


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _of_arrow(url: str, nbytes: int, read: Read, num_samples: int) -> RecordIndex:
    """A chunk whose table of offsets says nothing, and whose end names a file of Arrow's IPC before it."""
    tail = bytes(memoryview(read(max(nbytes - 12, 0), min(nbytes, 12))).cast("B"))
    begin = nbytes - 12 - int.from_bytes(tail[:4], "little")
    if tail[4:] != b"LDARW01\0" or begin < 0:
        raise ShardCorrupt(f"{url}: at byte {max(nbytes - 12, 0)}: its samples have no bytes, and no rows of Arrow follow them")
    return RecordIndex(url, np.array([begin, nbytes - 12], np.int64), np.array([0, num_samples], np.int64))


def _opened(arrow: Any, data: Any) -> tuple[tuple[Any, int], int]:
    """(the file, rows of each of its batches), and how much it holds; of a copy that is mapped room on the disk."""
    view = memoryview(data).cast("B")
    file = library("pyarrow.ipc", "parquet").open_file(arrow.py_buffer(view))
    return (file, max(file.get_batch(0).num_rows, 1)), len(view)


def _batch(file: Any, number: int) -> tuple[dict[str, Any], int]:
    batch = file.get_batch(number)
    batch.validate(full=True)  # pyarrow follows its offsets wherever they lead
    return {name: column_of(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}, batch.nbytes


def _tree_of(spec: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(spec, dict):
        return {name: _tree_of(each, leaves) for name, each in spec.items()}
    return [_tree_of(each, leaves) for each in spec] if isinstance(spec, list) else next(leaves)


def litdata_of(config: Mapping[str, Any], asked: LitData, where: str) -> LitData:
    """The layout of LitData's chunks, as their index.json says.

    Raises:
        ValueError: it says what is not read here.
    """
    loader = config.get("item_loader") or "PyTreeLoader"
    level, encryption = config.get("compression_level"), config.get("encryption") or {"level": None, "algorithm": "nothing"}
    sealed = encryption["level"]
    refused = {
        f"compression_level={level!r}": level not in (None, "chunk", "batch", "sample"),
        f"encryption of level={sealed!r}": sealed not in (None, "chunk", "sample"),
        "tokens encrypted sample by sample": sealed == "sample" and loader == "TokensLoader",
        f"item_loader={loader}": loader not in ("PyTreeLoader", "TokensLoader"),
    }
    if what := [name for name, is_so in refused.items() if is_so]:
        raise ValueError(f"{where}: was written with {', '.join(what)}, which is not read here: optimize it without")
    if (sealed is None) != (asked.encryption is None):
        remedy = "say what decrypts them, layout=LitData(encryption=FernetEncryption.load(file, password))"
        raise ValueError(
            f"{where}: its {'chunks' if sealed == 'chunk' else 'items'} are encrypted by {encryption['algorithm']}: "
            f"{'leave encryption= out' if sealed is None else remedy}"
        )
    if loader == "TokensLoader" and asked.block_size is None:
        raise ValueError(f"{where}: holds tokens end to end: say how many make a sample, layout=LitData(block_size=...)")
    spec = json.loads(config["data_spec"])[1] if config.get("data_spec") else {"type": None, "children_spec": []}
    formats = tuple(map(str, config["data_format"]))
    return replace(asked, data_format=formats, tree=_tree(spec, where), is_zipped=level == "sample", is_sealed=sealed == "chunk")


def _tree(spec: Mapping[str, Any], where: str) -> Any:
    """A spec of torch's pytree as lists, dicts, and None for a leaf."""
    kind, parts = spec["type"], [_tree(part, where) for part in spec["children_spec"]]
    if kind is None:
        return None
    if kind in ("builtins.dict", "collections.OrderedDict"):
        names: Sequence[Any] = json.loads(spec["context"])
        return {str(name): part for name, part in zip(names, parts, strict=True)}
    if kind in ("builtins.list", "builtins.tuple"):
        return parts
    raise ValueError(f"{where}: its items hold a {kind}, which is not read here; dicts, lists and tuples are")
