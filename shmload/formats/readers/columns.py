"""Columns as the readers find them: lying in a mapped file, or decoded block by block.

A batch's rows are put in the order of their blocks first, so that each block is decoded and looked at once, and are written to
the places they were asked for in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
        self._where = where
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
            yield places, self._block(block), rows[places] - block * self.rows_per_block

    def _block(self, number: int) -> Any:
        return self._cache.get((self._where, number), lambda: self._decoded(number))

    def _decoded(self, number: int) -> tuple[Any, int]:
        first = number * self.rows_per_block
        end = min(first + self.rows_per_block, self._num_rows)
        try:
            values = self._load(first, end)
        except (
            Exception
        ) as error:  # each library and codec has errors of its own; all mean that these bytes cannot be read
            raise ShardCorrupt(f"{self._where}, rows {first} to {end - 1}: {type(error).__name__}: {error}") from error
        if isinstance(values, np.ndarray) and values.dtype != object:
            return values, values.nbytes
        return values, sum(64 + (value.nbytes if isinstance(value, np.ndarray) else len(value)) for value in values)


class FixedColumn:
    """Rows of one shape."""

    def __init__(self, blocks: Blocks, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.spec = (dtype.name, shape)
        self._blocks = blocks

    def read(self, name: str, rows: Indices, out: Any) -> None:
        target = out[name]
        for places, block, local in self._blocks.of(rows):
            if len(places) == len(target) and _is_run(local):
                target[...] = block[local[0] : local[-1] + 1]
            else:
                target[places] = block[local]


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


def _is_run(rows: NDArray[np.int64]) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())
