"""Columns as the readers find them: lying in a mapped file, or decoded block by block.

A batch's rows are put in the order of their blocks first, so that each block is decoded and looked at once, and are written to
the places they were asked for in.

The libraries that the readers stand on, imported when a file is opened.

Something that every process opens for itself, at its first use: files of libraries that do not survive a fork.

A child that inherits an open file leaves it alone, does not even close it (that would run the library on a state whose locks and
threads stayed behind in the parent), and opens its own. The lock that keeps two threads from opening twice goes by the process,
too: one that another thread held at the fork would never be released in the child.

Decoded blocks of a file (row groups, chunks), the ones used last, within a number of bytes.

What the datasets of columns share: rows by number, into a batch or one by one, of files that each process opens itself.

ParquetDataset: rows of Parquet files by their number, copied from decoded row groups into the batch.

ZarrDataset: rows of Zarr arrays by their number.

SafetensorsDataset: rows of the tensors of a safetensors file by their number.

    u64 little-endian: bytes of the header | JSON: name -> {dtype, shape, data_offsets: [begin, end]} | the tensors end to end

The library checks the header (names, extents, that tensors lie end to end and fill the file); where they lie is then read from
it, so that rows are copied from the mapped file, of whatever type they are: the library itself gives whole slices, and no
bfloat16 to numpy.

HDF5Dataset: rows of HDF5 datasets by their number.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows
from shmload.batch.array_rows import ArrayRows, TypedArray, typed_array
from shmload.batch.element_types import ELEMENT_TYPES, of_numpy
from shmload.batch.row_placer import OneSample
from shmload.errors import ShardCorrupt
from shmload.formats.paths import Paths, check_file, check_local, expanded_below
from shmload.world import ForkLock


def library(name: str, extra: str) -> Any:
    """A module.

    Raises:
        ModuleNotFoundError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise ModuleNotFoundError(
            f"reading {extra} files needs the package {package}, which is not installed: pip install 'shmload[{extra}]'",
            name=package,
        ) from error


T = TypeVar("T")


class PerProcess(Generic[T]):
    """What is opened once a process. It is given `open` at each use, not to keep it: its owner is freed as soon as it is
    dropped.

    Args:
        is_inherited: a forked child goes on with its parent's, as it may where files are only mapped.
    """

    def __init__(self, is_inherited: bool = False) -> None:
        self._is_inherited = is_inherited
        self._held: tuple[int, T] | None = None  # and the process it was opened in
        self._inherited: list[object] = []
        self._lock = ForkLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._is_inherited,)  # it is opened again where it is unpickled

    @property
    def is_open(self) -> bool:
        """Whether this process has opened it."""
        return self._held is not None and self._held[0] in (0, os.getpid())

    def get(self, open: Callable[[], T]) -> T:
        """This process's own, which `open` makes."""
        pid, held = 0 if self._is_inherited else os.getpid(), self._held
        if held is not None and held[0] == pid:
            return held[1]
        with self._lock:
            held = self._held
            if held is None or held[0] != pid:
                self._inherited.append(held)
                held = self._held = (pid, open())
        return held[1]


