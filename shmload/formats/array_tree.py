"""The base of `HDF5Dataset` and `ZarrDataset`: fields are arrays in one file or folder, selected by their paths within it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from shmload.errors import ShardCorrupt, is_of_system
from shmload.formats.block_cache import BlockCache
from shmload.formats.column_dataset import ColumnDataset, Opened
from shmload.formats.columns import Column, Columns
from shmload.formats.extras import library
from shmload.formats.field_names import NoField, named_fields, one_length
from shmload.formats.paths import JOIN, check_file, check_local


class ArrayTreeDataset(ColumnDataset):
    """Rows of arrays in one file or folder, which the library of the format opens. A subclass defines how arrays become columns."""

    _library: str
    _extra: str  # the extra that installs the library
    _is_folder = False  # whether the path may be a folder

    def __init__(
        self, path: str | os.PathLike[str], fields: Mapping[str, str] | Sequence[str] | None = None, *, cache_bytes: int = 1 << 28
    ) -> None:
        (check_local if self._is_folder else check_file)(path, type(self).__name__, JOIN)
        self.path = os.path.abspath(path)
        super().__init__(self.path, [] if self._is_folder else [self.path])
        self._fields = None if fields is None else named_fields(fields)
        self._cache_bytes = cache_bytes

    @abstractmethod
    def _arrays(self, module: Any) -> Mapping[str, Any]:
        """Return the library's array of each field; `module` is the library."""

    @abstractmethod
    def _column(self, name: str, array: Any, cache: BlockCache, module: Any) -> Column:
        """Return the column that reads an array's rows, decoding blocks into `cache` if necessary."""

    def _open(self) -> Opened:
        module = library(self._library, self._extra)
        os.stat(self.path)  # its error names the path
        try:
            arrays = self._arrays(module)
            num_rows = one_length({name: array.shape[0] for name, array in arrays.items()}, self.path)
            cache = BlockCache(self._cache_bytes)
            return Columns(num_rows, {name: self._column(name, array, cache, module) for name, array in arrays.items()})
        except (NoField, ShardCorrupt, MemoryError):
            raise
        except Exception as error:  # damaged metadata raises errors of many types
            if is_of_system(error):
                raise
            kind = type(self).__name__.removesuffix("Dataset")
            raise ShardCorrupt(f"{self.path}: not valid {kind} data: {type(error).__name__}: {error}") from error
