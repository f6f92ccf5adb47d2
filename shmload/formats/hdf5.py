"""HDF5: `HDF5Dataset` reads rows of the datasets of a file by number."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shmload.batch.array_rows import typed_array
from shmload.errors import ShardCorrupt
from shmload.formats.array_tree import ArrayTreeDataset
from shmload.formats.arrays import FileMap
from shmload.formats.block_cache import BlockCache
from shmload.formats.column_format import ColumnFormat
from shmload.formats.columns import BLOCK_NBYTES, Blocks, Column, FixedColumn, ListedColumn, MappedColumn, native
from shmload.formats.extras import library
from shmload.formats.field_names import NoField
from shmload.formats.head import Head
from shmload.formats.open_files import OpenFiles


class _HDF5Files(OpenFiles):
    """`OpenFiles` whose items are `h5py.File`s."""

    def _opened(self, number: int) -> Any:
        return library("h5py", "hdf5").File(self._paths[number], "r", rdcc_nbytes=0)  # BlockCache keeps decoded chunks


@dataclass
class _StoredArray:
    """A dataset within a file that may have been closed since its last use."""

    files: _HDF5Files
    place: str
    shape: tuple[int, ...]

    def opened(self) -> Any:
        """Return the h5py.Dataset. The file stays open at least as long as this object exists."""
        return self.files[0][self.place]


class HDF5Dataset(ArrayTreeDataset):
    """Rows of the datasets of an HDF5 file; the first axis counts samples.

    A contiguous dataset is mapped, and its rows are copied without the GIL. A chunked or compressed dataset is decoded one chunk at
    a time, through h5py, into a cache of this process; see `ParquetDataset` about random order and blocks. Strings become text, and
    rows of variable length become ragged. Enums become the stored integers, except that those which h5py writes for booleans become
    bool.

    Args:
        path: the file. It must not be changed or truncated while it is in use.
        fields: name -> path within the file, {"image": "/train/x"}, or a list of paths, which are then also the names. The default
            is every dataset of the file, by its path.
        cache_bytes: size limit of the decoded chunks, for each process that reads.
    Raises:
        ModuleNotFoundError: h5py is not installed (extra `hdf5`).
        ShardCorrupt: on reading: the file does not match its format.
        ValueError: on reading: a field is not an array of a type that tensors have, or fields differ in length.
    Thread/process safety: any number of readers. h5py holds a lock while it decodes, so only different processes decode in
        parallel.
    """

    _library, _extra = "h5py", "hdf5"

    def _arrays(self, module: Any) -> Mapping[str, Any]:
        files = _HDF5Files([self.path])
        fields = self._fields if self._fields is not None else _all_of(files[0], module)
        return {name: _StoredArray(files, place, self._dataset(files[0], place, module).shape) for name, place in fields.items()}

    def _dataset(self, file: Any, place: str, h5py: Any) -> Any:
        found = file.get(place)
        if not isinstance(found, h5py.Dataset) or not found.shape:
            what = "not there" if found is None else "a group" if isinstance(found, h5py.Group) else "a single value"
            raise NoField(f"{self.path}: {place!r} is {what}; a field is a dataset whose first axis counts samples")
        try:
            _ = found.dtype
        except TypeError as error:
            raise NoField(
                f"{self.path}, {found.name!r}: rows stored as {_stored_as(found, h5py)} have no numpy dtype ({error}); name "
                "the other datasets in fields=, or write this one again as numbers"
            ) from error
        return found

    def _column(self, name: str, array: _StoredArray, cache: BlockCache, h5py: Any) -> Column:
        dataset = array.opened()  # which no `load` uses, so that the file can be closed
        where, length = f"{self.path}, {dataset.name!r}", dataset.shape[0]
        rows = dataset.chunks[0] if dataset.chunks else 0

        def blocks(load: Any, row_nbytes: int) -> Blocks:
            return Blocks(where, length, rows or max(BLOCK_NBYTES // max(row_nbytes, 1), 1), load, cache)

        string, ragged = h5py.check_string_dtype(dataset.dtype), h5py.check_vlen_dtype(dataset.dtype)
        if string is not None and len(dataset.shape) == 1:
            if string.encoding == "utf-8":
                return ListedColumn(blocks(lambda a, b: array.opened().asstr()[a:b].tolist(), 64), str)
            return ListedColumn(blocks(lambda a, b: [bytes(value) for value in array.opened()[a:b]], 64), bytes)
        dtype = native(ragged or dataset.dtype) if string is None else None  # text of several axes is no text of a row
        if dtype is None or (ragged and len(dataset.shape) > 1):
            raise NoField(
                f"{where}: rows of {dataset.dtype}, shape {dataset.shape[1:]}, stored as {_stored_as(dataset, h5py)}, cannot be a "
                "field of a batch: fields are numbers, text, and runs of numbers; name the others in fields="
            )
        if ragged and not ragged.isnative:
            raise NoField(
                f"{where}: rows of variable length are stored as {ragged}, not in this machine's byte order, and h5py leaves them "
                "so: write the dataset again, or name the others in fields="
            )
        if ragged:
            return ListedColumn(
                blocks(lambda a, b: [value.astype(dtype, copy=False) for value in array.opened()[a:b]], 1024), (dtype.name, (None,))
            )
        path = dataset.file.filename  # of another file if an external link leads to the dataset
        # offset: where the numbers begin in their file; None if they are not contiguous, or have not been written yet
        offset, kind = dataset.id.get_offset(), dataset.id.get_type()
        if isinstance(kind, h5py.h5t.TypeEnumID):
            kind = kind.get_super()  # the integers that are stored
        is_number = isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID)  # bit fields have no precision
        is_plain = is_number and 8 * kind.get_size() == kind.get_precision() == 8 * dataset.dtype.itemsize
        # in a file with a user block, HDF5 reports an offset even for a dataset that has no storage yet
        is_written = dataset.size and dataset.id.get_storage_size() == dataset.nbytes
        if offset is not None and is_plain and is_written:
            end = os.path.getsize(path)
            if not 0 <= offset <= end - dataset.nbytes:
                raise ShardCorrupt(f"{where}, offset {offset}: {dataset.nbytes} bytes of it are not within the {end} of {path}")
            file = FileMap(path, end=offset + dataset.nbytes)
            rows = np.ndarray(dataset.shape, dataset.dtype, file.bytes, offset)
            return MappedColumn(name, typed_array(name, rows), file)
        row_nbytes = dataset.nbytes // max(length, 1)
        return FixedColumn(blocks(lambda a, b: array.opened()[a:b], row_nbytes), dtype, dataset.shape[1:])


_MAGIC = b"\x89HDF\r\n\x1a\n"
_KINDS = ("integer", "float", "time", "string", "bit field", "opaque", "compound", "reference", "enum", "vlen", "array")


def _stored_as(dataset: Any, h5py: Any) -> str:
    """Return the name of a dataset's HDF5 type, and its size: "vlen of float of 4 bytes"."""
    return _kind_of(dataset.id.get_type(), h5py)