class BlockCache:
    """Blocks by key, of one process.

    What is too large for the cache is decoded and used, and not kept. A block that was put out lives on as long as someone reads
    it.

    Args:
        capacity_bytes: of all blocks that are kept.
    Thread/process safety: one thread decodes at a time, since few of these libraries let several; reading takes no lock.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = RLock()
        self.nbytes = 0
        self.num_decoded = 0

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int]]) -> Any:
        """A block.

        Args:
            decode: makes it: (block, bytes it takes).
        """
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found[0]
            block, nbytes = decode()
            self.num_decoded += 1
            if nbytes <= self.capacity_bytes:
                self._blocks[key] = block, nbytes
                self.nbytes += nbytes
                while self.nbytes > self.capacity_bytes:
                    self.nbytes -= self._blocks.popitem(last=False)[1][1]
            return block

    def held(self) -> dict[Hashable, Any]:
        """The blocks that are kept."""
        with self._lock:
            return {key: block for key, (block, _) in self._blocks.items()}


Indices = NDArray[np.int64]


class Opened(Protocol):
    """A dataset as it is open in this process."""

    num_rows: int
    schema: dict[str, Any]

    def read(self, rows: Indices, out: Any) -> None:
        """Writes these rows, which exist, to a batch."""


class ColumnDataset(ABC):
    """Samples that are rows of named columns. A pickled dataset is its arguments; a process opens the file when it first reads."""

    def __init__(self, source: str) -> None:
        self._source = source  # for its repr
        self._held: PerProcess[Opened] = PerProcess()

    @abstractmethod
    def _open(self) -> Opened: ...

    @property
    def _opened(self) -> Opened:
        return self._held.get(self._open)

    @property
    def schema(self) -> dict[str, Any]:
        """Type and shape of each field, {"x": ("float32", (8,))}; None in a shape: it differs from row to row. Opens the file."""
        return self._opened.schema

    def __len__(self) -> int:
        return self._opened.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = OneSample(self.schema)
        self.read_batch_into([operator.index(index)], out)
        return out.sample()

    def read_batch_into(self, indices: Sequence[int] | NDArray[Any], out: Any) -> None:
        """Writes rows to those of a batch.

        Args:
            indices: integers, shape `(rows,)`; negative ones count from the end.
            out: an array for each field of `schema`, with a leading dimension of `rows`; text and ragged fields as a ShmLoader's
                batch takes them.
        Raises:
            IndexError: there is no such row.
            ShardCorrupt: the file is not what its format says.
        """
        opened = self._opened
        opened.read(checked_indices(indices, opened.num_rows), out)

    def __repr__(self) -> str:
        count = f"{len(self)} samples" if self._held.is_open else "not opened yet"
        return f"<{type(self).__name__} of {self._source}, {count}>"


class ArrayTreeDataset(ColumnDataset):
    """Rows of arrays that one file or folder holds by their paths within it, read by a library of the format."""

    _library: str
    _extra: str  # which brings the library
    _is_folder = False  # whether a folder may hold it

    def __init__(
        self, path: str | os.PathLike[str], fields: Mapping[str, str] | Sequence[str] | None = None, *, cache_bytes: int = 1 << 28
    ) -> None:
        (check_local if self._is_folder else check_file)(path, type(self).__name__)
        self.path = os.path.abspath(path)
        super().__init__(self.path)
        self._fields = None if fields is None else named_fields(fields)
        self._cache_bytes = cache_bytes

    @abstractmethod
    def _arrays(self, module: Any) -> Mapping[str, Any]:
        """The fields as the library has them."""

    @abstractmethod
    def _column(self, name: str, array: Any, cache: BlockCache, module: Any) -> Column:
        """One of them as a column."""

    def _open(self) -> Opened:
        module = library(self._library, self._extra)
        os.stat(self.path)  # whose error names the path
        try:
            arrays = self._arrays(module)
            num_rows = one_length({name: array.shape[0] for name, array in arrays.items()}, self.path)
            cache = BlockCache(self._cache_bytes)
            return Columns(num_rows, {name: self._column(name, array, cache, module) for name, array in arrays.items()})
        except (NoField, ShardCorrupt):
            raise
        except Exception as error:  # damaged metadata fail in many ways, at any step through them
            kind = type(self).__name__.removesuffix("Dataset")
            raise ShardCorrupt(f"{self.path}: no sound {kind} data: {type(error).__name__}: {error}") from error


def checked_indices(indices: Any, num_rows: int) -> Indices:
    """Numbers of rows, of which negative ones counted from the end.

    Raises:
        IndexError: there is no such row.
    """
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"indices are integers; got {given.dtype}")
    rows = given.astype(np.int64)
    outside = (rows < -num_rows) | (rows >= num_rows)
    if outside.any():
        raise IndexError(f"index {rows[outside][0]} is out of range: the dataset has {num_rows} samples")
    return np.where(rows < 0, rows + num_rows, rows)


def checked_index(index: Any, num_rows: int) -> int:
    """The same of one row: a tenth of what an array of one costs.

    Raises:
        IndexError, TypeError: there is no such row.
    """
    number = operator.index(index)
    if not -num_rows <= number < num_rows:
        raise IndexError(f"index {number} is out of range: the dataset has {num_rows} samples")
    return number + num_rows if number < 0 else number


def named_fields(fields: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Return field -> what the file calls it.

    Args:
        fields: this mapping, or the file's names, which then are the fields'.
    Raises:
        TypeError: it is a single string.
    """
    return dict(fields) if isinstance(fields, Mapping) else {name: name for name in names_of(fields, "fields")}


