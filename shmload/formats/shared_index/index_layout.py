"""The layout of a SharedIndex in memory: one column after another, each part at a multiple of 64 bytes.

    column 0: words | data,  column 1: words | data,  ...

src/index.h describes words and data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.mapping import Mapping as MappedMemory

SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}  # kinds that always have the same dtype


@dataclass(frozen=True)
class ColumnLayout:
    """The location and type of one column.

    Attributes:
        name: key of a dict, field of a named tuple, or position in a plain tuple; 0 if entries are not rows.
        kind: "str", "bytes", "int", "float", "bool" or "array".
        dtype, shape: type and shape of one entry; dtype is "" for text.
        is_nullable: whether entries of text may be None.
        ends, data: offsets in bytes of the words (-1 without words) and of the values.
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
        """Return the type in the form shown to users: "str", "str | None", "int64", "float32[3, 2]"."""
        if not self.dtype:
            return f"{self.kind} | None" if self.is_nullable else self.kind
        return self.dtype + (str(list(self.shape)) if self.shape else "")

    def array(self, memory: MappedMemory, count: int) -> NDArray[Any]:
        """Return the whole column as a view of the shared memory; not for text. Shape `(count, *shape)`, read-only."""
        return np.ndarray((count, *self.shape), self.dtype, memoryview(memory), self.data)


@dataclass(frozen=True)
class IndexLayout:
    """The layout of an index.

    Attributes:
        count: number of entries.
        columns: the columns, in the order of their memory.
        row_type: dict, tuple or the class of a named tuple; None if entries are the values of a single column.
        nbytes: size of the memory.
    """

    count: int
    columns: tuple[ColumnLayout, ...]
    row_type: type | None
    nbytes: int
