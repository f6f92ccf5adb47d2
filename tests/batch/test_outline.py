"""A batch of nested containers is split into an outline and leaves, packed, and joined again, at the same cost for many samples."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload._core.outline import join, split
from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.packed_batch import PackedBatch, pack
from shmload.batch.unpacking import unpack
from shmload.errors import SampleError
from tests.batch.ragged_kit import Frozen, Opaque, Pair, assert_same

LARGE = "x" * 5000
DAY = datetime.date(2026, 11, 28)


@dataclasses.dataclass
class Fields:
    """A dataclass that is delivered field by field."""

    x: Any
    y: Any


def round_trip(batch: Any) -> Any:
    return unpack(PrivateBatch(pack(batch)))


def arrays() -> st.SearchStrategy[Any]:
    """Strategy for small and large arrays and tensors of several dtypes and shapes, some of them without elements or with gaps."""
    shapes = st.sampled_from([(), (0,), (3,), (2, 2), (0, 3), (1500,), (40, 40)])
    made = st.tuples(shapes, st.sampled_from(["i8", "f4", "u1", "?"])).map(lambda a: np.ones(a[0], a[1]))
    return made.flatmap(lambda a: st.sampled_from([a, a.T, a[::-1] if a.ndim else a, torch.from_numpy(a.copy())]))


def leaves() -> st.SearchStrategy[Any]:
    text = st.sampled_from(["", "grüße", "\udcff", LARGE, b"", b"\0\xff", LARGE.encode()])
    numbers = st.sampled_from([0, -1, 2**70, True, 0.5, float("nan"), float("-inf"), 1j])
    objects = st.sampled_from([..., DAY, Opaque(3), np.array([1, "a"], dtype=object), frozenset({1}), np.int64(3), range(3)])
    return st.one_of(st.none(), text, numbers, objects, arrays())


def structures() -> st.SearchStrategy[Any]:
    """Strategy for lists, tuples, dicts, named tuples and dataclasses of leaves."""
    keys = st.sampled_from(["a", 1, 2.5, None, b"k", True])
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(keys, inner, max_size=4),
            st.builds(Pair, inner, inner),
            st.builds(Frozen, inner),
            st.builds(Fields, inner, inner),
            st.sampled_from(["a", b"a"]).map(lambda word: [word] * 100),
        ),
        max_leaves=25,
    )


def assert_alike(expected: Any, got: Any) -> None:
    """As assert_same, and for numpy arrays."""
    if isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tolist() == expected.tolist()
    elif type(expected) in (list, tuple):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(expected, got, strict=True):
            assert_alike(one, other)
    elif type(expected) is dict:
        assert list(got) == list(expected)
        for key in expected:
            assert_alike(expected[key], got[key])
    elif isinstance(expected, Pair | Fields):
        assert type(got) is type(expected)
        assert_alike(*(tuple(one) if isinstance(one, Pair) else tuple(vars(one).values()) for one in (expected, got)))
    elif isinstance(expected, Frozen):
        assert_alike(expected.points, got.points)
    else:
        assert_same(expected, got)


@settings(max_examples=300, deadline=None)
@given(structures())
def test_any_structure_is_delivered_as_it_was(batch: Any) -> None:
    assert_alike(batch, round_trip(batch))


@settings(max_examples=100, deadline=None)
@given(structures())
def test_outline_and_leaves_make_the_value_again_and_share_no_container_with_it(value: Any) -> None:
    outline, parts = split([value])
    made = join(outline, parts)
    assert_alike([value], made)
    made.append("more")
    assert_alike([value], join(*split([value])))


@pytest.mark.parametrize("num_leaves", [0, 1, 3])
def test_an_outline_with_another_number_of_leaves_is_an_error(num_leaves: int) -> None:
    outline, _ = split([DAY, (1, {"day": DAY})])
    with pytest.raises(ValueError, match="an outline has"):
        join(outline, [DAY] * num_leaves)


def test_a_list_that_contains_itself_and_one_nested_deeper_than_marshal_allows_are_delivered() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = round_trip(loop)
    for _ in range(200):
        assert found[0] == 1
        found = found[1]
    deep: Any = "bottom"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(
        SampleError, match=r"a value of type list in the batch cannot be pickled.*RecursionError"
    ):  # as in torch's loader
        round_trip(deep)
    deep = "bottom"
    for _ in range(300):
        deep = [deep]
    assert round_trip(deep) == deep


def test_the_object_that_cannot_be_pickled_is_named_among_many() -> None:
    with pytest.raises(SampleError, match="a value of type function in the batch cannot be pickled"):
        pack([(DAY, 1), {"x": (lambda: 0)}, (DAY, 2)])


class Sample:
    """An object that needs pickle."""

    def __init__(self, number: int) -> None:
        self.number = number


SAMPLES: dict[str, Callable[[int], Any]] = {
    "numbers and text": lambda i: {"id": i, "text": f"word {i}", "of": (1.5, None, [1, 2])},
    "dates": lambda i: (DAY + datetime.timedelta(i), i),
    "objects": Sample,
    "arrays": lambda i: {"x": np.full(4, i), "y": i},
    "dataclasses": lambda i: Fields(i, str(i)),
    "large text": lambda i: (f"{i}" * 5000, i),
    "sometimes an object": lambda i: (i, DAY if i % 3 else None),
}


def num_calls(function: Callable[[], Any]) -> int:
    """Return the number of Python functions that run meanwhile."""
    count = 0

    def counted(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_trainer_runs_as_many_python_functions_for_many_samples_as_for_few(kind: str) -> None:
    """A function for each value made lists of samples take up to 4 times the trainer's CPU of torch's loader."""
    few, many = (PrivateBatch(pack([SAMPLES[kind](i) for i in range(count)])) for count in (4, 60))
    assert num_calls(lambda: unpack(many)) == num_calls(lambda: unpack(few))


def test_leaves_of_one_kind_share_a_piece() -> None:
    packed: PackedBatch = pack([{"x": np.arange(n), "y": torch.ones(n)} for n in range(50)])
    assert len(packed.pieces) == 2
    assert packed.num_foreign == 0
