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
"""

from __future__ import annotations

import importlib
import operator
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from threading import Lock, RLock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows
from shmload.batch.collate import OneSample
from shmload.batch.layout import of_numpy
from shmload.batch.rows import ArrayRows, TypedArray
from shmload.errors import ShardCorrupt
from shmload.formats.paths import check_local


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
        self._locks: dict[int, Lock] = {}  # by process

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
        with self._locks.setdefault(pid, Lock()):
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

    def __init__(
        self, path: str | os.PathLike[str], fields: Mapping[str, str] | None = None, *, cache_bytes: int = 1 << 28
    ) -> None:
        check_local(path, type(self).__name__)
        self.path = os.path.abspath(path)
        super().__init__(self.path)
        self._fields = None if fields is None else dict(fields)
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


Load = Callable[[int, int], Any]  # (first row, behind the last) -> their values
BLOCK_NBYTES = 1 << 20  # of what a file does not divide itself


class NoField(ValueError):
    """What is sound, and cannot be a field of a batch: for the user to leave out."""


class Column(Protocol):
    """One field of the rows."""

    spec: Any  # as a schema says it

    def read(self, name: str, rows: Indices, out: Any) -> None:
        """Writes these rows, which exist, to the field of a batch."""


class Columns:
    """Fields that are read one after the other."""

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
        self._cache = cache
        self.capacity_bytes = cache.capacity_bytes

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
        return self._cache.get((self.where, number), lambda: self._decoded(number))

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
        if not is_plain or len(numbers) * per_block * self._row_nbytes > self._blocks.capacity_bytes:
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
