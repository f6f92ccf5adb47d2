"""An index is a read-only sequence; slices and columns are views."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmload import SharedIndex
from tests.formats.shared_index.index_kit import Photo

ROWS = [Photo(f"{i}.jpg", i * i) for i in range(10)]
BOUND = st.none() | st.integers(-15, 15)
SLICE = st.builds(slice, BOUND, BOUND, (st.integers(-4, 4).filter(bool) | st.none()))


@given(SLICE, SLICE)
def test_slices_of_slices_equal_those_of_a_list(first: slice, second: slice) -> None:
    view, wanted = SharedIndex(ROWS)[first][second], ROWS[first][second]
    assert isinstance(view, SharedIndex)
    assert list(view) == wanted
    assert view.column("label").tolist() == [row.label for row in wanted]
    assert list(view.column("path")) == [row.path for row in wanted]
    assert len(view) == len(wanted)


@pytest.mark.parametrize("number", [3, np.int32(3), np.uint8(3), torch.tensor(3), -7, True + 2])
def test_any_integer_type_is_a_subscript(number: int) -> None:
    assert SharedIndex(ROWS)[number] == ROWS[3]
    assert SharedIndex(ROWS).take([number]) == [ROWS[3]]


def test_take_returns_the_entries_in_the_order_of_its_indices() -> None:
    index = SharedIndex(ROWS)
    wanted = [ROWS[4], ROWS[9], ROWS[4]]
    assert index.take([4, -1, 4]) == wanted
    assert index.take(np.array([4, 9, 4])) == wanted
    assert index.take(torch.tensor([4, 9, 4])) == wanted
    assert index.__getitems__([4, 9, 4]) == wanted
    assert index[2:].take([2]) == [ROWS[4]]


@pytest.mark.parametrize("number", [10, -11, 1 << 80])
def test_subscript_out_of_range_is_an_index_error(number: int) -> None:
    with pytest.raises(IndexError, match=r"index -?1\d is out of range: there are 10 entries|cannot fit"):
        SharedIndex(ROWS)[number]
    with pytest.raises(IndexError):
        SharedIndex(ROWS).take([0, number])


@pytest.mark.parametrize("item", [1.0, "a", None, [1]])
def test_other_subscripts_are_type_errors(item: object) -> None:
    with pytest.raises(TypeError, match=f"an index takes integers and slices, got {type(item).__name__}"):
        SharedIndex(ROWS)[item]


def test_index_is_a_sequence() -> None:
    index = SharedIndex(ROWS)
    assert isinstance(index, Sequence)
    assert ROWS[3] in index
    assert "nothing" not in index
    assert index.index(ROWS[3]) == 3
    assert list(reversed(index)) == ROWS[::-1]


def test_index_is_read_only() -> None:
    index = SharedIndex(ROWS)
    with pytest.raises(TypeError):
        index[0] = ROWS[1]  # type: ignore[index]  # on purpose
    column = index.column("label")
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        column.flags.writeable = True
    with pytest.raises(ValueError, match="WRITEABLE"):
        SharedIndex(np.empty((0, 3))).column(0).flags.writeable = True
    with pytest.raises(TypeError, match="not writable"):
        ctypes.c_char.from_buffer(index._memory.mapping)


def test_column_outlives_its_index() -> None:
    index = SharedIndex.from_columns({"label": np.arange(1000, dtype=np.int32)})
    column = index.column("label")
    assert np.shares_memory(column, index.column("label"))
    del index
    assert column.sum() == 499500


def test_slice_outlives_its_index() -> None:
    view = SharedIndex(ROWS)[5:]
    assert list(view) == ROWS[5:]


def test_columns_property_has_names_and_types() -> None:
    rows = [{"path": "a", "note": None, "raw": b"", "n": 1, "w": 0.5, "ok": True, "box": np.zeros((2, 2), "f4")}]
    assert SharedIndex(rows).columns == {
        "path": "str",
        "note": "str | None",
        "raw": "bytes",
        "n": "int64",
        "w": "float64",
        "ok": "bool",
        "box": "float32[2, 2]",
    }
    assert SharedIndex([("a", 1)]).columns == {0: "str", 1: "int64"}
    assert SharedIndex([None, b"a"]).columns == {0: "bytes | None"}
    assert SharedIndex([]).columns == {0: "str"}


def test_column_is_selected_by_name_or_number() -> None:
    assert SharedIndex([("a", 1), ("b", 2)]).column(1).tolist() == [1, 2]
    assert SharedIndex([5, 6]).column(0).tolist() == [5, 6]
    assert SharedIndex([{"box": np.ones((2, 3))}] * 4).column("box").shape == (4, 2, 3)
    with pytest.raises(KeyError, match=r"no column 'size'; there are \['path', 'label'\]"):
        SharedIndex(ROWS).column("size")


def test_repr_describes_the_content() -> None:
    assert repr(SharedIndex(["ab"] * 3)) == "<SharedIndex of 3 entries, str, 128 bytes shared>"
    assert repr(SharedIndex(ROWS)[:4]).startswith("<SharedIndex of 4 entries, Photo(path: str, label: int64), ")
    assert "dict(a: float64)" in repr(SharedIndex([{"a": 0.5}]))


def test_copies_are_the_same_index() -> None:
    index = SharedIndex(ROWS)
    assert copy.copy(index) is index
    assert copy.deepcopy({"paths": index})["paths"] is index


def test_index_can_be_subclassed() -> None:
    class Paths(SharedIndex):
        def size(self) -> int:
            return len(self)

    paths = Paths(ROWS)
    assert paths[2:].size() == 8
    assert Paths.from_columns({"a": [1]}).size() == 1
