"""TokenDataset: windows equal numpy's slices, documents are never crossed, and packing contains every token once."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import TokenDataset
from tests.formats.open_files_kit import limited_open_files

slow = pytest.mark.slow(reason="starts two workers for each of three loaders")
KINDS = ["u1", "i1", "u2", "i2", "u4", "i4", "i8"]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20), st.sampled_from(KINDS))
def test_windows_are_slices_at_the_stride(n: int, window: int, stride: int, kind: str) -> None:
    tokens = np.arange(n).astype(kind)
    dataset = TokenDataset(tokens, window, stride=stride)
    expected = [tokens[i : i + window].tolist() for i in range(0, n - window + 1, stride)]
    assert expected == [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_has_windows_in_any_order_and_negative_indices(kind: str) -> None:
    window, stride = 5000, 300  # longer than the distance of prefetching
    tokens = (np.arange(20_000) % 101).astype(kind)
    dataset = TokenDataset(tokens, window, stride=stride)
    order = np.random.default_rng(1).integers(-len(dataset), len(dataset), 40)
    rows = np.zeros((len(order), window), np.int64)
    dataset.read_batch_into(order, {"tokens": rows})
    starts = order % len(dataset) * stride
    np.testing.assert_array_equal(np.stack([tokens[start : start + window] for start in starts]), rows)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12), st.sampled_from([None, 5]), st.integers(1, 50))
def test_packing_contains_every_token_once_and_numbers_documents(
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


def reference_packing(lengths: list[int], window: int, block: int) -> list[list[int]]:
    """Packs by the definition of best-fit decreasing; of equally tight windows, the one that became so last is used.

    Returns:
        the pieces of each window.
    """
    windows: list[list[int]] = []
    for first in range(0, len(lengths), block):
        numbers = range(first, min(first + block, len(lengths)))
        is_open: list[tuple[int, int]] = []  # free space, window; the latest last
        for piece in sorted(numbers, key=lambda i: -lengths[i]):
            fitting = [entry for entry in reversed(is_open) if entry[0] >= lengths[piece]]
            if fitting:
                entry = min(fitting, key=lambda e: e[0])
                is_open.remove(entry)
            else:
                entry = (window, len(windows))
                windows.append([])
            windows[entry[1]].append(piece)
            is_open.append((entry[0] - lengths[piece], entry[1]))
    return [sorted(pieces) for pieces in windows]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 70), max_size=40), st.integers(70, 130), st.integers(1, 50))
def test_packing_is_best_fit_decreasing(lengths: list[int], window: int, block: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    datasets = [TokenDataset(tokens, window, document_index=offsets, pack=True, block=block) for _ in range(2)]
    expected = []
    for pieces in reference_packing(lengths, window, block):
        held = [tokens[offsets[i] : offsets[i + 1]] for i in pieces]
        expected.append(
            {
                "tokens": padded([held_tokens.tolist() for held_tokens in held], window),
                "segment_ids": padded([[number] * len(part) for number, part in enumerate(held, 1)], window),
                "position_ids": padded([list(range(len(part))) for part in held], window),
            }
        )
    for dataset in datasets:
        assert expected == [{k: v.tolist() for k, v in dataset[i].items()} for i in range(len(dataset))]


def padded(parts: list[list[int]], window: int) -> list[int]:
    row = [value for part in parts for value in part]
    return row + [0] * (window - len(row))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 15), st.integers(0, 3))
def test_windows_across_documents_have_segment_ids(lengths: list[int], window: int, stride: int, first: int) -> None:
    offsets = first + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(1, offsets[-1] + 3, dtype=np.uint16)
    dataset = TokenDataset(tokens, window, stride=stride, document_index=offsets, cross_documents=True)
    document = np.repeat(np.arange(len(lengths)), lengths)
    starts = range(0, len(document) - window + 1, stride)
    assert len(starts) == len(dataset)
    for row, start in zip((dataset[i] for i in range(len(dataset))), starts, strict=True):
        inside = document[start : start + window]
        assert tokens[first + start : first + start + window].tolist() == row["tokens"].tolist()
        assert (np.unique(inside, return_inverse=True)[1] + 1).tolist() == row["segment_ids"].tolist()
        assert [int((inside[:i] == inside[i]).sum()) for i in range(window)] == row["position_ids"].tolist()


def test_packing_uses_the_tightest_fit() -> None:
    dataset = TokenDataset(np.arange(20), 10, document_index=[0, 6, 13, 17, 20], pack=True)
    assert len(dataset) == 2
    assert dataset.density == 1.0
    assert [*range(6), *range(13, 17)] == dataset[0]["tokens"].tolist() or [*range(6), *range(13, 17)] == dataset[1][
        "tokens"
    ].tolist()


def test_separator_belongs_to_its_document_and_windows_are_padded() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 1, 2], np.uint16)
    dataset = TokenDataset(tokens, 3, separator=0, pad=-1)
    assert [dataset[i]["tokens"].tolist() for i in range(4)] == [[5, 6, 0], [7, 0, -1], [8, 9, 1], [2, -1, -1]]
    overlapping = TokenDataset(tokens, 3, stride=1, separator=0, pad=-1)
    assert [overlapping[i]["tokens"].tolist() for i in range(4)] == [[5, 6, 0], [7, 0, -1], [8, 9, 1], [9, 1, 2]]


def test_raw_file_is_read_by_workers(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(1000, dtype="<u2").tobytes())
    dataset = pickle.loads(pickle.dumps(TokenDataset(path, 100, dtype="uint16", out_dtype="int32")))
    with ShmLoader(dataset, batch_size=5, num_workers=1, shuffle=True, seed=1) as loader:
        assert list(range(1000)) == sorted(v for b in loader for v in b["tokens"].reshape(-1).tolist())


def test_pickled_packing_is_in_shared_memory() -> None:
    dataset = TokenDataset(np.arange(1, 2001) % 50, 64, separator=0, pack=True)
    other = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 2000
    assert [dataset[i]["tokens"].tolist() for i in range(9)] == [other[i]["tokens"].tolist() for i in range(9)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": 0}, ValueError, "at least 1, .*; got 0, 0, 65536"),
        ({"out_dtype": "int16"}, ValueError, "out_dtype must be 'int64' or 'int32'"),
        ({"separator": 1, "document_index": [0]}, ValueError, "pass separator= or document_index=, not both"),
        ({"pack": True}, ValueError, "give separator= or document_index="),
        ({"window": 3, "stride": 4, "separator": 1}, ValueError, "at strides up to 3; got 4"),
        ({"out_dtype": "int32"}, TypeError, "tokens of int64 do not all fit int32"),
        ({"document_index": np.array([0, 5, 4])}, ValueError, "document offset 2 is 4: offsets ascend"),
        ({"document_index": np.array([0, 99])}, ValueError, "document offset 1 is 99"),
        ({"cross_documents": True}, ValueError, "numbers a window's documents: give separator="),
        ({"cross_documents": True, "pack": True, "separator": 1}, ValueError, "and no pack"),
        ({"pad": 1 << 31, "out_dtype": "int32"}, ValueError, "pad is a token of int32; got 2147483648"),
        ({"document_index": np.array([0.5])}, ValueError, "one axis of integers"),
    ],
)
def test_invalid_arguments_are_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenDataset(np.arange(10), **arguments)


def test_invalid_token_arrays_are_an_error(tmp_path: Path) -> None:
    for wrong in (np.zeros(4), np.zeros((2, 2), int), np.arange(9)[::2], np.arange(4, dtype=">i4")):
        with pytest.raises(TypeError, match="tokens are one aligned run"):
            TokenDataset(wrong, 2)
    path = tmp_path / "odd.bin"
    path.write_bytes(bytes(8))
    with pytest.raises(TypeError, match=r"tokens are one aligned run .* in this machine's byte order; got >u2"):
        TokenDataset(path, 2, dtype=">u2")
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="does not contain the type of its tokens"):
        TokenDataset(path)
    with pytest.raises(ShardCorrupt, match=r"odd.bin, offset 3: 3 bytes are not a whole number of uint16 tokens"):
        TokenDataset(path, dtype="uint16")


def test_index_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="index 3 is out of range for 3 samples"):
        TokenDataset(np.arange(9), 3)[3]
    with pytest.raises(TypeError, match="float"):
        TokenDataset(np.arange(9), 3)[1.5]


@pytest.mark.parametrize("kind", ["<u2", "<u4", "<i4"])
@pytest.mark.parametrize("out_dtype", ["int64", "int32"])
def test_largest_tokens_are_unchanged(kind: str, out_dtype: str) -> None:
    tokens = np.array([0, 1, np.iinfo(kind).max, np.iinfo(kind).min], kind)
    if kind == "<u4" and out_dtype == "int32":
        with pytest.raises(TypeError, match="tokens of uint32 do not all fit int32"):
            TokenDataset(tokens, 4, out_dtype=out_dtype)
        return
    (batch,) = ShmLoader(TokenDataset(tokens, 4, out_dtype=out_dtype))
    assert out_dtype == str(batch["tokens"].dtype).removeprefix("torch.")
    assert [tokens.tolist()] == batch["tokens"].tolist()


def megatron(lengths: list[int], boundaries: list[int], code: int = 8) -> bytes:
    """Returns a .idx file in the published layout."""
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
        + struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_files_have_tokens_of_every_type(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([0, 1, np.iinfo(dtype).max], dtype)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "a.idx").write_bytes(megatron([3], [0, 1], code))
    assert TokenDataset(tmp_path / "a.bin", 3, document_index=tmp_path / "a.idx")[0]["tokens"].tolist() == tokens.tolist()


@pytest.mark.parametrize("modes", [b"", b"\0\0\0"])
def test_megatron_files_are_read_by_documents(tmp_path: Path, modes: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(megatron([3, 2, 5], [0, 2, 3]) + modes)
    dataset = TokenDataset(tmp_path / "a.bin", 6, document_index=tmp_path / "a.idx", pad=-1)
    assert [dataset[i]["tokens"].tolist() for i in range(2)] == [[0, 1, 2, 3, 4, -1], [5, 6, 7, 8, 9, -1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "offset 0: this is not the header of a Megatron index"),
        (b"x" * 40, "offset 0: this is not the header of a Megatron index"),
        (megatron([1], [0, 1], code=7), "offset 9: version 1 with tokens of type 7"),
        (megatron([1], [0, 1])[:-1], "offset 18: 1 sequences and 2 boundaries need 62 bytes, or 63 with modes; there are 61"),
        (megatron([1], [0, 1]).replace(b"\1" + bytes(7), b"\xff" * 8), "offset 9: version 18446744073709551615"),
        (megatron([2, 3], [0, 2]).replace(b"\4", b"\5"), "offset 50: sequence 1 of 3 tokens begins at byte 5"),
        (megatron([2, -3], [0, 2]), "offset 50: sequence 1 of -3 tokens"),
        (megatron([2], [0, 2]), "offset 46: document boundaries do not ascend from 0 to the 1 sequences"),
        (megatron([2, 2], [0, 2, 1, 2]), "offset 58: document boundaries do not ascend"),
        (megatron([2], []), "offset 46: document boundaries do not ascend"),
        (megatron([50], [0, 1]), "document offset 1 is 50: offsets ascend from 0 to the 10 tokens"),
    ],
)
def test_malicious_index_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(ShardCorrupt, match=message) as caught:
        TokenDataset(tmp_path / "a.bin", 2, document_index=tmp_path / "a.idx")
    assert str(caught.value).startswith(f"{tmp_path}/a.idx, ")


def test_npy_index_is_read_and_its_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "documents.npy"
    np.save(path, np.array([0, 3, 9], np.int32))
    dataset = TokenDataset(np.arange(9), 6, document_index=path)
    assert [dataset[i]["tokens"].tolist() for i in range(2)] == [[0, 1, 2, 0, 0, 0], [3, 4, 5, 6, 7, 8]]
    np.save(path, np.array([0, 3, 10]))
    with pytest.raises(ShardCorrupt, match=r"documents.npy, document offset 2 is 10"):
        TokenDataset(np.arange(9), 6, document_index=path)


def test_mapped_tokens_truncated_later_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(20000))
    dataset = TokenDataset(path, 10, dtype="uint16")
    os.truncate(path, 5000)
    with pytest.raises(ShardCorrupt, match=r"a.bin, offset 5000: the file was cut off while it was read"):
        dataset[0]


BY_STRIDE_OR_DOCUMENTS = pytest.mark.parametrize("options", [{}, {"separator": 0}], ids=["stride", "documents"])


@BY_STRIDE_OR_DOCUMENTS
def test_only_the_files_of_a_batch_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    for name in "abc":
        np.full(10000, ord(name), np.uint16).tofile(tmp_path / f"{name}.bin")
    dataset = TokenDataset(str(tmp_path / "*.bin"), 10, dtype="uint16", **options)
    os.truncate(tmp_path / "b.bin", 5000)
    out = {"tokens": np.empty((2, 10), np.int64)}
    dataset.read_batch_into([-1, 999], out)
    assert out["tokens"].tolist() == [[ord("c")] * 10, [ord("a")] * 10]
    with pytest.raises(ShardCorrupt, match=r"b.bin, offset 5000: the file was cut off while it was read"):
        dataset.read_batch_into([0, 1000], out)
    with pytest.raises(IndexError, match="index 3000 is out of range for 3000 samples"):
        dataset.read_batch_into([3000, 0], out)


@BY_STRIDE_OR_DOCUMENTS
def test_files_may_be_more_than_a_process_may_open(tmp_path: Path, options: dict[str, Any]) -> None:
    for i in range(100):
        np.arange(10 * i + 1, 10 * i + 11, dtype=np.uint16).tofile(tmp_path / f"{i:03}.bin")
    with limited_open_files(20):
        dataset = TokenDataset(str(tmp_path / "*.bin"), 5, dtype="uint16", **options)
        assert [dataset[i]["tokens"][0] for i in range(200)] == list(range(1, 1001, 5))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
def test_packed_windows_resume_within_an_epoch(num_workers: int) -> None:
    rng = np.random.default_rng(3)
    dataset = TokenDataset(rng.integers(0, 30, 5000).astype(np.uint16), 64, separator=0, pack=True)

    def loader() -> ShmLoader:
        return ShmLoader(dataset, batch_size=4, shuffle=True, seed=5, num_workers=num_workers)

    with loader() as whole:
        expected = [batch["tokens"].tolist() for batch in whole]
    with loader() as first:
        begun = iter(first)
        found = [next(begun)["tokens"].tolist() for _ in range(7)]
        state = first.state_dict()
        del begun
    with loader() as second:
        second.load_state_dict(state)
        assert expected == found + [batch["tokens"].tolist() for batch in second]


def write_llmc(path: Path, tokens: np.ndarray[Any, Any], version: int) -> Path:
    """Writes tokens as llm.c's dev/data/data_common.py does."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240801 if tokens.dtype == np.uint32 else 20240520, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


