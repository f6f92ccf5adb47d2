"""Rows gathered from anywhere in memory, and what is refused before anything is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.gather import gather_rows, gather_runs

SOURCE = np.arange(256, dtype=np.uint8)
AT = SOURCE.ctypes.data


@given(starts=st.lists(st.integers(0, 240), max_size=20), nbytes=st.integers(0, 16))
def test_rows_stand_one_after_the_other(starts: list[int], nbytes: int) -> None:
    out = np.zeros(len(starts) * nbytes, np.uint8)
    gather_rows(np.array(starts, np.int64) + AT, nbytes, out)
    assert [SOURCE[s + i] for s in starts for i in range(nbytes)] == out.tolist()


@given(runs=st.lists(st.tuples(st.integers(0, 240), st.integers(0, 16)), max_size=20))
def test_runs_of_different_lengths_stand_end_to_end(runs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array(part, np.int64) for part in (zip(*runs, strict=True) if runs else ([], [])))
    out = np.zeros(int(lengths.sum()), np.uint8)
    gather_runs(starts + AT, lengths, out)
    assert [s + i for s, n in runs for i in range(n)] == out.tolist()


@pytest.mark.parametrize(("nbytes", "room"), [(4, 7), (4, 9), (-1, 0)])
def test_rows_need_exactly_their_room(nbytes: int, room: int) -> None:
    with pytest.raises(ValueError, match=f"2 rows of {nbytes} bytes do not fit {room} bytes"):
        gather_rows(np.full(2, AT, np.int64), nbytes, np.zeros(room, np.uint8))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([4], "2 runs need as many lengths; got 1"),
        ([9, -1], "run 1 is -1 bytes long"),
        ([4, 5], "2 runs of 9 bytes do not fit 8 bytes"),
        ([2**62] * 4 + [8], "5 runs of 4611686018427387904 bytes do not fit 8 bytes"),  # their sum is 8, modulo 2**64
    ],
)
def test_runs_need_lengths_and_exactly_their_room(lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gather_runs(np.full(max(len(lengths), 2), AT, np.int64), np.array(lengths, np.int64), np.zeros(8, np.uint8))
