"""Tokens: a Megatron index with the .bin it belongs to, or a raw file whose dtype the user knows.

"MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 sequences | u64 documents | i32 lengths | i64 places | i64 documents' ends
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.observe.inspect.head import Head
from shmload.observe.inspect.summary import Sizes, Summary

NAME = "tokens"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LOOKED_AT = 1_000_000  # tokens whose range is told


def matches(head: Head) -> bool:
    if head.is_folder or head.compression:
        return False
    return head.begin.startswith(_MAGIC) or head.dtype is not None or _has_index(head.path)


def _has_index(path: Path) -> bool:
    beside = path.with_suffix(".idx")
    if path.suffix != ".bin" or not beside.is_file():
        return False
    with open(beside, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def describe(head: Head, num_samples: int) -> Summary:
    if head.begin.startswith(_MAGIC):
        return _indexed(head, head.path, head.path.with_suffix(".bin"), num_samples)
    if head.dtype is None:
        return _indexed(head, head.path.with_suffix(".idx"), head.path, num_samples)
    try:
        dtype = np.dtype(head.dtype)
    except TypeError as error:
        raise ValueError(f"--dtype {head.dtype!r} is no type of numbers: {error}") from error
    if dtype.kind not in "iu" or head.nbytes % dtype.itemsize:
        raise ValueError(f"{head.path}: {head.nbytes:,} bytes are no whole number of {dtype} tokens")
    tokens = np.memmap(head.path, dtype, "r")
    found = Summary(str(head.path), NAME, head.nbytes, len(tokens), {"token": str(dtype)})
    found.samples = [{"tokens": np.array(tokens[:64])}] if num_samples else []
    found.notes += [
        f"samples are tokens here; windows of them are made by TokenDataset(path, dtype={str(dtype)!r})",
        _range(tokens),
    ]
    return found


def _indexed(head: Head, idx: Path, bin: Path, num_samples: int) -> Summary:
    """A Megatron pair."""
    with open(idx, "rb") as file:
        head_bytes, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        if len(head_bytes) < _HEADER.size:
            raise ShardCorrupt(f"{idx}, offset {len(head_bytes)}: truncated: the header has {_HEADER.size} bytes")
        _, version, code, count, num_documents = _HEADER.unpack(head_bytes)
        if version != 1 or code not in _DTYPES:
            raise ShardCorrupt(f"{idx}, offset 9: version {version} and dtype {code} are none of Megatron's")
        if size != _HEADER.size + 12 * count + 8 * num_documents:
            raise ShardCorrupt(
                f"{idx}, offset {_HEADER.size}: truncated or damaged: {count:,} sequences and {num_documents:,} documents do "
                f"not make "
                f"its {size:,} bytes"
            )
        lengths = np.frombuffer(file.read(4 * count), "<i4").astype(np.int64)
        places = np.frombuffer(file.read(8 * count), "<i8")
    dtype = np.dtype(_DTYPES[code])
    nbytes = os.path.getsize(bin)
    if count and ((lengths < 0).any() or (places < 0).any() or (places + lengths * dtype.itemsize > nbytes).any()):
        raise ShardCorrupt(f"{idx}: sequences do not lie within {bin}, which has {nbytes:,} bytes")
    found = Summary(str(head.path), "tokens, Megatron", nbytes + size, count, {"tokens": f"{dtype} (any,)"})
    found.sizes = Sizes.of(lengths * dtype.itemsize)
    if nbytes:
        data = np.memmap(bin, np.uint8, "r")
        runs = zip(places[:num_samples].tolist(), lengths[:num_samples].tolist(), strict=True)
        found.samples = [
            {"tokens": np.frombuffer(data[start : start + length * dtype.itemsize].tobytes(), dtype)}
            for start, length in runs
        ]
    found.notes.append(f"{int(lengths.sum()):,} tokens in {max(num_documents - 1, 0):,} documents")
    return found


def _range(tokens: np.ndarray[tuple[int], np.dtype[np.integer]]) -> str:
    part = tokens[:_LOOKED_AT]
    what = "tokens" if len(part) == len(tokens) else f"the first {len(part):,}"
    return f"{what} are {int(part.min())} to {int(part.max())}"
