"""Tokens: a Megatron index with the .bin it belongs to, or a raw file whose dtype the user knows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.tokens import MAGIC, read_index
from shmload.tools.inspect.summary import Head, Sizes, Summary

NAME = "tokens"
_LOOKED_AT = 1_000_000  # tokens whose range is told


def matches(head: Head) -> bool:
    if head.is_folder or head.compression:
        return False
    return head.begin.startswith(MAGIC) or head.dtype is not None or _has_index(head.path)


def _has_index(path: Path) -> bool:
    beside = path.with_suffix(".idx")
    if path.suffix != ".bin" or not beside.is_file():
        return False
    with open(beside, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def describe(head: Head, num_samples: int) -> Summary:
    if head.begin.startswith(MAGIC):
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
    """A Megatron pair: its documents are the samples."""
    dtype_name, offsets = read_index(idx)
    dtype, nbytes = np.dtype(dtype_name), os.path.getsize(bin)
    if int(offsets[-1]) * dtype.itemsize != nbytes:
        raise ShardCorrupt(
            f"{idx}: its {int(offsets[-1]):,} tokens of {dtype} do not make the {nbytes:,} bytes of {bin}"
        )
    count = len(offsets) - 1
    found = Summary(
        str(head.path), "tokens, Megatron", nbytes + os.path.getsize(idx), count, {"tokens": f"{dtype} (any,)"}
    )
    found.sizes = Sizes.of(np.diff(offsets) * dtype.itemsize)
    if nbytes:
        tokens = np.memmap(bin, dtype, "r")
        found.samples = [
            {"tokens": np.array(tokens[offsets[i] : offsets[i + 1]])} for i in range(min(num_samples, count))
        ]
    found.notes.append(f"{int(offsets[-1]):,} tokens in {count:,} documents, which are the samples here")
    return found


def _range(tokens: np.ndarray[tuple[int], np.dtype[np.integer]]) -> str:
    part = tokens[:_LOOKED_AT]
    what = "tokens" if len(part) == len(tokens) else f"the first {len(part):,}"
    return f"{what} are {int(part.min())} to {int(part.max())}"