@pytest.mark.parametrize(("version", "kind"), [(1, "uint16"), (7, "uint32")])
def test_llmc_header_is_skipped(version: int, kind: str, tmp_path: Path) -> None:
    tokens = np.arange(1000, 1100).astype(kind)
    path = write_llmc(tmp_path / "x.bin", tokens, version)
    for dtype in (None, kind):
        dataset = TokenDataset(path, 10, dtype=dtype)
        assert [dataset[i]["tokens"].tolist() for i in range(len(dataset))] == tokens.reshape(10, 10).tolist()
    again = pickle.loads(pickle.dumps(dataset))
    assert again[9]["tokens"].tolist() == tokens[90:].tolist()
    with pytest.raises(
        ValueError, match=rf"x\.bin: llm\.c's header says that tokens are {kind}, and dtype is 'int8'; leave dtype out"
    ):
        TokenDataset(path, 10, dtype="int8")


def test_llmc_header_that_does_not_fit_its_file_is_an_error(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "x.bin", np.arange(100, dtype=np.uint16), 1)
    whole = path.read_bytes()
    for damaged in (whole[:-2], whole + b"\0", whole[:1023], whole[:12]):
        path.write_bytes(damaged)
        with pytest.raises(
            ShardCorrupt, match=r"x\.bin, offset 8: llm\.c's header says 100 tokens of uint16, which need 1224 bytes"
        ):
            TokenDataset(path, 10)
    write_llmc(path, np.arange(100, dtype=np.uint16), 3)
    with pytest.raises(ValueError, match=r"x\.bin, offset 4: llm\.c's header has version 3"):
        TokenDataset(path, 10, dtype="uint16")
    path.write_bytes(whole[:11])  # too short for a header: raw tokens
    with pytest.raises(ShardCorrupt, match="11 bytes are not a whole number of uint16 tokens"):
        TokenDataset(path, 10, dtype="uint16")


