"""Where the columns of an index lie in its memory, and what its entries are.

    column 0: words | data,  column 1: words | data,  ...      each part at a multiple of 64 bytes

src/index.h says what words and data are. A layout is small and travels by pickle; the memory never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.index_builder import ColumnBuilder
from shmload._core.mapping import Mapping

ALIGNMENT = 64
_SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}  # kinds with one dtype of their own


@dataclass(frozen=True)
class ColumnLayout:
    """One column.

    Attributes:
        name: a dict's key, a named tuple's field; the number of a plain tuple's value; 0 for entries that are no rows.
        kind: "str", "bytes", "int", "float", "bool" or "array".
        dtype, shape: of one entry; dtype is "" for text.
        ends, data: where the words (-1: none) and the values begin.
    """

    name: str | int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    is_nullable: bool
    ends: int
    data: int

    @property
    def type(self) -> str:
        """For users: "str", "str | None", "int64", "float32[3, 2]"."""
        if not self.dtype:
            return f"{self.kind} | None" if self.is_nullable else self.kind
        return self.dtype + (str(list(self.shape)) if self.shape else "")

    def array(self, memory: Mapping, count: int) -> NDArray[Any]:
        """The whole column over the shared memory; not for text. Shape `(count, *shape)`, read-only."""
        num_values = int(np.prod((count, *self.shape)))
        flat: NDArray[Any] = (
            np.frombuffer(memoryview(memory), self.dtype, num_values, self.data) if num_values else self._nothing()
        )
        return flat.reshape((count, *self.shape))

    def _nothing(self) -> NDArray[Any]:
        empty = np.empty(0, self.dtype)  # numpy refuses a buffer from the very end of the memory
        empty.flags.writeable = False
        return empty


@dataclass(frozen=True)
class Layout:
    """A whole index.

    Attributes:
        row_type: dict, tuple or a named tuple's class; None if each entry is the one column's value.
    """

    count: int
    columns: tuple[ColumnLayout, ...]
    row_type: type | None
    nbytes: int

    @classmethod
    def of(cls, builders: Sequence[ColumnBuilder], row_type: type | None) -> Layout:
        """Gives every built column its place."""
        columns, end = [], 0
        for number, builder in enumerate(builders):
            has_words = builder.kind in ("str", "bytes")
            ends = end if has_words else -1
            data = _aligned(end + builder.ends.nbytes)
            end = _aligned(data + builder.data.nbytes)
            name = number if builder.name is None else builder.name
            dtype = "" if has_words else _SCALARS.get(builder.kind) or str(builder.dtype)
            columns.append(
                ColumnLayout(name, builder.kind, dtype, builder.shape, builder.is_nullable, ends, data),
            )
        return cls(builders[0].count, tuple(columns), row_type, end)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