def names_of(names: Sequence[str], argument: str) -> list[str]:
    """Return a sequence of names as a list.

    Raises:
        TypeError: it is a single string, whose letters would be taken for names, or not of strings.
    """
    if isinstance(names, str | bytes) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names, got {names!r}; write {argument}=['x', 'y']")
    return list(names)


Load = Callable[[int, int], Any]  # (first row, behind the last) -> their values
BLOCK_NBYTES = 1 << 20  # of what a file does not divide itself


class NoField(ValueError):
    """What is sound, and cannot be a field of a batch: for the user to leave out."""


class Columns:
    """Fields that are read one after the other. A column has a `spec`, as a schema says it."""

    def __init__(self, num_rows: int, columns: Mapping[str, Column]) -> None:
        self.num_rows = num_rows
        self.schema = {name: column.spec for name, column in columns.items()}
        self._columns = columns

    def read(self, rows: Indices, out: Any) -> None:
        """Writes these rows to a batch."""
        for name, column in self._columns.items():
            column.read(name, rows, out)


class MappedColumn:
    """Rows that lie in memory, or in a file that is mapped: copied without the GIL."""

    def __init__(self, name: str, array: TypedArray) -> None:
        self.spec = array.spec
        self._rows = ArrayRows({name: array})

    def read(self, name: str, rows: Indices, out: Any) -> None:
        self._rows.read_batch_into(rows, out)


class Blocks:
    """A column in blocks of rows, decoded as they are needed.

    Args:
        where: file and field, for errors.
        rows_per_block: as the file divides them.
    """

    def __init__(self, where: str, num_rows: int, rows_per_block: int, load: Load, cache: BlockCache) -> None:
        self.where = where
        self._num_rows = num_rows
        self.rows_per_block = rows_per_block
        self._load = load
        self.cache = cache

    def of(self, rows: Indices) -> Iterator[tuple[Any, Any, Any]]:
        """(places in the batch, block, rows within it), block by block."""
        number = rows // self.rows_per_block
        order = np.argsort(number, kind="stable")
        cuts = np.flatnonzero(np.diff(number[order])) + 1
        for places in np.split(order, cuts) if len(rows) else ():
            block = int(number[places[0]])
            yield places, self.block(block), rows[places] - block * self.rows_per_block

    def block(self, number: int) -> Any:
        """One block, decoded."""
        return self.cache.get((self.where, number), lambda: self._decoded(number))

    def _decoded(self, number: int) -> tuple[Any, int]:
        first = number * self.rows_per_block
        end = min(first + self.rows_per_block, self._num_rows)
        try:
            values = self._load(first, end)
        except Exception as error:  # each library and codec has errors of its own; all mean that these bytes cannot be read
            raise ShardCorrupt(f"{self.where}, rows {first} to {end - 1}: {type(error).__name__}: {error}") from error
        if len(values) != end - first:
            raise ShardCorrupt(f"{self.where}, rows {first} to {end - 1}: there are {len(values)}")
        if isinstance(values, np.ndarray) and values.dtype != object:
            values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
            return values, values.nbytes
        return values, sum(64 + (value.nbytes if isinstance(value, np.ndarray) else len(value)) for value in values)


