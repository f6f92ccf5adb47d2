"""Zarr: `ZarrDataset` reads rows of Zarr arrays by number."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shmload.errors import ShardCorrupt
from shmload.formats.array_tree import ArrayTreeDataset
from shmload.formats.block_cache import BlockCache
from shmload.formats.column_format import ColumnFormat
from shmload.formats.columns import Blocks, Column, FixedColumn, ListedColumn, native
from shmload.formats.extras import library
from shmload.formats.field_names import NoField
from shmload.formats.head import Head

ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")  # one of them makes a folder a store


def _zarr_files(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in ZARR_FILES]


class ZarrDataset(ArrayTreeDataset):
    """Rows of the arrays of a Zarr group, or of one array, of format 2 or 3; the first axis counts samples.

    Rows are decoded one chunk (or shard) at a time into a cache of this process; see `ParquetDataset` about random order and
    blocks. As the format prescribes, a missing chunk reads as the array's fill value, so a lost chunk is not an error.

    Args:
        path: the folder.
        fields: name -> path within the group, {"image": "train/x"}, or a list of paths, which are then also the names. The default
            is all of its arrays, by name, or the one array as "data".
        cache_bytes: size limit of the decoded chunks, for each process that reads.
    Raises:
        ModuleNotFoundError: zarr is not installed (extra `zarr`).
        ShardCorrupt: on reading: metadata or a chunk does not match the format.
        ValueError: on reading: a field is not an array of a type that tensors have, or fields differ in length.
    Thread/process safety: any number of readers; one thread of a process decodes at a time.
    """

    _library = _extra = "zarr"
    _is_folder = True

    def _arrays(self, module: Any) -> Mapping[str, Any]:
        if os.path.isdir(self.path) and not any(map(os.path.isfile, _zarr_files(self.path))):
            inside = sorted(name for name in os.listdir(self.path) if any(map(os.path.isfile, _zarr_files(f"{self.path}/{name}"))))
            there = f"it contains the stores {', '.join(inside[:3])}: " if inside else ""
            raise ShardCorrupt(
                f"{self.path}: the folder is not a Zarr store, because it has none of {', '.join(ZARR_FILES)}; {there}"
                f"give the path of {'one' if inside else 'a store'}"
            )
        found = module.open(self.path, mode="r")
        arrays = {"data": found} if isinstance(found, module.Array) else dict(sorted(found.arrays()))
        if self._fields is not None:
            try:
                arrays = {name: found[place] for name, place in self._fields.items()}
            except KeyError as error:
                raise NoField(f"{self.path}: fields names {error}, which does not exist; it has {sorted(arrays)}") from error
        for name, array in arrays.items():
            if not isinstance(array, module.Array) or not array.shape:
                what = "a single value" if isinstance(array, module.Array) else "a group"
                raise NoField(f"{self.path}: field {name!r} is {what}; a field is an array whose first axis counts samples")
        return arrays

    def _column(self, name: str, array: Any, cache: BlockCache, module: Any) -> Column:
        where = f"{self.path}, {array.path or '/'!r}"
        rows = (getattr(array, "shards", None) or array.chunks)[0]
        if array.dtype.kind in "TOUS" and len(array.shape) == 1:
            num_rows = array.shape[0]
            blocks = Blocks(
                where, num_rows, rows, lambda a, b: [bytes(v) if isinstance(v, bytes) else str(v) for v in array[a:b]], cache
            )
            is_bytes = array.dtype.kind == "S" or (array.dtype.kind == "O" and num_rows and type(blocks.block(0)[0]) is bytes)
            return ListedColumn(blocks, bytes if is_bytes else str)
        dtype = native(array.dtype)
        if dtype is None:
            raise NoField(
                f"{where}: rows of {array.dtype}, shape {array.shape[1:]}, cannot be a field of a batch: fields are numbers and "
                "text; name the others in fields="
            )
        return FixedColumn(Blocks(where, array.shape[0], rows, lambda a, b: array[a:b], cache), dtype, array.shape[1:])


class Zarr(ColumnFormat):
    """The format Zarr, read by `ZarrDataset`."""

    name: ClassVar[str] = "zarr"
    title: ClassVar[str] = "Zarr"

    def recognize(self, head: Head) -> bool:
        return head.is_folder and any((head.path / name).is_file() for name in ZARR_FILES)

    def open(self, path: Path, names: Sequence[str] | None = None) -> ZarrDataset:
        return ZarrDataset(path, names)

    def lengths(self, path: Path) -> Mapping[str, int]:
        zarr = library("zarr", "zarr")
        found = zarr.open(str(path), mode="r")
        arrays = {} if isinstance(found, zarr.Array) else dict(sorted(found.arrays()))
        return {name: array.shape[0] if array.shape else 1 for name, array in arrays.items()}
