"""Blocks stored as columns, compared with collating the items: any structure, any cut, and items returned unchanged."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shmload.batch.ragged import AS_LISTS
from shmload.modes.default_collate import collated
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Filter, Map, Range
from shmload.pipeline.block_columns import BlockColumns, batch_of, columns_of, items_of, length, part_of

RULE = AS_LISTS
NUMPY = ["uint8", "int16", "uint16", "int64", "float16", "float32", "complex64", "bool"]
TORCH = [torch.uint8, torch.int32, torch.bfloat16, torch.float64, torch.uint16]

LEAVES = st.one_of(
    st.tuples(st.just("number"), st.sampled_from([int, float, bool])),
    st.tuples(st.just("text"), st.sampled_from([str, bytes])),
    st.tuples(st.just("array"), st.sampled_from(NUMPY), st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("scalar"), st.sampled_from(NUMPY)),
    st.tuples(st.just("tensor"), st.sampled_from(TORCH), st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("odd"), st.sampled_from(["none", "huge", "grad", "object", "ragged"])),
)
SHAPES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
        st.tuples(st.just("tuple"), st.lists(inner, max_size=3)),
        st.tuples(st.just("list"), st.lists(inner, max_size=3)),
    ),
    max_leaves=5,
)


def is_same(found: Any, wanted: Any) -> bool:
    """Returns whether two structures are equal in types, dtypes, shapes and all values."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(is_same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(is_same, found, wanted))
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
    return bool(found == wanted)


def made(shape: Any, number: int) -> Any:
    """Returns an item of the given shape."""
    kind, what, *rest = shape
    if kind == "number":
        return what(number % 3 if what is bool else number * 7 - 3)
    if kind == "text":
        return f"text {number}" * (number % 3) if what is str else b"x" * number
    if kind == "array":
        return (np.arange(np.prod(rest[0], dtype=int)).reshape(rest[0]) + number).astype(what)
    if kind == "scalar":
        return np.dtype(what).type(number)
    if kind == "tensor":
        return (torch.arange(int(np.prod(rest[0], dtype=int))).reshape(rest[0]) + number).to(what)
    if kind == "dict":
        return {name: made(inner, number) for name, inner in what.items()}
    if kind in ("tuple", "list"):
        parts = [made(inner, number) for inner in what]
        return tuple(parts) if kind == "tuple" else parts
    odd = {"none": None, "huge": 1 << 70, "grad": torch.ones(2, requires_grad=True), "object": {1, number}}
    return np.arange(number % 3 + 1) if what == "ragged" else odd[what]


def blocks_of(items: list[Any], ends: list[int]) -> list[Any]:
    borders = sorted({0, len(items), *(end % len(items) for end in ends)})
    parts = [items[start:stop] for start, stop in pairwise(borders)]
    return [columns_of(part) or part for part in parts]


@settings(deadline=None, max_examples=300)
@given(st.lists(SHAPES, min_size=1, max_size=2), st.integers(1, 9), st.lists(st.integers(0, 8), max_size=3), st.data())
def test_batch_from_blocks_equals_collated_items(shapes: Any, n: int, ends: list[int], data: Any) -> None:
    items = [made(shapes[number * len(shapes) // n], number) for number in range(n)]
    blocks = blocks_of(items, ends)
    first = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(first + 1, n))
    pieces = part_of([(block, 0, length(block)) for block in blocks], first, stop)
    assert is_same(items_of(pieces), items[first:stop])
    batch = batch_of(pieces)
    if batch is not None:
        assert is_same(batch, collated(items[first:stop], RULE))


def test_items_of_equal_structure_become_columns() -> None:
    items = [{"x": np.full(3, i, np.float32), "y": (i, float(i), f"{i}"), "z": torch.tensor([i])} for i in range(4)]
    columns = columns_of(items)
    assert isinstance(columns, BlockColumns)
    batch = batch_of([(columns, 1, 3)])
    assert batch["x"].tolist() == [[1.0] * 3, [2.0] * 3]
    assert batch["y"][2] == ("1", "2")
    assert batch["z"].data_ptr() == columns.tree["z"][1:].data_ptr()  # a slice, not a copy


def test_blocks_of_other_dtypes_are_collated_item_by_item() -> None:
    blocks = [columns_of([np.arange(2, dtype=dtype)] * 2) for dtype in (np.int32, np.int64)]
    assert None not in blocks
    pieces = [(block, 0, 2) for block in blocks if block]
    assert batch_of(pieces) is None
    assert [item.dtype for item in items_of(pieces)] == [np.int32, np.int32, np.int64, np.int64]


@pytest.mark.parametrize("odd", [None, {1, 2}, 1 << 70, torch.ones(2, requires_grad=True)])
def test_items_that_columns_cannot_hold_stay_items(odd: Any) -> None:
    assert columns_of([odd, odd]) is None
    assert columns_of([{"x": 1}, {"y": 1}]) is None
    assert columns_of([1, 2.0]) is None
    assert columns_of([np.zeros(2), np.zeros(3)]) is None


def some(i: int) -> Any:
    return {"x": np.full(2, i), "name": str(i)} if i % 40 < 30 else {"x": np.full(i % 3 + 1, i), "name": str(i)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_can_span_blocks_with_and_without_columns(num_workers: int) -> None:
    function = DistributedBatchedMap(some, num_workers) if num_workers else Map(some)
    expected = [collated([some(i) for i in range(first, first + 6)], RULE) for first in range(0, 90, 6)]
    with Conveyer([Range(90, repeating=False), function, Filter(bool), Collate(6)], block_size=10) as pipeline:
        for batch, wanted in zip(pipeline, expected, strict=True):
            assert is_same(batch, wanted)