FILES = [np.arange(23), np.arange(100, 102), np.arange(200, 217), np.arange(300, 310)]  # the second is shorter than a window


@pytest.mark.parametrize("stride", [5, 3, 1])
@pytest.mark.parametrize("given", ["pattern", "paths", "arrays", "headers"])
def test_windows_of_several_files_follow_each_other(given: str, stride: int, tmp_path: Path) -> None:
    tokens: Any = [file.astype(np.uint16) for file in FILES]
    for i, file in enumerate(tokens):
        path = tmp_path / f"train_{i:06}.bin"
        file.tofile(path) if given != "headers" else write_llmc(path, file, 1)
    dtype = None if given in ("headers", "arrays") else "uint16"
    if given != "arrays":
        tokens = str(tmp_path / "train_*.bin") if given != "paths" else sorted(tmp_path.iterdir())
    dataset = TokenDataset(tokens, 5, stride=stride, dtype=dtype)
    expected = [file[i : i + 5].tolist() for file in FILES for i in range(0, len(file) - 4, stride)]
    assert [dataset[i]["tokens"].tolist() for i in range(len(dataset))] == expected
    again = pickle.loads(pickle.dumps(dataset))
    with ShmLoader(again, batch_size=7, shuffle=True, seed=1, num_workers=0) as loader:
        assert sorted(row for batch in loader for row in batch["tokens"].tolist()) == sorted(expected)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"cross_documents": True}, {"pack": True}, {"pack": True, "seed": 3}])
