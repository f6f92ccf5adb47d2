"""Columns that are mapped from a file, or decoded block by block, and copied into the rows of a batch.

The rows of a batch are sorted by block first, so that each block is decoded and looked up once, and are written to the requested
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from shmload._core.gather import gather_rows
from shmload.batch.array_rows import ArrayRows, TypedArray
from shmload.batch.element_types import of_numpy
from shmload.errors import ShardCorrupt, is_of_system
from shmload.formats.arrays import FileMap
from shmload.formats.block_cache import BlockCache
from shmload.formats.row_numbers import Indices

Load = Callable[[int, int], Any]  # (first row, row after the last) -> their values
BLOCK_NBYTES = 1 << 20  # size of a block, if the file is not divided into chunks


class Columns:
    """The columns of a file, as the `Opened` of a `ColumnDataset`. The `spec` of a column is its entry in the schema."""

    def __init__(self, num_rows: int, columns: Mapping[str, Column]) -> None:
        self.num_rows = num_rows
        self.schema = {name: column.spec for name, column in columns.items()}
        self._columns = columns

    def read(self, rows: Indices, out: Any) -> None:
        """Write rows to a batch, one column after the other."""
        for name, column in self._columns.items():
            column.read(name, rows, out)


class MappedColumn:
    """Rows in memory or in a mapped file, which are copied without the GIL.

    Args:
        name: name of the field.
        array: the rows.
        file: the mapped file, if nothing else checks it before each read.
    """

    def __init__(self, name: str, array: TypedArray, file: FileMap | None = None) -> None:
        self.spec = array.spec
        self._rows, self._file = ArrayRows({name: array}), file

    def read(self, name: str, rows: Indices, out: Any) -> None:
        if self._file is not None:
            self._file.check()
        self._rows.read_batch_into(rows, out)


class Blocks:
    """A column in blocks of rows, which are decoded when they are needed.

    Args:
        where: file and field, for errors. It also identifies the column in the cache.
        num_rows: number of rows of the column.
        rows_per_block: number of rows of each block but the last, which may have fewer.
        load: decodes a range of rows.
        cache: keeps decoded blocks. Columns may share it.
    """

    def __init__(self, where: str, num_rows: int, rows_per_block: int, load: Load, cache: BlockCache) -> None:
        self.where = where
        self._num_rows = num_rows
        self.rows_per_block = rows_per_block
        self._load = load
        self.cache = cache

    def of(self, rows: Indices) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (places in the batch, the block, rows within the block) for each block that has some of `rows`."""
        number = rows // self.rows_per_block
        order = np.argsort(number, kind="stable")
        cuts = np.flatnonzero(np.diff(number[order])) + 1
        for places in np.split(order, cuts) if len(rows) else ():
            block = int(number[places[0]])
            yield places, self.block(block), rows[places] - block * self.rows_per_block

    def block(self, number: int) -> Any:
        """Return one block, from the cache or decoded.

        Raises:
            ShardCorrupt: it cannot be decoded, or has a wrong number of rows.
        """
        return self.cache.get((self.where, number), lambda: self._decoded(number))

    def _decoded(self, number: int) -> tuple[Any, int]:
        first = number * self.rows_per_block
        end = min(first + self.rows_per_block, self._num_rows)
        try:
            values = self._load(first, end)
        except MemoryError:  # the bytes are not the cause
            raise
        except Exception as error:  # each library and codec raises its own types; all mean that these bytes cannot be read
            if is_of_system(error):
                raise
            raise ShardCorrupt(f"{self.where}, rows {first} to {end - 1}: {type(error).__name__}: {error}") from error
        if len(values) != end - first:
            raise ShardCorrupt(f"{self.where}, rows {first} to {end - 1}: there are {len(values)}")
        if isinstance(values, np.ndarray) and values.dtype != object:
            values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
            return values, values.nbytes
        return values, sum(64 + (value.nbytes if isinstance(value, np.ndarray) else len(value)) for value in values)


class FixedColumn:
    """Rows of one shape, copied natively from all blocks at once, or block by block if the cache cannot hold them."""

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
        for number, block in enumerate(blocks):  # checked because rows are copied from these addresses natively
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
    """Return a stored dtype in this machine's byte order; None if no tensor can have it."""
    found = of_numpy(dtype.newbyteorder("="))
    return None if found is None else found.numpy
