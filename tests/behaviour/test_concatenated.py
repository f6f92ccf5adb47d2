"""Concatenated datasets whose batches are read in place, one part per member, give the same samples as torch's loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from shmload import Mix, ShmLoader
from shmload.batch.row_placer import private_rows
from shmload.formats import ArrayDataset
from shmload.worker import in_place_dataset
from shmload.worker.decoding_protocol import in_place_reader_of
from shmload.worker.in_place_dataset import InPlaceConcat
from shmload.worker.tensor_rows import ConcatenatedTensors


def member(first: int, size: int) -> TensorDataset:
    rows = torch.arange(first, first + size)
    return TensorDataset(rows, rows[:, None] * torch.ones(3, dtype=torch.bfloat16))


def tensors_of(sizes: list[int]) -> list[Any]:
    starts = np.cumsum([0, *sizes]).tolist()
    return [member(first, size) for first, size in zip(starts, sizes, strict=False)]


def members_of(sizes: list[int]) -> list[Any]:
    first, *others = tensors_of(sizes)
    return [Subset(first, range(sizes[0])), *others]


@given(st.data(), st.booleans())
def test_any_keys_give_torchs_samples(data: Any, are_tensors: bool) -> None:
    sizes = data.draw(st.lists(st.integers(0 if are_tensors else 1, 5), min_size=1, max_size=4).filter(any))
    dataset: Any = ConcatDataset((tensors_of if are_tensors else members_of)(sizes))
    keys = st.lists(st.integers(-len(dataset), len(dataset) - 1), min_size=1, max_size=7)
    batches = data.draw(st.lists(keys, min_size=1, max_size=4))
    assert in_place_reader_of(dataset).read_batch_into is not None  # type: ignore[union-attr]  # this is tested
    loader: Any = ShmLoader(dataset, batch_sampler=batches)
    for own, theirs in zip(loader, DataLoader(dataset, batch_sampler=batches), strict=True):
        assert [column.dtype for column in own] == [column.dtype for column in theirs]
        assert all(torch.equal(*columns) for columns in zip(own, theirs, strict=True))


@pytest.mark.parametrize("members", [members_of, tensors_of])
@pytest.mark.parametrize("key", [7, -8])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_key_out_of_range_is_an_error(key: int, num_workers: int, members: Any) -> None:
    dataset: Any = ConcatDataset(members([3, 4]))
    with ShmLoader(dataset, batch_sampler=[[1, key]], num_workers=num_workers) as loader, pytest.raises((IndexError, ValueError)):
        list(loader)


def test_members_that_may_draw_random_numbers_are_read_row_by_row() -> None:
    class Drawing(ArrayDataset):
        def read_batch_into(self, indices: Any, out: Any) -> None:
            super().read_batch_into(indices, out)
            out["x"][...] += np.random.random()

    def rows() -> Any:
        return {"x": np.zeros(6)}

    plain: Any = ConcatDataset([ArrayDataset(rows()), ArrayDataset(rows())])  # type: ignore[list-item]  # torch accepts it
    drawing: Any = ConcatDataset([ArrayDataset(rows()), Drawing(rows())])  # type: ignore[list-item]  # torch accepts it
    ways = [in_place_reader_of(dataset) for dataset in (plain, drawing)]
    assert [way is not None and way.read_batch_into is not None for way in ways] == [True, False]
    whole = [torch.cat([batch["x"] for batch in ShmLoader(drawing, size, seed=1)]) for size in (1, 5, 12)]
    assert all(torch.equal(each, whole[0]) for each in whole)


def test_member_of_a_mix_restarts_within_a_batch() -> None:
    mixed: Any = Mix([(ArrayDataset({"x": np.arange(3)}), 1.0), (ArrayDataset({"x": np.arange(10, 30)}), 1.0)], stop="all")
    way = in_place_reader_of(mixed)
    assert way is not None
    assert way.read_batch_into is not None
    found = [torch.cat([batch["x"] for batch in ShmLoader(mixed, size, seed=1)]).tolist() for size in (1, 16)]
    assert found[0] == found[1]
    assert found[0].count(1) > 1


class IndexArithmetic:
    """A dataset that computes with its indices as an array, and sets a field of all rows to one value."""

    def __init__(self, extent: int | None) -> None:
        self.schema = {"x": ("int64", (extent,)), "twice": "int64", "one": "float32", "text": str}
        if extent is not None:
            del self.schema["text"]

    def __len__(self) -> int:
        return 4

    def read_batch_into(self, indices: Any, out: Any) -> None:
        row, is_ragged = np.array([1, 2, 3]), "text" in self.schema
        out["x"] = [row] * len(indices) if is_ragged else row
        out["twice"] = indices * 2
        out["one"] = np.float32(7)
        if is_ragged:
            out["text"] = [f"{index}" for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("extent", [3, None])
def test_batch_is_the_same_through_any_wrapper(extent: int | None, num_workers: int) -> None:
    def twice(dataset: Any) -> list[int]:
        with ShmLoader(dataset, 8, num_workers=num_workers) as loader:
            (batch,) = loader
        assert all(row.tolist() == [1, 2, 3] for row in batch["x"])
        assert batch["one"].tolist() == [7] * len(batch["x"])
        assert extent is not None or [2 * int(text) for text in batch["text"]] == batch["twice"].tolist()
        found: list[int] = batch["twice"].tolist()
        return found

    base: Any = IndexArithmetic(extent)
    joined: Any = ConcatDataset([base, base])
    assert twice(base) == [0, 2, 4, 6]
    for chosen in ([3, 1], np.array([3, 1]), torch.tensor([3, 1])):
        assert twice(Subset(base, chosen)) == [6, 2]  # type: ignore[arg-type]  # torch accepts it
    assert twice(joined) == [0, 2, 4, 6] * 2
    assert twice(Subset(joined, [7, 0])) == [6, 0]


class ZeroFilled(dict):
    zero_fill = True


class PartRows:
    """A dataset that writes the first two numbers of a row, or all four."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.num_written = 2 if isinstance(schema, ZeroFilled) else 4

    def __len__(self) -> int:
        return 2

    def read_into(self, index: int, out: Any) -> None:
        out["x"][: self.num_written] = index + 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_a_member_with_zero_fill_are_zeroed_first(num_workers: int) -> None:
    field = {"x": ("int64", (4,))}
    dataset: Any = ConcatDataset([PartRows(field), PartRows(ZeroFilled(field))])  # type: ignore[list-item]  # torch accepts it
    with ShmLoader(dataset, 4, num_workers=num_workers, seed=1) as loader:
        for _ in range(5):
            for batch in loader:
                assert batch["x"].tolist() == [[1] * 4, [2] * 4, [1, 1, 0, 0], [2, 2, 0, 0]]
                batch["x"].fill_(-1)


