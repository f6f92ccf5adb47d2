"""Columns as the readers find them: lying in a mapped file, or decoded block by block.

A batch's rows are put in the order of their blocks first, so that each block is decoded and looked at once, and are written to
the places they were asked for in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Protocol

import numpy as np

from shmload._core.gather import gather_rows
from shmload.batch.array_rows import ArrayRows, TypedArray
from shmload.batch.dtypes import of_numpy
from shmload.errors import ShardCorrupt
from shmload.formats.readers.block_cache import BlockCache
from shmload.formats.readers.dataset import Indices

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

    def __init__(self, array: TypedArray) -> None:
        self.spec = array.spec
        self._array = array
        self._rows: dict[str, ArrayRows] = {}

    def read(self, name: str, rows: Indices, out: Any) -> None:
        if name not in self._rows:
            self._rows[name] = ArrayRows({name: self._array})
        self._rows[name].read_batch_into(rows, out)


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

    def of(self, rows: Indices) -> Iterator[tuple[Any, Any, Any]]:
        """(places in the batch, block, rows within it), block by block."""
        number = rows // self.rows_per_block
        order = np.argsort(number, kind="stable")
        cuts = np.flatnonzero(np.diff(number[order])) + 1
        for places in np.split(order, cuts) if len(rows) else ():
            block = int(number[places[0]])
            yield places, self.block(block), rows[places] - block * self.rows_per_block

    @property
    def capacity_bytes(self) -> int:
        """Of all blocks that are kept."""
        return self._cache.capacity_bytes

    def block(self, number: int) -> Any:
        """One block, decoded."""
        return self._cache.get((self.where, number), lambda: self._decoded(number))

    def _decoded(self, number: int) -> tuple[Any, int]:
        first = number * self.rows_per_block
        end = min(first + self.rows_per_block, self._num_rows)
        try:
            values = self._load(first, end)
        except (
            Exception
        ) as error:  # each library and codec has errors of its own; all mean that these bytes cannot be read
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
        blocks = [self._native(number) for number in numbers.tolist()]
        begins = np.array([block.__array_interface__["data"][0] for block in blocks], np.int64)
        addresses = begins[place] + rows % per_block * self._row_nbytes
        gather_rows(addresses, self._row_nbytes, target.reshape(-1).view(np.uint8))

    def _native(self, number: int) -> Any:
        """A block whose rows may be copied from: laid out as is believed of it."""
        block = self._blocks.block(number)
        if block.dtype != self._dtype or block.shape[1:] != self._shape or not block.flags.c_contiguous:
            raise ShardCorrupt(f"{self._blocks.where}: has a block of {block.dtype} {block.shape}, not {self.spec}")
        return block


class RaggedColumn:
    """Rows that are arrays of different lengths."""

    def __init__(self, blocks: Blocks, dtype: np.dtype[Any]) -> None:
        self.spec = (dtype.name, (None,))
        self._blocks = blocks

    def read(self, name: str, rows: Indices, out: Any) -> None:
        found = _values(self._blocks, rows)
        values = out.reserve(name, [len(value) for value in found])
        if len(values):
            np.concatenate(found, out=values)


class TextColumn:
    """Rows of str or bytes."""

    def __init__(self, blocks: Blocks, kind: type) -> None:
        self.spec = kind
        self._blocks = blocks

    def read(self, name: str, rows: Indices, out: Any) -> None:
        out[name] = _values(self._blocks, rows)


def rows_in_blocks(row_nbytes: int) -> int:
    """Rows of a block where a file is not divided."""
    return max(BLOCK_NBYTES // max(row_nbytes, 1), 1)


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
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise NoField(
            f"{where}: the fields of a dataset have one row for each sample; these have {told}. Name those of one length in fields="
        )
    return next(iter(lengths.values()))


def _values(blocks: Blocks, rows: Indices) -> list[Any]:
    found: list[Any] = [None] * len(rows)
    for places, block, local in blocks.of(rows):
        for place, row in zip(places.tolist(), local.tolist(), strict=True):
            found[place] = block[row]
    return found
