"""The format npy: rows of an array that `numpy.save` wrote.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.arrays import ArrayDataset
from shmload.formats.block_format import BlockFormat
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.column_format import describe_dataset
from shmload.formats.head import Head
from shmload.formats.npy_header import npy_head
from shmload.formats.summary import Summary

_PEEK = 64 << 10  # bytes that contain the header of an array


@dataclass(frozen=True)
class NumpyRows(BlockFormat):
    """Rows of an array in C order, counted by its first axis, as the field "data"."""

    name: ClassVar[str] = "npy"
    title: ClassVar[str] = "npy"
    endings: ClassVar[tuple[str, ...]] = (".npy",)

    def recognize(self, head: Head) -> bool:
        return head.starts_with(b"\x93NUMPY")

    def describe(self, head: Head, num_samples: int) -> Summary:
        return describe_dataset(self.title, head, lambda path: ArrayDataset({"data": str(path)}), num_samples)

    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        file = io.BytesIO(bytes(memoryview(read(0, min(_PEEK, nbytes))).cast("B")))
        try:
            shape, is_fortran, dtype = npy_head(file)
        except Exception as error:  # numpy's parser may raise anything for a malicious header
            raise ShardCorrupt(f"{url}: is not an .npy file: {error}") from error
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