def test_members_with_batches_of_different_types_keep_them() -> None:
    as_tuple: Any = PartRows({"x": ("int64", (4,))})
    as_tuple.batch_type = tuple
    assert in_place_reader_of(ConcatDataset([PartRows(as_tuple.schema), as_tuple])) is None  # type: ignore[list-item]  # no torch Dataset


def test_batch_over_many_members_takes_one_read_per_member_and_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = ConcatDataset(members_of([5] * 40))
    way = in_place_reader_of(dataset)
    assert isinstance(way, InPlaceConcat)
    reads, copies = [], []
    for number, each in enumerate(way._members):
        read: Any = each.read_batch_into
        each.read_batch_into = lambda keys, out, read=read, number=number: (reads.append(number), read(keys, out))
    monkeypatch.setattr(in_place_dataset, "private_rows", lambda layout, nrows: copies.append(nrows) or private_rows(layout, nrows))
    keys = np.random.default_rng(0).permutation(200)
    rows = private_rows(way.layout(), 200)
    read_batch_into: Any = way.read_batch_into
    read_batch_into(keys, rows)
    assert rows["0"].tolist() == keys.tolist()
    assert (sorted(reads), copies) == (list(range(40)), [200])


def test_batch_over_many_tensor_datasets_is_gathered_at_once() -> None:
    way = in_place_reader_of(ConcatDataset(tensors_of([5] * 40)))
    assert isinstance(way, ConcatenatedTensors)
    for each in way._members:
        each.read_batch_into = None  # no member reads its rows by itself
    keys = np.random.default_rng(0).permutation(200)
    rows = private_rows(way.layout(), 200)
    way._read_pooled(keys, rows)
    assert rows["0"].tolist() == keys.tolist()
    assert rows["1"].tolist() == torch.tensor(keys)[:, None].expand(200, 3).bfloat16().float().tolist()


def test_tensors_of_a_member_that_are_replaced_are_read() -> None:
    dataset: Any = ConcatDataset(tensors_of([3, 4, 5]))
    found = []
    for numbers, _ in ShmLoader(dataset, batch_size=4):
        found.append(numbers.tolist())
        dataset.datasets[1].tensors = member(100, 4).tensors
    assert found == [[0, 1, 2, 3], [101, 102, 103, 7], [8, 9, 10, 11]]


def test_tensors_whose_rows_are_not_contiguous_are_read_by_member() -> None:
    tensors = [torch.arange(24).reshape(4, 3, 2).transpose(1, 2), torch.arange(24).reshape(4, 2, 3)]
    dataset: Any = ConcatDataset([TensorDataset(tensor) for tensor in tensors])
    assert type(in_place_reader_of(dataset)) is InPlaceConcat
    expected = torch.cat(tensors)
    (found,) = next(iter(ShmLoader(dataset, batch_size=8)))
    assert torch.equal(found, expected)


def test_a_member_that_has_changed_its_length_is_read_as_in_torch() -> None:
    dataset: Any = ConcatDataset(tensors_of([3, 4]))
    dataset.datasets[0].tensors = member(0, 5).tensors
    assert type(in_place_reader_of(dataset)) is InPlaceConcat
    (numbers, _) = next(iter(ShmLoader(dataset, batch_size=7)))
    assert numbers.tolist() == next(iter(DataLoader(dataset, batch_size=7)))[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