@pytest.mark.parametrize("by", ["separator", "index", "megatron"])
def test_documents_of_several_files_end_with_their_file(by: str, options: dict[str, Any], tmp_path: Path) -> None:
    files = [np.array([1, 2, 0, 3, 4, 5, 6, 7, 0, 8], np.uint16), np.array([11, 12, 13, 14, 15, 16, 17, 0, 18, 19], np.uint16)]
    offsets = [[0, 3, 9, 10], [0, 8, 10]]
    given: dict[str, Any] = {"separator": 0}
    tokens: Any = files
    if by == "index":
        given = {"document_index": [np.array(one) for one in offsets]}
    if by == "megatron":
        for i, (file, starts) in enumerate(zip(files, offsets, strict=True)):
            file.tofile(tmp_path / f"{i}.bin")
            (tmp_path / f"{i}.idx").write_bytes(megatron(np.diff(starts).tolist(), list(range(len(starts)))))
        tokens, given = str(tmp_path / "*.bin"), {"document_index": str(tmp_path / "*.idx")}
    dataset = TokenDataset(tokens, 5, pad=-1, **given, **options)
    found = [{name: row.tolist() for name, row in dataset[i].items()} for i in range(len(dataset))]
    if "pack" not in options:
        of_each = [TokenDataset(file, 5, pad=-1, separator=0, **options) for file in files]
        assert found == [{name: row.tolist() for name, row in one[i].items()} for one in of_each for i in range(len(one))]
        return
    pieces = [
        [t for t, s in zip(row["tokens"], row["segment_ids"], strict=True) if s == segment]
        for row in found
        for segment in range(1, max(row["segment_ids"]) + 1)
    ]
    expected = [[1, 2, 0], [3, 4, 5, 6, 7], [0], [8], [11, 12, 13, 14, 15], [16, 17, 0], [18, 19]]
    assert sorted(pieces) == sorted(expected)


