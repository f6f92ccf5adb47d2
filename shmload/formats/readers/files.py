"""ZarrDataset: rows of Zarr arrays by their number.

SafetensorsDataset: rows of the tensors of a safetensors file by their number.

    u64 little-endian: bytes of the header | JSON: name -> {dtype, shape, data_offsets: [begin, end]} | the tensors end to end

The library checks the header (names, extents, that tensors lie end to end and fill the file); where they lie is then read from
it, so that rows are copied from the mapped file, of whatever type they are: the library itself gives whole slices, and no
bfloat16 to numpy.

HDF5Dataset: rows of HDF5 datasets by their number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmload.batch.layout import ELEMENT_TYPES
from shmload.batch.rows import TypedArray, typed_array
from shmload.errors import ShardCorrupt
from shmload.formats.paths import check_local
from shmload.formats.readers.columns import (
    BLOCK_NBYTES,
    ArrayTreeDataset,
    BlockCache,
    Blocks,
    Column,
    ColumnDataset,
    Columns,
    FixedColumn,
    ListedColumn,
    MappedColumn,
    NoField,
    Opened,
    library,
    native,
    one_length,
)


class ZarrDataset(ArrayTreeDataset):
    """Rows of the arrays of a Zarr group, or of one array, of format 2 or 3; the first axis counts samples.

    Rows are decoded a chunk's (or shard's) at a time into a cache of this process; see `ParquetDataset` on random order and
    blocks. A chunk that is not there holds the array's fill value: the format says so, and so a lost chunk is no error.

    Args:
        path: the folder.
        fields: name -> path within the group, {"image": "train/x"}; by default its arrays, by name, or the one array as "data".
        cache_bytes: of decoded chunks, for each process that reads.
    Raises:
        ModuleNotFoundError: zarr is not installed (extra `zarr`).
        ShardCorrupt: on reading: metadata or a chunk is not what the format says.
        ValueError: on reading: a field is no array of a type that tensors have, or fields differ in length.
    Thread/process safety: any number of readers; one thread of a process decodes at a time.
    """

    _library = _extra = "zarr"

    def _arrays(self, module: Any) -> Mapping[str, Any]:
        found = module.open(self.path, mode="r")
        arrays = {"data": found} if isinstance(found, module.Array) else dict(sorted(found.arrays()))
        if self._fields is not None:
            try:
                arrays = {name: found[place] for name, place in self._fields.items()}
            except KeyError as error:
                raise NoField(f"{self.path}: fields names {error}, which is not there; it has {sorted(arrays)}") from error
        for name, array in arrays.items():
            if not isinstance(array, module.Array) or not array.shape:
                what = "a single value" if isinstance(array, module.Array) else "a group"
                raise NoField(f"{self.path}: field {name!r} is {what}; a field is an array whose first axis counts samples")
        return arrays

    def _column(self, name: str, array: Any, cache: BlockCache, module: Any) -> Column:
        where = f"{self.path}, {array.path or '/'!r}"
        rows = (getattr(array, "shards", None) or array.chunks)[0]
        if array.dtype.kind in "TOU" and len(array.shape) == 1:
            return ListedColumn(Blocks(where, array.shape[0], rows, lambda a, b: [str(v) for v in array[a:b]], cache), str)
        dtype = native(array.dtype)
        if dtype is None:
            raise NoField(
                f"{where}: rows of {array.dtype}, shape {array.shape[1:]}, are no field of a batch: those are numbers and "
                f"text; name "
                "the others in fields="
            )
        return FixedColumn(Blocks(where, array.shape[0], rows, lambda a, b: array[a:b], cache), dtype, array.shape[1:])


_NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)]
DTYPES = {name[0].upper() + name.lstrip("intufloa"): name for name in _NUMBERS if name in ELEMENT_TYPES} | {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
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
        check_local(path, type(self).__name__)
        self.path = os.path.abspath(path)
        super().__init__(self.path)
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
        return Columns(num_rows, {name: MappedColumn(name, self._array(data, begin, name, places[name])) for name in names})

    def _array(self, data: Any, begin: int, name: str, place: dict[str, Any]) -> TypedArray:
        element = ELEMENT_TYPES.get(DTYPES.get(place["dtype"], ""))
        if element is None:
            raise NoField(f"{self.path}: tensor {name!r} of {place['dtype']}: no batch has this type; leave it out of fields=")
        first, end = (begin + offset for offset in place["data_offsets"])
        shape = tuple(place["shape"])
        seen_as = element.numpy or np.dtype(f"u{element.itemsize}")
        if not 0 <= first <= end <= len(data) or end - first != seen_as.itemsize * int(np.prod(shape, dtype=object)):
            raise ShardCorrupt(f"{self.path}, offset {first}: tensor {name!r} of shape {shape} does not lie within the file")
        return TypedArray(np.ndarray(shape, seen_as, data, first), element.name)


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


class HDF5Dataset(ArrayTreeDataset):
    """Rows of the datasets of an HDF5 file; the first axis counts samples.

    A dataset that lies in the file in one piece is mapped, and its rows are copied without the GIL. A chunked or compressed one
    is decoded a chunk's rows at a time, through h5py, into a cache of this process; see `ParquetDataset` on random order and
    blocks. Rows that are strings are text, rows of variable length ragged.

    Args:
        path: the file. It must not be changed or shortened while it is in use.
        fields: name -> path within the file, {"image": "/train/x"}; by default every dataset of the file, by its path.
        cache_bytes: of decoded chunks, for each process that reads.
    Raises:
        ModuleNotFoundError: h5py is not installed (extra `hdf5`).
        ShardCorrupt: on reading: the file is not what the format says.
        ValueError: on reading: a field is no array of a type that tensors have, or fields differ in length.
    Thread/process safety: any number of readers; h5py holds a lock of its own while it decodes, so only processes do that in
        parallel.
    """

    _library, _extra = "h5py", "hdf5"

    def _arrays(self, module: Any) -> Mapping[str, Any]:
        file = module.File(self.path, "r")
        fields = self._fields if self._fields is not None else _all_of(file, module)
        return {name: self._dataset(file, place, module) for name, place in fields.items()}

    def _dataset(self, file: Any, place: str, h5py: Any) -> Any:
        found = file.get(place)
        if not isinstance(found, h5py.Dataset) or not found.shape:
            what = "not there" if found is None else "a group" if isinstance(found, h5py.Group) else "a single value"
            raise NoField(f"{self.path}: {place!r} is {what}; a field is a dataset whose first axis counts samples")
        return found

    def _column(self, name: str, array: Any, cache: BlockCache, module: Any) -> Column:
        dataset, h5py = array, module
        where, length = f"{self.path}, {dataset.name!r}", dataset.shape[0]
        rows = dataset.chunks[0] if dataset.chunks else 0

        def blocks(load: Any, row_nbytes: int) -> Blocks:
            return Blocks(where, length, rows or max(BLOCK_NBYTES // max(row_nbytes, 1), 1), load, cache)

        string, ragged = h5py.check_string_dtype(dataset.dtype), h5py.check_vlen_dtype(dataset.dtype)
        if string is not None and len(dataset.shape) == 1:
            if string.encoding == "utf-8":
                return ListedColumn(blocks(lambda a, b: dataset.asstr()[a:b].tolist(), 64), str)
            return ListedColumn(blocks(lambda a, b: [bytes(value) for value in dataset[a:b]], 64), bytes)
        dtype = native(ragged or dataset.dtype)
        if dtype is None or (ragged and len(dataset.shape) > 1):
            raise NoField(
                f"{where}: rows of {dataset.dtype}, shape {dataset.shape[1:]}, are no field of a batch: those are numbers, "
                f"text, and "
                "runs of numbers; name the others in fields="
            )
        if ragged:
            return ListedColumn(
                blocks(lambda a, b: [value.astype(dtype, copy=False) for value in dataset[a:b]], 1024), (dtype.name, (None,))
            )
        # where the numbers lie, if they are one piece of this file; None: they are not, or nothing was written yet
        offset, kind = dataset.id.get_offset(), dataset.id.get_type()
        is_plain = dataset.dtype.kind in "iuf" and 8 * kind.get_size() == kind.get_precision() == 8 * dataset.dtype.itemsize
        if offset is not None and is_plain and dataset.size:
            end = os.path.getsize(self.path)
            if not 0 <= offset <= end - dataset.nbytes:
                raise ShardCorrupt(f"{where}, offset {offset}: {dataset.nbytes} bytes of it do not lie within the file's {end}")
            mapped = np.memmap(self.path, dataset.dtype, "r", offset, dataset.shape)
            return MappedColumn(name, typed_array(name, mapped.view(np.ndarray)))
        row_nbytes = dataset.nbytes // max(length, 1)
        return FixedColumn(blocks(lambda a, b: dataset[a:b], row_nbytes), dtype, dataset.shape[1:])


def _all_of(file: Any, h5py: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[name] = name

    file.visititems(visit)
    return found