def _kind_of(kind: Any, h5py: Any) -> str:
    number = kind.get_class()
    name = next((known for known in _KINDS if getattr(h5py.h5t, known.replace(" ", "").upper()) == number), f"class {number}")
    if name in ("vlen", "array"):
        return f"{name} of {_kind_of(kind.get_super(), h5py)}"
    return f"{name} of {kind.get_size()} bytes"


def _all_of(file: Any, h5py: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[name] = name

    file.visititems(visit)
    return found


class HDF5(ColumnFormat):
    """The format HDF5, read by `HDF5Dataset`."""

    name: ClassVar[str] = "hdf5"
    title: ClassVar[str] = "HDF5"

    def recognize(self, head: Head) -> bool:
        """Return whether HDF5's magic is at the beginning, or in a local file after a user block, whose size is a power of two."""
        if head.is_folder or head.compression:
            return False
        if not head.is_local:
            return head.begin.startswith(_MAGIC)
        with open(head.path, "rb") as file:
            for at in (0, *(1 << bits for bits in range(9, head.nbytes.bit_length()))):
                file.seek(at)
                if file.read(8) == _MAGIC:
                    return True
        return False

    def open(self, path: Path, names: Sequence[str] | None = None) -> HDF5Dataset:
        return HDF5Dataset(path, names)

    def lengths(self, path: Path) -> Mapping[str, int]:
        h5py = library("h5py", "hdf5")
        with h5py.File(path, "r") as file:
            return {name: file[name].shape[0] for name in _all_of(file, h5py)}
