"""Entries read from an index are equal to those put in and of the same type; an unsupported entry is named in an error."""

from __future__ import annotations

import enum
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload import SharedIndex
from tests.formats.shared_index.index_kit import Photo

slow = pytest.mark.slow(reason="hypothesis builds indexes of many kinds of values")
TEXT = st.text(st.characters(), max_size=12)  # every code point, including lone surrogates
COLUMNS: list[st.SearchStrategy[Any]] = [
    TEXT,
    st.none() | TEXT,
    st.binary(max_size=12),
    st.none() | st.binary(max_size=12),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(0, 255), min_size=3, max_size=3).map(lambda v: np.array(v, np.uint8)),
]
COLUMN = st.sampled_from(COLUMNS)
KEYS = st.lists(TEXT, min_size=1, max_size=4, unique=True)


def same(wanted: Any, got: Any) -> bool:
    """Returns whether two values and all values inside them are equal and of the same type; NaN equals NaN."""
    if type(wanted) is not type(got):
        return False
    if isinstance(wanted, tuple):
        return len(wanted) == len(got) and all(map(same, wanted, got))
    if isinstance(wanted, dict):
        return wanted.keys() == got.keys() and all(same(wanted[key], got[key]) for key in wanted)
    if isinstance(wanted, np.ndarray):
        return wanted.dtype == got.dtype and np.array_equal(wanted, got)
    if isinstance(wanted, float):
        return wanted == got or (math.isnan(wanted) and math.isnan(got))
    return bool(wanted == got)


def check(entries: list[Any]) -> None:
    index = SharedIndex(iter(entries))
    assert len(index) == len(entries)
    assert all(map(same, entries, index))
    assert all(same(entry, index[i]) for i, entry in enumerate(entries))
    assert all(map(same, entries[::-1], index.take(range(-1, -len(entries) - 1, -1))))


@slow
@given(st.data())
def test_values_are_read_back(data: st.DataObject) -> None:
    check(data.draw(st.lists(data.draw(COLUMN), max_size=20)))


@slow
@given(st.data())
def test_tuples_are_read_back(data: st.DataObject) -> None:
    columns = data.draw(st.lists(COLUMN, min_size=1, max_size=4))
    check(data.draw(st.lists(st.tuples(*columns), max_size=20)))


@slow
@given(st.data())
def test_dicts_are_read_back(data: st.DataObject) -> None:
    names = data.draw(KEYS)
    check(data.draw(st.lists(st.fixed_dictionaries({name: data.draw(COLUMN) for name in names}), max_size=20)))


@slow
@given(st.lists(st.builds(Photo, TEXT, st.integers(0, 9)), max_size=9))
def test_named_tuples_are_read_back(rows: list[Photo]) -> None:
    check(rows)


@slow
@given(st.data())
def test_columns_are_read_back_as_rows(data: st.DataObject) -> None:
    names, count = data.draw(KEYS), data.draw(st.integers(0, 9))
    columns = {name: data.draw(st.lists(data.draw(COLUMN), min_size=count, max_size=count)) for name in names}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert all(map(same, rows, SharedIndex.from_columns(columns)))


@pytest.mark.parametrize("entries", [[], [""], [None], [b"\0\0"], ["\ud83d\ude00", "\udcff", "\U0001f600"], [b"", None]])
def test_smallest_indexes_are_read_back(entries: list[Any]) -> None:
    check(entries)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "c8"])
def test_numeric_arrays_keep_their_dtype(dtype: str) -> None:
    values = np.arange(6).astype(dtype)
    assert SharedIndex(values).columns == {0: np.dtype(dtype).name}
    assert list(SharedIndex(values)) == values.tolist()
    assert np.array_equal(list(SharedIndex(values.reshape(3, 2))), values.reshape(3, 2))
    assert SharedIndex.from_columns({"x": values})[4] == {"x": values[4].item()}


def test_numpy_numbers_become_python_numbers() -> None:
    rows = [(np.int32(5), np.float32(0.1), np.bool_(True), np.str_("ä"))]
    got = SharedIndex(rows)[0]
    assert got == rows[0]
    assert list(map(type, got)) == [int, float, bool, str]


def test_subclasses_become_their_base_types() -> None:
    class Label(enum.IntEnum):
        CAT = 3

    assert repr(SharedIndex([Label.CAT])[0]) == "3"


def test_array_of_an_entry_is_a_copy() -> None:
    index = SharedIndex([np.zeros(2)])
    index[0][:] = 7
    assert index[0].tolist() == [0, 0]


def test_generator_is_read_once_and_its_values_are_not_kept() -> None:
    alive = [0]

    class Counted(str):
        def __init__(self, _: str) -> None:
            alive[0] += 1

        def __del__(self) -> None:
            alive[0] -= 1

    def entries() -> Iterator[str]:
        for i in range(50):
            assert alive[0] <= 1
            yield Counted(i)

    assert SharedIndex(entries())[49] == "49"
    assert alive == [0]


