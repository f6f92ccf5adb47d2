"""safetensors: `SafetensorsDataset` reads rows of the tensors of a file by number.

    u64 little-endian: bytes of the header | JSON: name -> {dtype, shape, data_offsets: [begin, end]} | the tensors end to end

The library checks the header: names, shapes, and that the tensors are end to end and fill the file. Their offsets are then read
from the header, and rows are copied from the mapped file. The rows are not read through the library, because it reads only slices,
and has no bfloat16 for numpy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shmload.batch.array_rows import TypedArray
from shmload.batch.element_types import ELEMENT_TYPES
from shmload.errors import ShardCorrupt
from shmload.formats.arrays import FileMap
from shmload.formats.column_dataset import ColumnDataset, Opened
from shmload.formats.column_format import ColumnFormat
from shmload.formats.columns import Columns, MappedColumn
from shmload.formats.extras import library
from shmload.formats.field_names import NoField, named_fields, one_length
from shmload.formats.head import Head
from shmload.formats.paths import check_file
from shmload.formats.row_numbers import Indices

_NUMBERS = [(kind, bits) for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64) if f"{kind}{bits}" in ELEMENT_TYPES]
DTYPES = {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind, bits in _NUMBERS} | {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class SafetensorsDataset(ColumnDataset):
    """Rows of the tensors of a safetensors file. The first dimension of all tensors is the number of samples.

    The file is mapped, and rows are copied without the GIL. It must not be changed while it is in use; another header or a smaller
    size is an error.

    Args:
        path: the file.
        fields: the tensors that become fields: a list, or field -> tensor, {"image": "train.x"}. The default is all, by name.
    Raises:
        ModuleNotFoundError: safetensors is not installed (extra `safetensors`).
        ShardCorrupt: on reading: the file does not match its format, or another one has replaced it.
        ValueError: on reading: tensors have no rows, or differ in their number of rows.
    Thread/process safety: any number of readers.
    """

    def __init__(self, path: str | os.PathLike[str], fields: Mapping[str, str] | Sequence[str] | None = None) -> None:
        check_file(path, type(self).__name__)
        self.path = os.path.abspath(path)
        super().__init__(self.path, [self.path])
        self._fields = None if fields is None else named_fields(fields)

    def _open(self) -> Opened:
        places, begin = header_of(self.path)
        fields = self._fields if self._fields is not None else {name: name for name in sorted(places)}
        names = list(fields.values())
        unknown = [name for name in names if name not in places]
        if unknown:
            raise NoField(f"{self.path}: fields names {unknown}, which do not exist; it has {sorted(places)}")
        single = [name for name in names if not places[name]["shape"]]
        if single:
            raise NoField(f"{self.path}: {single} have no axis to count samples: name the other tensors in fields=")
        num_rows = one_length({name: places[name]["shape"][0] for name in names}, self.path)
        file = FileMap(self.path)
        data = np.frombuffer(file.bytes, np.uint8)
        file.head, file.end = data[:begin].tobytes(), len(data)
        arrays = {field: self._array(data, begin, name, places[name]) for field, name in fields.items()}
        return _MappedColumns(num_rows, {field: MappedColumn(field, array) for field, array in arrays.items()}, file)

    def _array(self, data: Any, begin: int, name: str, place: dict[str, Any]) -> TypedArray:
        element = ELEMENT_TYPES.get(DTYPES.get(place["dtype"], ""))
        if element is None:
            raise NoField(
                f"{self.path}: tensor {name!r} of {place['dtype']}: a batch cannot have this type; leave it out of fields="
            )
        first, end = (begin + offset for offset in place["data_offsets"])
        shape = tuple(place["shape"])
        seen_as = element.numpy or np.dtype(f"u{element.itemsize}")
        if not 0 <= first <= end <= len(data) or end - first != seen_as.itemsize * int(np.prod(shape, dtype=object)):
            raise ShardCorrupt(f"{self.path}, offset {first}: tensor {name!r} of shape {shape} is not within the file")
        return TypedArray(np.ndarray(shape, seen_as, data, first), element.name)


class _MappedColumns(Columns):
    """The columns of a mapped file, which is checked before each read."""

    def __init__(self, num_rows: int, columns: Mapping[str, MappedColumn], file: FileMap) -> None:
        super().__init__(num_rows, columns)
        self._file = file

    def read(self, rows: Indices, out: Any) -> None:
        self._file.check()
        super().read(rows, out)


def header_of(path: str) -> tuple[dict[str, Any], int]:
    """Return (entry of each tensor in the header, offset of the first byte after the header).

    Raises:
        ShardCorrupt: the file is not a safetensors file, or is truncated.
    """
    library("safetensors", "safetensors")
    from safetensors import SafetensorError, safe_open

    with open(path, "rb") as file:  # raises the system's errors; those of safe_open do not tell them from errors of the contents
        try:
            with safe_open(path, framework="numpy"):
                pass
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(nbytes))
        except (SafetensorError, OSError, ValueError) as error:
            raise ShardCorrupt(f"{path}, offset 0: {error}") from error
    return {name: place for name, place in header.items() if name != "__metadata__"}, 8 + nbytes


class Safetensors(ColumnFormat):
    """The format safetensors, read by `SafetensorsDataset`."""

    name: ClassVar[str] = "safetensors"
    title: ClassVar[str] = "safetensors"

    def recognize(self, head: Head) -> bool:
        nbytes = int.from_bytes(head.begin[:8], "little")  # size of the header: up to 100 MB, by the format's own rule
        return not head.compression and head.begin[8:9] == b"{" and 2 <= nbytes <= 100_000_000

    def open(self, path: Path, names: Sequence[str] | None = None) -> SafetensorsDataset:
        return SafetensorsDataset(path, names)

    def lengths(self, path: Path) -> Mapping[str, int]:
        places, _ = header_of(str(path))
        return {name: (places[name]["shape"] or [1])[0] for name in sorted(places)}