class FixedColumn:
    """Rows of one shape: copied natively from all blocks at once, or one block after the other if the cache cannot hold them."""

    def __init__(self, blocks: Blocks, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.spec = (dtype.name, shape)
        self._blocks = blocks
        self._dtype = dtype
        self._shape = shape
        self._row_nbytes = dtype.itemsize * prod(shape)

    def read(self, name: str, rows: Indices, out: Any) -> None:
        target = out[name]
        per_block = self._blocks.rows_per_block
        numbers, place = np.unique(rows // per_block, return_inverse=True)
        is_plain = target.dtype == self._dtype and target.flags.c_contiguous
        if not is_plain or len(numbers) * per_block * self._row_nbytes > self._blocks.cache.capacity_bytes:
            for places, block, local in self._blocks.of(rows):
                target[places] = block[local]
            return
        begins = np.empty(len(numbers), np.int64)
        blocks = [self._blocks.block(number) for number in numbers.tolist()]
        for number, block in enumerate(blocks):  # whose rows are copied from where they are believed to lie
            if block.dtype != self._dtype or block.shape[1:] != self._shape or not block.flags.c_contiguous:
                raise ShardCorrupt(f"{self._blocks.where}: has a block of {block.dtype} {block.shape}, not {self.spec}")
            begins[number] = block.__array_interface__["data"][0]
        addresses = begins[place] + rows % per_block * self._row_nbytes
        gather_rows(addresses, self._row_nbytes, target.reshape(-1).view(np.uint8))


class ListedColumn:
    """Rows that are decoded as a list: str, bytes, or arrays of different lengths."""

    def __init__(self, blocks: Blocks, spec: Any) -> None:
        self.spec = spec
        self._blocks = blocks

    def read(self, name: str, rows: Indices, out: Any) -> None:
        found: list[Any] = [None] * len(rows)
        for places, block, local in self._blocks.of(rows):
            for place, row in zip(places.tolist(), local.tolist(), strict=True):
                found[place] = block[row]
        if self.spec in (str, bytes):
            out[name] = found
            return
        values = out.reserve(name, [len(value) for value in found])
        if len(values):
            np.concatenate(found, out=values)


Column = MappedColumn | FixedColumn | ListedColumn


def native(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """A stored dtype as a batch has it; None if no tensor has it."""
    found = of_numpy(dtype.newbyteorder("="))
    return None if found is None else found.numpy


def one_length(lengths: Mapping[str, int], where: str) -> int:
    """The number of rows that all fields have.

    Raises:
        NoField: they differ, or there is no field.
    """
    if not lengths:
        raise NoField(f"{where}: has no array with rows to be a field")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise NoField(
            f"{where}: the fields of a dataset have one row for each sample; these have {found}. Name those of one length in "
            "fields="
        )
    return next(iter(lengths.values()))


class GroupedDataset(ColumnDataset):
    """Samples whose rows come in groups (a file's row groups, blocks), which are had one by one."""

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """The row that each group begins with, and the number of rows; int64, shape `(groups + 1,)`."""
        return cast("NDArray[np.int64]", cast(Any, self._opened).starts)

    @property
    def block_size(self) -> int:
        """Rows of the largest group: what `BlockShuffle` takes for its blocks. Groups of one size make the best use of it."""
        return max(int(np.diff(self.block_starts).max(initial=0)), 1)

    @property
    def num_decoded(self) -> int:
        """Groups that this process has decoded."""
        return int(cast(Any, self._opened).cache.num_decoded)


class ParquetDataset(GroupedDataset):
    """Rows of Parquet files, in the order of the files.

    A row group is decoded whole, when a row of it is first read, and kept in a cache of this process; rows go from there into
    the batch without Python objects. So random order over all rows decodes a row group for nearly every row unless all fit the
    cache: read in blocks instead, with a `BlockShuffle` of `block_size` rows whose window fits the cache. Every worker reads
    of every window, and each has a cache of its own.

    Numbers and booleans become numbers, strings text, lists of numbers ragged arrays, fixed-size lists arrays, lists of strings
    lists; dates, times and durations int64 in their own unit. Dictionaries are expanded.

    Below a folder, or below the fixed part of a pattern, folders named `year=2024` (Hive's partitions) are columns, by the rules of
    `pyarrow.dataset(folder, partitioning="hive")`: int32 if all values are integers, else text; null where a folder does not say.
    They replace a column of the same name and type in the files.

    Args:
        paths: files, folders or patterns with * ? [ ]. The files of a folder or a pattern are sorted by name; those whose name, or
            a folder's on the way, begins with . or _ are left out. Of a folder those named *.parquet, *.pq or *.parq count, or if
            there are none, those whose name has no ending.
        columns: those that samples have; all by default.
        schema: type and shape of some fields, in place of the stored ones: {"x": "float32"} converts; {"image": ("uint8", (28,
            28))} says that lists have that many values, in every row.
        fill_null: values in place of nulls, by column. Without, a null is an error.
        cache_bytes: of decoded row groups, for each process that reads.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ValueError: `columns` is empty.
        ModuleNotFoundError: pyarrow is not installed (extra `parquet`).
        ShardCorrupt: on reading: a file is not what the format says.
        SampleError: on reading: a row has a null, or another number of values than the schema says.
    Thread/process safety: any number of readers; one thread of a process decodes at a time.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        *,
        fill_null: Mapping[str, Any] | None = None,
        cache_bytes: int = 1 << 28,
    ) -> None:
        found = expanded_below(paths, "Parquet", endings=(".parquet", ".pq", ".parq"))
        self.paths = [path for path, _ in found]
        self._folders = [folder for _, folder in found]
        super().__init__(f"{len(self.paths)} Parquet files")
        self._columns = None if columns is None else names_of(columns, "columns")
        self._asked = dict(schema or {})
        self._fill_null = dict(fill_null or {})
        self._cache_bytes = cache_bytes
        if self._columns is not None and not self._columns:
            raise ValueError("columns needs at least one name; None takes all of them")

    def _open(self) -> Opened:
        library("pyarrow.parquet", "parquet")
        from shmload.formats.arrow_tables import RowGroups

        return RowGroups(self.paths, self._folders, self._columns, self._asked, self._fill_null, self._cache_bytes)


ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")  # one of them makes a folder a store


def _zarr_files(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in ZARR_FILES]


class ZarrDataset(ArrayTreeDataset):
    """Rows of the arrays of a Zarr group, or of one array, of format 2 or 3; the first axis counts samples.

    Rows are decoded a chunk's (or shard's) at a time into a cache of this process; see `ParquetDataset` on random order and
    blocks. A chunk that is not there holds the array's fill value: the format says so, and so a lost chunk is no error.

    Args:
        path: the folder.
        fields: name -> path within the group, {"image": "train/x"}, or a list of paths, which then are the names; by default its
            arrays, by name, or the one array as "data".
        cache_bytes: of decoded chunks, for each process that reads.
    Raises:
        ModuleNotFoundError: zarr is not installed (extra `zarr`).
        ShardCorrupt: on reading: metadata or a chunk is not what the format says.
        ValueError: on reading: a field is no array of a type that tensors have, or fields differ in length.
    Thread/process safety: any number of readers; one thread of a process decodes at a time.
    """

    _library = _extra = "zarr"
    _is_folder = True

    def _arrays(self, module: Any) -> Mapping[str, Any]:
        if os.path.isdir(self.path) and not any(map(os.path.isfile, _zarr_files(self.path))):
            inside = sorted(name for name in os.listdir(self.path) if any(map(os.path.isfile, _zarr_files(f"{self.path}/{name}"))))
            there = f"it holds the stores {', '.join(inside[:3])}: give the path of one" if inside else "give the path of a store"
            raise ShardCorrupt(f"{self.path}: the folder is no Zarr store, as it has none of {', '.join(ZARR_FILES)}; {there}")
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
            num_rows = array.shape[0]
            blocks = Blocks(where, num_rows, rows, lambda a, b: [v if type(v) is bytes else str(v) for v in array[a:b]], cache)
            is_bytes = array.dtype.kind == "O" and num_rows and type(blocks.block(0)[0]) is bytes
            return ListedColumn(blocks, bytes if is_bytes else str)
        dtype = native(array.dtype)
        if dtype is None:
            raise NoField(
                f"{where}: rows of {array.dtype}, shape {array.shape[1:]}, are no field of a batch: those are numbers and text; "
                "name the others in fields="
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
        fields: the tensors that samples have, in a list, or name -> tensor, {"image": "train.x"}; all by default, by name.
    Raises:
        ModuleNotFoundError: safetensors is not installed (extra `safetensors`).
        ShardCorrupt: on reading: the file is not what the format says.
        ValueError: on reading: tensors have no rows, or differ in their number.
    Thread/process safety: any number of readers.
    """

    def __init__(self, path: str | os.PathLike[str], fields: Mapping[str, str] | Sequence[str] | None = None) -> None:
        check_file(path, type(self).__name__)
        self.path = os.path.abspath(path)
        super().__init__(self.path)
        self._fields = None if fields is None else named_fields(fields)

    def _open(self) -> Opened:
        places, begin = header_of(self.path)
        fields = self._fields if self._fields is not None else {name: name for name in sorted(places)}
        names = list(fields.values())
        unknown = [name for name in names if name not in places]
        if unknown:
            raise NoField(f"{self.path}: fields names {unknown}, which are not there; it has {sorted(places)}")
        single = [name for name in names if not places[name]["shape"]]
        if single:
            raise NoField(f"{self.path}: {single} have no axis to count samples: name the other tensors in fields=")
        num_rows = one_length({name: places[name]["shape"][0] for name in names}, self.path)
        data = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        arrays = {field: self._array(data, begin, name, places[name]) for field, name in fields.items()}
        return Columns(num_rows, {field: MappedColumn(field, array) for field, array in arrays.items()})

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
    blocks. Rows that are strings are text, rows of variable length ragged. Enums are the integers that are stored; those that h5py
    writes for booleans are bool.

    Args:
        path: the file. It must not be changed or shortened while it is in use.
        fields: name -> path within the file, {"image": "/train/x"}, or a list of paths, which then are the names; by default every
            dataset of the file, by its path.
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
        try:
            _ = found.dtype
        except TypeError as error:
            raise NoField(
                f"{self.path}, {found.name!r}: rows stored as {_stored_as(found, h5py)} have no numpy dtype ({error}); name "
                "the other datasets in fields=, or write this one anew as numbers"
            ) from error
        return found

    def _column(self, name: str, dataset: Any, cache: BlockCache, h5py: Any) -> Column:
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
                f"{where}: rows of {dataset.dtype}, shape {dataset.shape[1:]}, stored as {_stored_as(dataset, h5py)}, are no "
                "field of a batch: those are numbers, text, and runs of numbers; name the others in fields="
            )
        if ragged and not ragged.isnative:
            raise NoField(
                f"{where}: rows of variable length are stored as {ragged}, not in this machine's byte order, and h5py leaves them "
                "so: write the dataset anew, or name the others in fields="
            )
        if ragged:
            return ListedColumn(
                blocks(lambda a, b: [value.astype(dtype, copy=False) for value in dataset[a:b]], 1024), (dtype.name, (None,))
            )
        # where the numbers lie, if they are one piece of this file; None: they are not, or nothing was written yet
        offset, kind = dataset.id.get_offset(), dataset.id.get_type()
        if isinstance(kind, h5py.h5t.TypeEnumID):
            kind = kind.get_super()  # the integers that are stored
        is_number = isinstance(kind, h5py.h5t.TypeIntegerID | h5py.h5t.TypeFloatID)  # bit fields have no precision
        is_plain = is_number and 8 * kind.get_size() == kind.get_precision() == 8 * dataset.dtype.itemsize
        is_written = dataset.size and dataset.id.get_storage_size() == dataset.nbytes  # else a user block makes up an offset
        if offset is not None and is_plain and is_written:
            end = os.path.getsize(self.path)
            if not 0 <= offset <= end - dataset.nbytes:
                raise ShardCorrupt(f"{where}, offset {offset}: {dataset.nbytes} bytes of it do not lie within the file's {end}")
            mapped = np.memmap(self.path, dataset.dtype, "r", offset, dataset.shape)
            return MappedColumn(name, typed_array(name, mapped.view(np.ndarray)))
        row_nbytes = dataset.nbytes // max(length, 1)
        return FixedColumn(blocks(lambda a, b: dataset[a:b], row_nbytes), dtype, dataset.shape[1:])


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