def test_function_is_called_for_the_entries() -> None:
    assert list(SharedIndex(lambda: (str(i) for i in range(3)))) == ["0", "1", "2"]


class Point(tuple):
    """A tuple subclass without fields."""


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([2**63], OverflowError, "entry 0: 9223372036854775808 does not fit in int64: store it as a str"),
    ([{"a": 1}, {"a": -(2**63) - 1}], OverflowError, "entry 1, column 'a': -9223372036854775809 does not fit in int64"),
    (["a", 1], TypeError, "entry 1: int after str; the values of a column have one type"),
    ([1, 1.5], TypeError, "entry 1: float after int"),
    ([1.5, 1], TypeError, "entry 1: int after float"),
    ([1, True], TypeError, "entry 1: bool after int"),
    ([True, 1], TypeError, "entry 1: int after bool"),
    (["a", b"a"], TypeError, "entry 1: bytes after str"),
    ([b"a", "a"], TypeError, "entry 1: str after bytes"),
    ([("a", 1), ("b", "c")], TypeError, "entry 1, column 1: str after int"),
    ([Photo("a", 1), Photo("b", None)], TypeError, "entry 1, column 'label': None in a column of int; only str and bytes can be missing: give nan, or -1"),
    ([None, 3], TypeError, "entry 1: int after None: only str and bytes can be None, so use nan or -1"),
    ([pathlib.Path("a")], TypeError, "entry 0: an index cannot store values of type PosixPath, only str, bytes, int, float, bool, numpy numbers and numeric arrays. Convert it"),
    ([[1, 2]], TypeError, "entry 0: an index cannot store values of type list"),
    ([(1, (2, 3))], TypeError, "entry 0, column 1: an index cannot store values of type tuple"),
    ([("a", 1), ("b",)], ValueError, "entry 1: 1 values after rows of 2"),
    ([("a", 1), ["b", 2]], TypeError, "entry 1: list after tuple; the entries of an index are of one type"),
    ([("a", 1), Photo("b", 2)], TypeError, "entry 1: Photo after tuple"),
    ([{"a": 1}, ("b",)], TypeError, "entry 1: tuple after dict"),
    ([{"a": 1}, {"b": 1}], ValueError, r"entry 1: keys \['b'\] after rows of \['a'\]"),
    ([{"a": 1}, {"a": 1, "b": 2}], ValueError, r"entry 1: keys \['a', 'b'\] after rows of \['a'\]"),
    ([()], ValueError, "entry 0: a row needs at least one value, got an empty tuple"),
    ([{}], ValueError, "an index of rows needs at least one column, got none"),
    ([{1: 2}], TypeError, "names of columns are str; got 1 of type int"),
    ([Point((1, 2))], TypeError, "entry 0: values of type Point cannot be created again; give tuples, named tuples or dicts"),
    ([np.zeros(2), np.zeros(3)], ValueError, r"entry 1: an array of float64 \[3\], after arrays of float64 \[2\]; all rows of a column must have one dtype and shape"),
    ([np.array(["a"])], TypeError, "entry 0: an index cannot store an array of <U1"),
    ([np.zeros(2, ">f4")], TypeError, "entry 0: an index cannot store an array of >f4, .* in native byte order"),
    ("abc", TypeError, "a value of type str is one entry, and an index needs many: give a list of them"),
    ({"a": [1]}, TypeError, r"a mapping gives its keys, not its values: use SharedIndex.from_columns\(mapping\)"),
    (3, TypeError, "an index needs an iterable of entries, or a function that gives one; got int"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "error", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_error_names_the_unsupported_entry(entries: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SharedIndex(entries)


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="have one value per entry each; got different numbers: 'a' 1, 'b' 2"):
        SharedIndex.from_columns({"a": ["x"], "b": np.arange(2)})


def test_str_as_a_column_is_an_error() -> None:
    with pytest.raises(TypeError, match="column 'a' is one str: give a sequence with one value per entry"):
        SharedIndex.from_columns({"a": "xyz"})


def test_error_of_the_generator_is_raised() -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise RuntimeError("listing failed")

    with pytest.raises(RuntimeError, match="listing failed"):
        SharedIndex(broken())


@pytest.mark.parametrize("entries", [[{"a": 1}, {"a": 2}], [("x", 1), ("y", 2)], ["x", "yz"], [b"x", None]], ids=str)
def test_array_of_objects_is_read_one_by_one(entries: Any) -> None:
    array = np.empty(2, object)
    array[:] = entries
    assert list(SharedIndex(array)) == entries
