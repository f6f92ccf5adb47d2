"""ZarrDataset: rows of Zarr arrays by their number."""

from __future__ import annotations

import os
from typing import Any

from shmload.errors import ShardCorrupt
from shmload.formats.readers.columns import (
    ArrayTreeDataset,
    BlockCache,
    Blocks,
    Column,
    Columns,
    FixedColumn,
    NoField,
    Opened,
    TextColumn,
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

    def _open(self) -> Opened:
        zarr = library("zarr", "zarr")
        os.stat(self.path)  # whose error names the path
        try:
            found = zarr.open(self.path, mode="r")
            arrays = {"data": found} if isinstance(found, zarr.Array) else dict(sorted(found.arrays()))
            if self._fields is not None:
                arrays = {name: found[place] for name, place in self._fields.items()}
        except KeyError as error:
            raise NoField(f"{self.path}: fields names {error}, which is not there; it has {sorted(arrays)}") from error
        except Exception as error:  # metadata is JSON, and each part of it fails in its own way
            raise ShardCorrupt(f"{self.path}: no Zarr array or group: {type(error).__name__}: {error}") from error
        for name, array in arrays.items():
            if not isinstance(array, zarr.Array) or not array.shape:
                what = "a single value" if isinstance(array, zarr.Array) else "a group"
                raise NoField(
                    f"{self.path}: field {name!r} is {what}; a field is an array whose first axis counts samples"
                )
        num_rows = one_length({name: array.shape[0] for name, array in arrays.items()}, self.path)
        cache = BlockCache(self._cache_bytes)
        try:
            return Columns(num_rows, {name: self._column(array, cache) for name, array in arrays.items()})
        except NoField:
            raise
        except Exception as error:
            raise ShardCorrupt(f"{self.path}: {type(error).__name__}: {error}") from error

    def _column(self, array: Any, cache: BlockCache) -> Column:
        where = f"{self.path}, {array.path or '/'!r}"
        rows = (getattr(array, "shards", None) or array.chunks)[0]
        if array.dtype.kind in "TOU" and len(array.shape) == 1:
            return TextColumn(
                Blocks(where, array.shape[0], rows, lambda a, b: [str(v) for v in array[a:b]], cache), str
            )
        dtype = native(array.dtype)
        if dtype is None:
            raise NoField(
                f"{where}: rows of {array.dtype}, shape {array.shape[1:]}, are no field of a batch: those are numbers and "
                f"text; name "
                "the others in fields="
            )
        return FixedColumn(Blocks(where, array.shape[0], rows, lambda a, b: array[a:b], cache), dtype, array.shape[1:])
