"""SafetensorsDataset: rows of the tensors of a safetensors file by their number.

    u64 little-endian: bytes of the header | JSON: name -> {dtype, shape, data_offsets: [begin, end]} | the tensors end to end

The library checks the header (names, extents, that tensors lie end to end and fill the file); where they lie is then read from
it, so that rows are copied from the mapped file, of whatever type they are: the library itself gives whole slices, and no
bfloat16 to numpy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmload.batch.array_rows import TypedArray
from shmload.batch.layout import ELEMENT_TYPES
from shmload.errors import ShardCorrupt
from shmload.formats.paths import check_local
from shmload.formats.readers.columns import ColumnDataset, Columns, MappedColumn, NoField, Opened, library, one_length

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class SafetensorsDataset(ColumnDataset):
    """Rows of the tensors of a safetensors file, which have equal first dimensions; those count samples.

    The file is mapped, and rows are copied without the GIL; it must not be changed or shortened while it is in use.

    Args:
        path: the file.
        fields: the tensors that samples have; all by default.
    Raises:
        ModuleNotFoundError: safetensors is not installed (extra `safetensors`).
        ShardCorrupt: on reading: the file is not what the format says.
        ValueError: on reading: tensors have no rows, or differ in their number.
    Thread/process safety: any number of readers.
    """

    def __init__(self, path: str | os.PathLike[str], fields: Sequence[str] | None = None) -> None:
        super().__init__()
        check_local(path, type(self).__name__)
        self.path = os.path.abspath(path)
        self._fields = None if fields is None else list(fields)

    def _open(self) -> Opened:
        places, begin = header_of(self.path)
        names = sorted(places) if self._fields is None else self._fields
        unknown = [name for name in names if name not in places]
        if unknown:
            raise NoField(f"{self.path}: fields names {unknown}, which are not there; it has {sorted(places)}")
        single = [name for name in names if not places[name]["shape"]]
        if single:
            raise NoField(f"{self.path}: {single} have no axis to count samples: name the other tensors in fields=")
        num_rows = one_length({name: places[name]["shape"][0] for name in names}, self.path)
        data = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        return Columns(num_rows, {name: MappedColumn(self._array(data, begin, name, places[name])) for name in names})

    def _array(self, data: Any, begin: int, name: str, place: dict[str, Any]) -> TypedArray:
        element = ELEMENT_TYPES.get(DTYPES.get(place["dtype"], ""))
        if element is None:
            raise NoField(
                f"{self.path}: tensor {name!r} of {place['dtype']}: no batch has this type; leave it out of fields="
            )
        first, end = (begin + offset for offset in place["data_offsets"])
        shape = tuple(place["shape"])
        seen_as = element.numpy or np.dtype(f"u{element.itemsize}")
        if not 0 <= first <= end <= len(data) or end - first != seen_as.itemsize * int(np.prod(shape, dtype=object)):
            raise ShardCorrupt(
                f"{self.path}, offset {first}: tensor {name!r} of shape {shape} does not lie within the file"
            )
        return TypedArray(np.ndarray(shape, seen_as, data, first), element.name)

    @property
    def _source(self) -> str:
        return self.path


def header_of(path: str) -> tuple[dict[str, Any], int]:
    """(place of each tensor as the header says, offset of the first byte behind the header).

    Raises:
        ShardCorrupt: the file is none, or cut.
    """
    library("safetensors", "safetensors")
    from safetensors import SafetensorError, safe_open

    os.stat(path)  # whose error names the file
    try:
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(nbytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise ShardCorrupt(f"{path}, offset 0: {error}") from error
    return {name: place for name, place in header.items() if name != "__metadata__"}, 8 + nbytes
