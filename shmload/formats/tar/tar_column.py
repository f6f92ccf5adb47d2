"""Read one field of a schema from tar shards, for all rows of a batch at once.

Native readers copy values that are written in the usual way. When they stop at a row, Python code decodes that row: it either
converts the value or raises an error that explains what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload._core.tar_rows import Members
from shmload.batch.element_types import of_any
from shmload.batch.layout import dtype_and_shape, fits

DecodeRow = Callable[[int], Any]  # row -> the value, as `__getitem__` returns it


@dataclass(frozen=True)
class TarColumn:
    """Reads one field of a schema into the rows of batches.

    Attributes:
        name: name of the field.
        number: position of the field among the dataset's fields.
        way: how its rows are read: "npy", "int", "raw", "str" and "bytes" natively, "decode" in Python.
        dtype: numpy's; str or bytes for text.
        shape: shape of a row; None is a ragged extent.
    """

    name: str
    number: int
    way: str
    dtype: Any
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, name: str, number: int, spec: Any, kinds: set[str]) -> TarColumn:
        """Create the column of a schema's field.

        Args:
            name, number: as for the class.
            spec: the schema's entry.
            kinds: the kinds of members that the field may have: "npy", "int", "raw", "str" or "decode".
        Raises:
            TypeError, ValueError: the entry is invalid, or members cannot have such a type or shape.
        """
        dtype, shape = dtype_and_shape(name, spec)
        if dtype in (str, bytes):
            if shape:
                raise ValueError(f"schema[{name!r}] is text of shape {shape}: a member is one value of it, whose shape is ()")
            return cls(name, number, dtype.__name__ if kinds <= {"raw", dtype.__name__} else "decode", dtype, ())
        numpy = of_any(dtype).numpy
        if numpy is None:
            raise ValueError(f"schema[{name!r}]: {dtype} is not a numpy type, which members of tar files need; convert it later")
        found = np.dtype(numpy)
        (kind,) = kinds if len(kinds) == 1 else ("decode",)
        is_native = (
            kind == "npy"
            or (kind == "int" and found.kind in "iu" and shape == ())
            or (kind == "raw" and (None not in shape or shape == (None,)))
        )
        return cls(name, number, kind if is_native else "decode", found, shape)

    def read(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        """Read the field of all rows of a batch into `out`.

        Args:
            members: the member of each row, from `TarRows.find`.
            out: the rows of the batch, as for `read_batch_into`.
            decoded: called for rows that native code cannot copy; returns the value or raises the error.
        """
        if self.dtype in (str, bytes):
            found = [None] * members.count if self.way == "decode" else members.payloads(self.way == "str")
            out[self.name] = [decoded(row) if value is None else value for row, value in enumerate(found)]
        elif None in self.shape:
            self._read_ragged(members, out, decoded)
        else:
            self._read_fixed(members, out[self.name], decoded)

    def _read_fixed(self, members: Members, rows: Any, decoded: DecodeRow) -> None:
        is_plain = isinstance(rows, np.ndarray) and rows.flags.c_contiguous
        row = 0
        while row < members.count:
            if is_plain and self.way == "npy":
                row = members.read_npy(rows, row, self.dtype.str.encode(), np.array(self.shape, np.int64))
            elif is_plain and self.way == "int":
                row = members.read_ints(rows, row, self.dtype.itemsize, self.dtype.kind == "i")
            elif is_plain and self.way == "raw":
                row = members.read_raw(rows, row)
            if row < members.count:  # the native reader stopped at this row
                rows[row] = self.checked(decoded(row))
                row += 1

    def _read_ragged(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        count = members.count
        extents = np.empty((count, self.shape.count(None)), np.int64)
        shape = np.array([-1 if n is None else n for n in self.shape], np.int64)
        by_hand: dict[int, Any] = {}
        row = 0
        while row < count:
            if self.way == "npy":
                row = members.extents(extents, row, self.dtype.str.encode(), shape, self.dtype.itemsize)
            elif self.way == "raw":
                row = members.raw_extents(extents, row, self.dtype.itemsize)
            if row < count:
                value = by_hand[row] = self.checked(decoded(row))
                extents[row] = [n for n, s in zip(value.shape, self.shape, strict=True) if s is None]
                row += 1
        lengths = extents[:, 0].tolist() if extents.shape[1] == 1 else [tuple(each) for each in extents.tolist()]
        values = out.reserve(self.name, lengths)
        numels = extents.prod(axis=1) * int(np.prod([n for n in self.shape if n is not None], dtype=np.int64))
        ends = numels.cumsum()
        members.copy_ragged(values, (ends * self.dtype.itemsize).astype(np.uint64))
        for row, value in by_hand.items():
            values[int(ends[row] - numels[row]) : int(ends[row])] = value.reshape(-1)

    def checked(self, value: Any) -> Any:
        """Convert a decoded value to the type of its row: text, or an array of the schema's shape and dtype.

        Raises:
            ValueError: the value does not match the schema.
        """
        if self.dtype in (str, bytes):
            return self._text(value)
        if isinstance(value, bytes):
            if len(value) % self.dtype.itemsize:
                raise ValueError(f"{len(value)} bytes are not a whole number of {self.dtype}")
            value = np.frombuffer(value, self.dtype)
            extents = [n for n in self.shape if n is not None]
            if len(extents) == len(self.shape) and value.size == np.prod(extents, dtype=np.int64):
                value = value.reshape(extents)
        array = np.asarray(value)
        if not fits(array.shape, self.shape):
            raise ValueError(f"the schema says shape {self.shape}, but the value has {array.shape}")
        if array.dtype.kind == "i" and array.ndim == 0 and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            is_held = limits.min <= int(array) <= limits.max
        else:
            is_held = array.dtype.newbyteorder("=") == self.dtype.newbyteorder("=")
        if not is_held:
            shown = f"{array} " if array.ndim == 0 else ""
            raise ValueError(
                f"the schema says {self.dtype}, and it is {shown}of {array.dtype}; change the schema or convert it in decode="
            )
        return array.astype(self.dtype)

    def _text(self, value: Any) -> Any:
        if isinstance(value, bytes) and self.dtype is str:
            return value.decode()
        if isinstance(value, str) and self.dtype is bytes:
            return value.encode()
        if not isinstance(value, self.dtype):
            raise ValueError(f"the schema says {self.dtype.__name__}, and the value is of type {type(value).__name__}")
        return value
