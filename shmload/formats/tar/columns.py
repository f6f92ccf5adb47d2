"""A field of a schema, read for a whole batch from the members of its samples.

The native readers copy what is as plain as it is usually written; the row they stop at is decoded here, which either converts it or
raises the error that says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload._core.tar_rows import Members
from shmload.batch.dtypes import of_any

DecodeRow = Callable[[int], Any]  # row -> the value, as __getitem__ gives it
KEY = "__key__"


@dataclass(frozen=True)
class Column:
    """One field.

    Attributes:
        way: how its rows are read: "npy", "int", "raw", "str", "bytes", or "decode", which is by Python.
        dtype: numpy's; None for text.
        shape: of a row; None is a ragged extent.
    """

    name: str
    number: int
    way: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | None, ...]

    @property
    def is_ragged(self) -> bool:
        return None in self.shape

    @classmethod
    def of(cls, name: str, number: int, spec: Any, kinds: set[str]) -> Column:
        """The column of a schema's field, whose members are of these kinds: "npy", "int", "raw", "str" or "decode".

        Raises:
            ValueError: numpy has no such type.
        """
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        shape = tuple(shape)
        if dtype in (str, bytes):
            return cls(name, number, dtype.__name__ if kinds <= {"raw", dtype.__name__} else "decode", None, ())
        numpy = of_any(dtype).numpy
        if numpy is None:
            raise ValueError(
                f"schema[{name!r}]: {dtype} is no type of numpy's, as members of tar files are; convert it later"
            )
        found = np.dtype(numpy)
        (kind,) = kinds if len(kinds) == 1 else ("decode",)
        is_native = (
            kind == "npy"
            or (kind == "int" and found.kind in "iu" and shape == ())
            or (kind == "raw" and (None not in shape or shape == (None,)))
        )
        return cls(name, number, kind if is_native else "decode", found, shape)

    def read(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        """Writes the rows of a batch."""
        if self.way in ("str", "bytes"):
            found = members.payloads(self.way == "str")
            out[self.name] = [decoded(row) if value is None else value for row, value in enumerate(found)]
        elif self.dtype is None:
            out[self.name] = [decoded(row) for row in range(members.count)]
        elif self.is_ragged:
            self._read_ragged(members, out, decoded)
        else:
            self._read_fixed(members, out[self.name], decoded)

    def _read_fixed(self, members: Members, rows: Any, decoded: DecodeRow) -> None:
        row = 0
        while row < members.count:
            if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
                row = self._copy(members, rows, row)
            if row < members.count:
                rows[row] = self.checked(decoded(row))
                row += 1

    def _copy(self, members: Members, rows: Any, row: int) -> int:
        """Copies rows natively from `row` on; the first that it cannot."""
        assert self.dtype is not None
        if self.way == "npy":
            return members.read_npy(rows, row, self.dtype.str.encode(), np.array(self.shape, np.int64))
        if self.way == "int":
            return members.read_ints(rows, row, self.dtype.itemsize, self.dtype.kind == "i")
        return members.read_raw(rows, row) if self.way == "raw" else row

    def _read_ragged(self, members: Members, out: Any, decoded: DecodeRow) -> None:
        count = members.count
        extents = np.empty((count, self.shape.count(None)), np.int64)
        by_hand: dict[int, Any] = {}
        row = 0
        while row < count:
            row = self._measure(members, extents, row)
            if row < count:
                value = by_hand[row] = self.checked(decoded(row))
                extents[row] = [n for n, s in zip(value.shape, self.shape, strict=True) if s is None]
                row += 1
        lengths = extents[:, 0].tolist() if extents.shape[1] == 1 else [tuple(each) for each in extents.tolist()]
        values = out.reserve(self.name, lengths)
        numels = extents.prod(axis=1) * int(np.prod([n for n in self.shape if n is not None], dtype=np.int64))
        ends = numels.cumsum()
        assert self.dtype is not None
        members.copy_ragged(values, (ends * self.dtype.itemsize).astype(np.uint64))
        for row, value in by_hand.items():
            values[int(ends[row] - numels[row]) : int(ends[row])] = value.reshape(-1)

    def _measure(self, members: Members, extents: Any, row: int) -> int:
        if self.way == "npy":
            assert self.dtype is not None
            shape = np.array([-1 if n is None else n for n in self.shape], np.int64)
            return members.extents(extents, row, self.dtype.str.encode(), shape, self.dtype.itemsize)
        if self.way == "raw":
            assert self.dtype is not None
            return members.raw_extents(extents, row, self.dtype.itemsize)
        return row

    def checked(self, value: Any) -> Any:
        """A decoded value as it goes into a row: an array of the schema's shape and kind of numbers.

        Raises:
            ValueError: it is none.
        """
        if self.dtype is None:
            return value
        if isinstance(value, bytes) and self.way == "raw":
            if len(value) % self.dtype.itemsize:
                raise ValueError(f"{len(value)} bytes are no whole number of {self.dtype}")
            value = np.frombuffer(value, self.dtype)
            extents = [n for n in self.shape if n is not None]
            if len(extents) == len(self.shape) and value.size == np.prod(extents, dtype=np.int64):
                value = value.reshape(extents)
        array = np.asarray(value)
        if len(array.shape) != len(self.shape) or any(
            s not in (None, n) for n, s in zip(array.shape, self.shape, strict=True)
        ):
            raise ValueError(f"the schema says shape {self.shape}, and it has {array.shape}")
        if array.dtype.kind == "i" and array.ndim == 0 and self.dtype.kind in "iu":
            return np.asarray(int(array), self.dtype) if _holds(self.dtype, int(array)) else _refuse(array, self.dtype)
        if array.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            _refuse(array, self.dtype)
        return array.astype(self.dtype)


def _holds(dtype: np.dtype[Any], number: int) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


def _refuse(array: Any, dtype: np.dtype[Any]) -> Any:
    shown = f"{array} " if array.ndim == 0 else ""
    raise ValueError(
        f"the schema says {dtype}, and it is {shown}of {array.dtype}; change the schema or convert it in decode="
    )
