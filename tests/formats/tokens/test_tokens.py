"""TokenDataset: windows as slices of numpy, documents never crossed, every token packed exactly once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import TokenDataset

KINDS = ["u1", "i1", "u2", "i2", "u4", "i4", "i8"]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20), st.sampled_from(KINDS))
def test_windows_are_slices_at_the_stride(n: int, window: int, stride: int, kind: str) -> None:
    tokens = np.arange(n).astype(kind)
    dataset = TokenDataset(tokens, window, stride=stride)
    expected = [tokens[i : i + window].tolist() for i in range(0, n - window + 1, stride)]
    assert expected == [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12), st.sampled_from([None, 5]), st.integers(1, 50))
def test_packing_holds_every_token_once_and_numbers_documents(
    lengths: list[int], window: int, seed: int | None, block: int
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    dataset = TokenDataset(tokens, window, document_index=offsets, pack=True, seed=seed, block=block)
    seen: list[int] = []
    for i in range(len(dataset)):
        row = dataset[i]
        used = int((row["segment_ids"] > 0).sum())
        assert [0] * (window - used) == row["segment_ids"][used:].tolist() == row["tokens"][used:].tolist()
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            part = row["segment_ids"] == segment
            values = row["tokens"][part]
            assert list(range(len(values))) == row["position_ids"][part].tolist()
            assert list(range(values[0], values[0] + len(values))) == values.tolist()
            assert len(set(np.searchsorted(offsets, values - 1, "right").tolist())) == 1
        seen += row["tokens"][:used].tolist()
    assert tokens.tolist() == sorted(seen)
    assert dataset.density == (len(tokens) / (len(dataset) * window) if len(dataset) else 1.0)


def test_packing_takes_the_tightest_fit() -> None:
    dataset = TokenDataset(np.arange(20), 10, document_index=[0, 6, 13, 17, 20], pack=True)
    assert len(dataset) == 2
    assert dataset.density == 1.0
    assert [*range(6), *range(13, 17)] == dataset[0]["tokens"].tolist() or [
        *range(6),
        *range(13, 17),
    ] == dataset[1]["tokens"].tolist()


def test_a_separator_ends_its_document_and_windows_are_padded() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 1, 2], np.uint16)
    dataset = TokenDataset(tokens, 3, separator=0, pad=-1)
    assert [dataset[i]["tokens"].tolist() for i in range(4)] == [[5, 6, 0], [7, 0, -1], [8, 9, 1], [2, -1, -1]]
    overlapping = TokenDataset(tokens, 3, stride=1, separator=0, pad=-1)
    assert [overlapping[i]["tokens"].tolist() for i in range(4)] == [[5, 6, 0], [7, 0, -1], [8, 9, 1], [9, 1, 2]]


def test_a_raw_file_is_read_through_workers_and_pickles(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(1000, dtype="<u2").tobytes())
    dataset = pickle.loads(pickle.dumps(TokenDataset(path, 100, dtype="uint16", out_dtype="int32")))
    with ShmLoader(dataset, batch_size=5, num_workers=1, shuffle=True, seed=1) as loader:
        assert list(range(1000)) == sorted(v for b in loader for v in b["tokens"].reshape(-1).tolist())


def test_a_plan_travels_in_shared_memory() -> None:
    dataset = TokenDataset(np.arange(1, 2001) % 50, 64, separator=0, pack=True)
    other = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 2000
    assert [dataset[i]["tokens"].tolist() for i in range(9)] == [other[i]["tokens"].tolist() for i in range(9)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": 0}, ValueError, "at least 1; got 0, 0 and 65536"),
        ({"out_dtype": "int16"}, ValueError, "out_dtype is 'int64' or 'int32'"),
        ({"separator": 1, "document_index": [0]}, ValueError, "both were given"),
        ({"pack": True}, ValueError, "give separator= or document_index="),
        ({"window": 3, "stride": 4, "separator": 1}, ValueError, "at strides up to 3; got 4"),
        ({"out_dtype": "int32"}, TypeError, "tokens of int64 do not all fit int32"),
        ({"document_index": np.array([0, 5, 4])}, ValueError, "document offset 2 is 4: offsets ascend"),
        ({"document_index": np.array([0, 99])}, ValueError, "document offset 1 is 99"),
        ({"document_index": np.array([0.5])}, ValueError, "one axis of integers"),
    ],
)
def test_what_makes_no_windows_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenDataset(np.arange(10), **arguments)


def test_tokens_that_are_none_are_refused(tmp_path: Path) -> None:
    for wrong in (np.zeros(4), np.zeros((2, 2), int), np.arange(9)[::2], np.arange(4, dtype=">i4")):
        with pytest.raises(TypeError, match="tokens are one aligned run"):
            TokenDataset(wrong, 2)
    path = tmp_path / "odd.bin"
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="does not say what its tokens are"):
        TokenDataset(path)
    with pytest.raises(ShardCorrupt, match="odd.bin, offset 3: 3 bytes are no whole number of uint16 tokens"):
        TokenDataset(path, dtype="uint16")


def test_an_index_beyond_the_windows_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="index 3 is out of range for 3 samples"):
        TokenDataset(np.arange(9), 3)[3]