def test_index_of_a_part_of_each_file_skips_the_rest() -> None:
    files = [np.arange(10), np.arange(100, 110)]
    dataset = TokenDataset(files, 4, document_index=[[0, 4], [3, 5, 9]], pad=-1)
    assert [dataset[i]["tokens"].tolist() for i in range(len(dataset))] == [[0, 1, 2, 3], [103, 104, -1, -1], [105, 106, 107, 108]]


def test_inconsistent_files_are_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(10, dtype=np.int32))
    with pytest.raises(TypeError, match=r"b\.npy: tokens are int32, and those of the first file uint16; files need one dtype"):
        TokenDataset(str(tmp_path / "*.npy"), 2)
    with pytest.raises(FileNotFoundError, match=r"no Token file has the name .* or matches it as a pattern"):
        TokenDataset(str(tmp_path / "*.bin"), 2)
    with pytest.raises(ValueError, match=r'is a folder .*: give a pattern such as "train_\*\.bin", or a list of paths'):
        TokenDataset(tmp_path, 2, dtype="uint16")
    with pytest.raises(ValueError, match="tokens is an empty list"):
        TokenDataset([], 2)
    for index, found in (("x.npy", "a single index"), ([np.array([0, 1])], "1 indexes")):
        with pytest.raises(ValueError, match=f"one index for each of the 2 token files, as a list; got {found}"):
            TokenDataset([np.arange(3)] * 2, 2, document_index=index)
