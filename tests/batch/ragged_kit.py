"""Samples of every kind, and a reference for their batches that is written for clarity and shares no code with the loader."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from shmload import Jagged, Padded


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    image: Any
    caption: Any = ""

    def __post_init__(self) -> None:
        assert not isinstance(self.image, list), "constructed from samples, never from columns"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    points: Any


class Opaque:
    """An object that can only be pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]  # not needed


class Samples:
    """A dataset of given samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Encoding(UserDict[str, Any]):
    """A mapping with another attribute, like the encodings of transformers' tokenizers."""

    def __init__(self, data: dict[str, Any], origin: str) -> None:
        super().__init__(data)
        self.origin = origin


def reference(values: list[Any], mode: str = "list", *, is_field: bool = False) -> Any:
    """Returns the batch of some samples under `ragged=mode`, without a schema.

    "list" makes lists of what cannot be stacked; the other modes treat every array of at least one dimension, and every list of
    numbers, as ragged. Other lists in fields stay lists, unless they contain arrays or containers and rows are joined.

    Args:
        values: the samples, or the values of one field.
        mode: the value of `ragged`.
        is_field: whether these are values of a field.
    """
    head = values[0]
    if all(type(v) is type(head) for v in values):
        if type(head) is dict:
            return {key: reference([v[key] for v in values], mode, is_field=True) for key in head}
        if isinstance(head, Mapping):
            filled = copy.copy(head)
            filled.update({key: reference([v[key] for v in values], mode, is_field=True) for key in head})  # type: ignore[attr-defined]  # these can be changed
            return filled
        if isinstance(head, tuple) and hasattr(head, "_fields"):
            return type(head)(*(_column([v[i] for v in values], mode) for i in range(len(head))))
        if dataclasses.is_dataclass(head):
            made: Any = object.__new__(type(head))
            for field in dataclasses.fields(head):
                object.__setattr__(made, field.name, reference([getattr(v, field.name) for v in values], mode, is_field=True))
            return made
        if isinstance(head, float) or (isinstance(head, int) and all(-(2**63) <= v < 2**63 for v in values)):
            return torch.tensor(values, dtype={float: torch.float64, int: torch.int64, bool: torch.bool}[type(head)])
        if isinstance(head, np.generic):
            return torch.from_numpy(np.stack(values))
        if isinstance(head, torch.Tensor | np.ndarray):
            rows = [as_tensor(v) for v in values]
            return _tensors(rows, mode) if all(isinstance(row, torch.Tensor) for row in rows) else rows
    if all(isinstance(v, list | tuple) for v in values):
        numbers = [type(x) for v in values for x in v]
        if isinstance(head, list) and set(numbers) <= {int, float}:
            dtype = torch.float64 if float in numbers else torch.int64
            return _tensors([torch.tensor(v, dtype=dtype) for v in values], mode)
        has_parts = any(isinstance(x, np.ndarray | torch.Tensor | Mapping | list | tuple) for v in values for x in v)
        if isinstance(head, list) and is_field and (mode == "list" or not has_parts):
            return [as_tensor(v) for v in values]
        assert len({len(v) for v in values}) == 1, "these are refused"
        return [_column([v[i] for v in values], mode) for i in range(len(head))]
    if all(isinstance(v, int | float | np.number) and (not isinstance(v, int) or -(2**63) <= v < 2**63) for v in values):
        return default_collate(values)  # of several types
    return [as_tensor(v) for v in values]


def _column(values: list[Any], mode: str) -> Any:
    """Collates a column of a sequence, which is a tuple if it contains text, as in torch's collate."""
    if all(type(v) is str for v in values) or all(type(v) is bytes for v in values):
        return tuple(values)
    return reference(values, mode, is_field=True)


def _tensors(rows: list[torch.Tensor], mode: str) -> Any:
    if len({row.dtype for row in rows}) > 1:
        if mode == "list":
            return rows
        common = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        rows = [row.to(common) for row in rows]
    first = rows[0]
    if first.ndim == 0 or mode == "list":
        return torch.stack(rows) if all(row.shape == first.shape for row in rows) else rows
    lengths = torch.tensor([len(row) for row in rows])
    if mode == "pad":
        values = torch.zeros((len(rows), int(lengths.max()), *first.shape[1:]), dtype=first.dtype)
        for row, place in zip(rows, values, strict=True):
            place[: len(row)] = row
        return Padded(values, lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if mode == "jagged":
        return Jagged(torch.cat(rows), offsets)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def as_tensor(value: Any) -> Any:
    """Returns an array as a new tensor if torch has its dtype, and any other value unchanged."""
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) and value.dtype != object else value


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, because some dtypes cannot be compared and NaN differs from itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(expected: Any, got: Any) -> None:
    """Asserts equal types, structure, dtypes, shapes and bytes."""
    assert type(expected) is type(got), (expected, got)
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == got.dtype
        if expected.is_nested:
            assert torch.equal(expected.offsets(), got.offsets())  # type: ignore[operator]  # of a jagged tensor
            assert_same(expected.values(), got.values())  # type: ignore[operator]  # as above
        else:
            assert expected.shape == got.shape
            assert not got.numel() or torch.equal(raw(expected), raw(got))
    elif isinstance(expected, Mapping):
        assert list(expected) == list(got)
        if isinstance(expected, Encoding):
            assert expected.origin == got.origin
        for key in expected:
            assert_same(expected[key], got[key])
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(expected, field.name), getattr(got, field.name))
    elif isinstance(expected, float) and expected != expected:
        assert got != got
    elif isinstance(expected, np.ndarray):
        assert expected.tolist() == got.tolist()
    else:
        assert expected == got
