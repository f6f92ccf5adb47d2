"""Gathering rows from anywhere in memory, and invalid arguments, which are rejected before anything is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.gather import gather_rows, gather_runs, number_runs, pad_runs

SOURCE = np.arange(256, dtype=np.uint8)
AT = SOURCE.ctypes.data


@given(starts=st.lists(st.integers(0, 240), max_size=20), nbytes=st.integers(0, 16))
def test_rows_are_concatenated(starts: list[int], nbytes: int) -> None:
    out = np.zeros(len(starts) * nbytes, np.uint8)
    gather_rows(np.array(starts, np.int64) + AT, nbytes, out)
    assert [SOURCE[s + i] for s in starts for i in range(nbytes)] == out.tolist()


@given(runs=st.lists(st.tuples(st.integers(0, 240), st.integers(0, 16)), max_size=20))
def test_runs_of_different_lengths_are_concatenated(runs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array(part, np.int64) for part in (zip(*runs, strict=True) if runs else ([], [])))
    out = np.zeros(int(lengths.sum()), np.uint8)
    gather_runs(starts + AT, lengths, out)
    assert [s + i for s, n in runs for i in range(n)] == out.tolist()


@pytest.mark.parametrize(("nbytes", "room"), [(4, 7), (4, 9), (-1, 0)])
def test_output_must_have_exactly_the_size_of_the_rows(nbytes: int, room: int) -> None:
    with pytest.raises(ValueError, match=f"out must have the bytes of 2 rows of {nbytes}, got {room}"):
        gather_rows(np.full(2, AT, np.int64), nbytes, np.zeros(room, np.uint8))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([4], "2 runs need 2 lengths, got 1"),
        ([9, -1], "the length of run 1 must not be negative, got -1"),
        ([4, 5], "out must have the 9 bytes of 2 runs, got 8"),
        ([2**62] * 4 + [8], "out must have the 4611686018427387904 bytes of 5 runs, got 8"),  # the sum is 8 modulo 2**64
    ],
)
def test_runs_need_valid_lengths_and_an_output_of_exactly_their_size(lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gather_runs(np.full(max(len(lengths), 2), AT, np.int64), np.array(lengths, np.int64), np.zeros(8, np.uint8))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 3), st.sampled_from(["u1", "i8", "f4"]))
def test_runs_are_padded_with_zeros(lengths: list[int], more: int, dtype: str) -> None:
    runs = [np.arange(1, length + 1).astype(dtype) for length in lengths]
    wide = max(1, max(lengths) + more)
    out = np.full((len(runs), wide), 77, dtype)
    pad_runs(runs, wide * out.itemsize, out.reshape(-1).view(np.uint8))
    for row, run in zip(out.tolist(), runs, strict=True):
        assert row == [*run.tolist(), *[0] * (wide - len(run))]


def test_invalid_padding_is_an_error() -> None:
    out = np.zeros(16, np.uint8)
    for runs, nbytes in (
        ([np.zeros(9, np.uint8), np.zeros(1, np.uint8)], 8),  # one is longer
        ([np.zeros(4, np.uint8)], 8),  # `out` is larger
        ([np.zeros(8, np.uint8)] * 3, 8),  # `out` is smaller
        ([np.zeros(16, np.uint8)[::2], np.zeros(8, np.uint8)], 8),  # not contiguous
        ([], 8),
        ([np.zeros(0, np.uint8)], 0),
    ):
        with pytest.raises((ValueError, BufferError)):
            pad_runs(runs, nbytes, out)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3))
def test_elements_are_numbered_by_run_and_position(lengths: list[int], more: int) -> None:
    numbers, places = np.full((2, sum(lengths) + more), -1, np.int64)
    number_runs(lengths, numbers, places)
    assert numbers.tolist() == [run for run, length in enumerate(lengths, 1) for _ in range(length)] + [-1] * more
    assert places.tolist() == [place for length in lengths for place in range(length)] + [-1] * more


@pytest.mark.parametrize("lengths", [[4, 5], [9], [3, -1], [1 << 62, 1 << 62]])
def test_numbering_runs_longer_than_the_output_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="ends beyond the"):
        number_runs(lengths, *np.zeros((2, 8), np.int64))
