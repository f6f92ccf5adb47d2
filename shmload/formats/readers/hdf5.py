"""HDF5Dataset: rows of HDF5 datasets by their number."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from shmload.batch.array_rows import typed_array
from shmload.errors import ShardCorrupt
from shmload.formats.readers.columns import (
    ArrayTreeDataset,
    BlockCache,
    Blocks,
    Column,
    Columns,
    FixedColumn,
    MappedColumn,
    NoField,
    Opened,
    RaggedColumn,
    TextColumn,
    library,
    native,
    one_length,
    rows_in_blocks,
)


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

    def _open(self) -> Opened:
        h5py = library("h5py", "hdf5")
        os.stat(self.path)  # whose error names the file
        try:
            return self._columns_of(h5py.File(self.path, "r"), h5py)
        except (NoField, ShardCorrupt):
            raise
        except Exception as error:  # a damaged tree fails in many ways, at any step through it
            raise ShardCorrupt(f"{self.path}: {type(error).__name__}: {error}") from error

    def _columns_of(self, file: Any, h5py: Any) -> Columns:
        fields = self._fields if self._fields is not None else _all_of(file, h5py)
        datasets = {name: self._dataset(file, place, h5py) for name, place in fields.items()}
        num_rows = one_length({name: dataset.shape[0] for name, dataset in datasets.items()}, self.path)
        cache = BlockCache(self._cache_bytes)
        return Columns(num_rows, {name: self._column(name, d, cache, h5py) for name, d in datasets.items()})

    def _dataset(self, file: Any, place: str, h5py: Any) -> Any:
        found = file.get(place)
        if not isinstance(found, h5py.Dataset) or not found.shape:
            what = "not there" if found is None else "a group" if isinstance(found, h5py.Group) else "a single value"
            raise NoField(f"{self.path}: {place!r} is {what}; a field is a dataset whose first axis counts samples")
        return found

    def _column(self, name: str, dataset: Any, cache: BlockCache, h5py: Any) -> Column:
        where, length = f"{self.path}, {dataset.name!r}", dataset.shape[0]
        rows = dataset.chunks[0] if dataset.chunks else 0

        def blocks(load: Any, row_nbytes: int) -> Blocks:
            return Blocks(where, length, rows or rows_in_blocks(row_nbytes), load, cache)

        string, ragged = h5py.check_string_dtype(dataset.dtype), h5py.check_vlen_dtype(dataset.dtype)
        if string is not None and len(dataset.shape) == 1:
            if string.encoding == "utf-8":
                return TextColumn(blocks(lambda a, b: dataset.asstr()[a:b].tolist(), 64), str)
            return TextColumn(blocks(lambda a, b: [bytes(value) for value in dataset[a:b]], 64), bytes)
        dtype = native(ragged or dataset.dtype)
        if dtype is None or (ragged and len(dataset.shape) > 1):
            raise NoField(
                f"{where}: rows of {dataset.dtype}, shape {dataset.shape[1:]}, are no field of a batch: those are numbers, "
                f"text, and "
                "runs of numbers; name the others in fields="
            )
        if ragged:
            return RaggedColumn(
                blocks(lambda a, b: [value.astype(dtype, copy=False) for value in dataset[a:b]], 1024), dtype
            )
        offset = _offset_of(dataset, h5py)
        if offset is not None:
            end = os.path.getsize(self.path)
            if not 0 <= offset <= end - dataset.nbytes:
                raise ShardCorrupt(
                    f"{where}, offset {offset}: {dataset.nbytes} bytes of it do not lie within the file's {end}"
                )
            mapped = np.memmap(self.path, dataset.dtype, "r", offset, dataset.shape)
            return MappedColumn(typed_array(name, mapped.view(np.ndarray)))
        row_nbytes = dataset.nbytes // max(length, 1)
        return FixedColumn(blocks(lambda a, b: dataset[a:b], row_nbytes), dtype, dataset.shape[1:])


def _all_of(file: Any, h5py: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[name] = name

    file.visititems(visit)
    return found


def _offset_of(dataset: Any, h5py: Any) -> int | None:
    """Where the numbers lie in the file, if they are one piece of it and as numpy has them."""
    kind, plist = dataset.id.get_type(), dataset.id.get_create_plist()
    if dataset.dtype.kind not in "iuf" or dataset.size == 0 or plist.get_layout() != h5py.h5d.CONTIGUOUS:
        return None
    size = dataset.dtype.itemsize
    is_plain = kind.get_size() == size and kind.get_precision() == 8 * size and kind.get_offset() == 0
    if not is_plain or plist.get_external_count():
        return None
    offset: int | None = dataset.id.get_offset()  # None: nothing was written yet
    return offset
