"""The format of LitData's chunks. The index.json next to them defines what the bytes of an item mean.

Format: https://github.com/Lightning-AI/litData (its BinaryWriter).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt, ShmloadError
from shmload.formats.arrow.arrow_reader import ipc_batch, ipc_file
from shmload.formats.arrow.arrow_values import array_or_values, value_of
from shmload.formats.block_cache import BlockCache
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.chunk_values import offsets_table, raw_image, sized_parts, text_of, unpickled
from shmload.formats.compression import expanded_pieces
from shmload.formats.extras import library
from shmload.formats.head import Head
from shmload.formats.index_json import IndexJson, UnsupportedIndex, describe_folder, peek_index, read_index
from shmload.formats.litdata.litdata_frames import FRAMED, framed_item, index_of_frames
from shmload.formats.litdata.litdata_index import PARQUET_LOADER, chunk_config, item_loader_of, listed_chunks
from shmload.formats.litdata.litdata_values import nested_value
from shmload.formats.per_process import PerProcess
from shmload.formats.summary import Summary

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
    """Return a new array: flat and of type `code` without a header, else as its header says (type, number of axes, axes)."""
    if kind.startswith("no_header"):
        return np.frombuffer(data, _lit_dtype(kind, int(code))).copy()
    order = ">" if kind == "tensor" else "<"
    number, ndim = struct.unpack_from(f"{order}2I", data)
    shape = struct.unpack_from(f"{order}{ndim}I", data, 8)
    return np.frombuffer(data, _lit_dtype(kind, number), offset=8 + 4 * ndim).reshape(shape).copy()


_LIT_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": text_of,
    "text": text_of,
    "bool": lambda data: bytes(data) != b"\0",
    "int": lambda data: int.from_bytes(bytes(data), "little", signed=True),
    "float": lambda data: struct.unpack("<d", data)[0],
    "json": nested_value,
    "pil": raw_image,
    "jpeg_array": lambda data: [bytes(part) for part in sized_parts(data, 0)],
    **dict.fromkeys(("bytes", "jpeg", "image", "file", "audio", "video", "tifffile", "pdf", "nifti", "mesh"), bytes),
}


@dataclass(frozen=True)
class LitData(BlockFormat):
    """Chunks of LitData, read according to the configuration in their index.json. Encoded images stay bytes; tensors become arrays.

    If items are dicts, the fields are their keys. If they are tuples or lists, the fields are "0", "1", ... Any other item is the
    field "value".

    Args:
        data_format: format of each leaf, such as "int" or "no_header_tensor:17".
        tree: how leaves make an item: None is a leaf, and a list or a dict contains more of them.
        block_size: number of tokens of a sample, if chunks are tokens end to end.
        allow_pickle: read leaves of pickles, which can run any code.
        cache_bytes: size limit, for each dataset in each process, of decoded chunks. For chunks of Arrow rows, which LitData writes
            for dicts of numbers, bytes and text, it limits the decoded data, and the fetched data if the cache does not hold it.
            For frames that contain several items, it limits the expanded data.
        encryption: an object whose `decrypt(bytes)` decrypts items or whole chunks: LitData's own FernetEncryption or
            RSAEncryption, or Fernet of the package cryptography. It is shown nowhere, and is passed to worker processes. Copies
            stay encrypted; decrypted chunks are kept within `cache_bytes`, and a larger chunk is decrypted for each of its items.
        is_zipped: whether each item is a frame of zstd, according to index.json.
        is_sealed: whether whole chunks are encrypted instead of their items, according to index.json.
    """

    name: ClassVar[str] = "litdata"
    title: ClassVar[str] = "LitData"
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
                f"encryption must have a method decrypt(bytes), like LitData's FernetEncryption, got {_kind(self.encryption)}"
            )

    def recognize(self, head: Head) -> bool:
        if not head.is_local or not (head.is_folder or head.path.suffix == ".bin"):
            return False
        index = peek_index(head.path if head.is_folder else head.path.parent)
        try:
            if item_loader_of(index) in (None, PARQUET_LOADER):
                return False
            return head.is_folder or head.path.name in [chunk["filename"] for chunk in index["chunks"]]
        except (LookupError, TypeError, AttributeError):  # an index.json of another program
            return False

    def describe(self, head: Head, num_samples: int) -> Summary:
        if head.is_folder:
            return describe_folder(read_index(head.path, self), head, num_samples)
        if not self.data_format:
            return read_index(head.path.parent, self).layout.describe(head, num_samples)
        return super().describe(head, num_samples)

    def listed(self, index: Mapping[str, Any], where: str) -> IndexJson | None:
        if item_loader_of(index) in (None, PARQUET_LOADER):
            return None
        config = chunk_config(index, where)
        sealed, algorithm = config.encryption or (None, "nothing")
        if (sealed is None) != (self.encryption is None):
            remedy = "pass what decrypts them, layout=LitData(encryption=FernetEncryption.load(file, password))"
            raise UnsupportedIndex(
                f"{where}: its {'chunks' if sealed == 'chunk' else 'items'} are encrypted by {algorithm}: "
                f"{'leave encryption= out' if sealed is None else remedy}"
            )
        if config.is_tokens and self.block_size is None:
            raise UnsupportedIndex(
                f"{where}: holds tokens end to end: pass the number that makes a sample, layout=LitData(block_size=...)"
            )
        layout = replace(
            self, data_format=config.data_format, tree=config.tree, is_zipped=config.is_zipped, is_sealed=sealed == "chunk"
        )
        return IndexJson(layout, listed_chunks(index))

    @property
    def index_name(self) -> str:
        return self.name if self.block_size is None else f"{self.name}, {self.block_size} tokens"

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        if not self.is_sealed:
            return self._index_of_items(url, nbytes, read)
        (inside, _), _ = self._unsealed(url, nbytes, read)
        return RecordIndex(url, np.array([0, nbytes], np.int64), np.array([0, inside.num_samples], np.int64))

    def _index_of_items(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        if bytes(memoryview(read(0, min(nbytes, 8))).cast("B")) == FRAMED:
            return index_of_frames(url, nbytes, read)
        bounds, end = offsets_table(url, nbytes, read)
        if self.block_size is not None:
            kind, _, code = self.data_format[0].partition(":")
            stride = self.block_size * np.dtype(_lit_dtype(kind, int(code))).itemsize
            bounds = end + stride * np.arange((nbytes - end) // stride + 1, dtype=np.int64)
        elif len(bounds) > 1 and bounds[-1] == bounds[0]:
            return _of_arrow(url, nbytes, read, len(bounds) - 1)
        return RecordIndex(url, bounds)

    def _unsealed(self, url: str, nbytes: int, read: Read) -> tuple[tuple[RecordIndex, memoryview], int]:
        """Read and decrypt a chunk. Return ((index of its items, decrypted chunk), its size in bytes), for the cache."""
        try:
            plain = self._decrypted(memoryview(read(0, nbytes)))
        except ValueError as error:
            raise ShardCorrupt(f"{url}: {error}") from error
        return (self._index_of_items(url, len(plain), lambda at, size: plain[at : at + size]), plain), len(plain)

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
            return super().sample(index, number, lambda at, nbytes: framed_item(index, number, read, cache))
        arrow = library("pyarrow", "parquet")
        try:
            file, rows = cache.get((index.path, "file"), lambda: _opened(read(*index.span(0))))
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
        if not self.data_format:
            raise ValueError("LitData's index.json defines what its bytes mean: give the URL of the folder that has it")
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
        """Return an item's bytes after decryption or decompression."""
        if self.encryption is not None and not self.is_sealed:
            data = self._decrypted(data)
        return memoryview(b"".join(expanded_pieces("zst", io.BytesIO(data)))) if self.is_zipped else data

    def _decrypted(self, data: memoryview) -> memoryview:
        try:
            return memoryview(self.encryption.decrypt(bytes(data)))
        except Exception as error:  # raised by a library
            raise ValueError(f"it was damaged, or encrypted with another key than that of encryption= ({_kind(error)})") from error

    def _leaf(self, given: str, data: Any) -> Any:
        kind, _, code = given.partition(":")
        if kind in ("tensor", "numpy", "no_header_tensor", "no_header_numpy"):
            return _lit_array(kind, code, data)
        if kind == "pickle":
            return unpickled(data, self.allow_pickle)
        if kind not in _LIT_PLAIN:
            raise ValueError(f"a leaf of format {given!r} is not known here")
        return _LIT_PLAIN[kind](data)


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _opened(data: Any) -> tuple[tuple[Any, int], int]:
    """Open the Arrow file of a chunk. Return ((file, rows per batch), size in bytes), for the cache.

    The size counts even if `data` is a map, which takes no memory.
    """
    file = ipc_file(data)
    return (file, max(file.get_batch(0).num_rows, 1)), memoryview(data).nbytes


def _batch(file: Any, number: int) -> tuple[dict[str, Any], int]:
    batch = ipc_batch(file, number)
    return {name: array_or_values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}, batch.nbytes


def _of_arrow(url: str, nbytes: int, read: Read, num_samples: int) -> RecordIndex:
    """Return the index of a chunk of Arrow rows. All its offsets are equal, and an Arrow IPC file is stored near its end.

    The last 12 bytes, after that file, are the file's size, as uint32, and a magic.
    """
    tail = bytes(memoryview(read(max(nbytes - 12, 0), min(nbytes, 12))).cast("B"))
    begin = nbytes - 12 - int.from_bytes(tail[:4], "little")
    if tail[4:] != b"LDARW01\0" or begin < 0:
        raise ShardCorrupt(f"{url}: at byte {max(nbytes - 12, 0)}: its samples have no bytes, and no rows of Arrow follow them")
    return RecordIndex(url, np.array([begin, nbytes - 12], np.int64), np.array([0, num_samples], np.int64))


def _tree_of(spec: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(spec, dict):
        return {name: _tree_of(each, leaves) for name, each in spec.items()}
    return [_tree_of(each, leaves) for each in spec] if isinstance(spec, list) else next(leaves)
