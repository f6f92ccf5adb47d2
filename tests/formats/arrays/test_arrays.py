"""ArrayDataset: rows as numpy takes them, structure as given, memory shared once; torch's TensorDataset as torch reads it."""

from __future__ import annotations

import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import ArrayDataset

DTYPES = ["u1", "<i2", ">i4", "<f8", ">f2", ">c8", "?"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_view_gathers_as_numpy_indexes_it(data: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5))
    array = np.random.default_rng(0).integers(0, 99, shape).astype(data.draw(st.sampled_from(DTYPES)))
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    array = array[tuple(data.draw(st.slices(n)) for n in array.shape)]
    n = len(array)
    indices = data.draw(st.lists(st.integers(-n, n - 1), max_size=40)) if n else []
    dataset = ArrayDataset(array)
    out = np.full((len(indices), *array.shape[1:]), 77, array.dtype.newbyteorder("="))
    dataset.read_batch_into(indices, {"data": out})
    np.testing.assert_array_equal(array[np.array(indices, int)], out)


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "named", "single"])
def test_a_batch_has_the_structure_of_the_input(kind: str) -> None:
    x, y = np.arange(12).reshape(6, 2), torch.arange(6).bfloat16()
    given = {"dict": {"x": x, "y": y}, "tuple": (x, y), "list": [x, y], "named": Pair(x, y), "single": x}[kind]
    dataset = ArrayDataset(given)
    (batch,) = ShmLoader(dataset, batch_size=6)
    parts = list(batch.values()) if kind == "dict" else [batch] if kind == "single" else list(batch)
    assert type(batch) is (torch.Tensor if kind == "single" else type(given))
    assert torch.equal(torch.from_numpy(x), parts[0])
    assert kind == "single" or torch.equal(y, parts[1])
    sample = dataset[-1]
    first = {"dict": lambda: sample["x"], "single": lambda: sample}.get(kind, lambda: sample[0])()
    assert first.tolist() == [10, 11]


def test_files_and_parts_of_maps_travel_by_their_path(tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(60, dtype=np.int32).reshape(10, 6))
    np.save(tmp_path / "x.npy", x)
    part = np.load(tmp_path / "x.npy", mmap_mode="r")[2:8, 1::2]
    for given, expected in ((tmp_path / "x.npy", x), (part, x[2:8, 1::2])):
        dataset = pickle.loads(pickle.dumps(ArrayDataset({"x": given})))
        assert dataset._held._memory is None
        np.testing.assert_array_equal(expected, [s["x"] for s in (dataset[i] for i in range(len(dataset)))])


def test_memory_is_put_into_one_segment_however_often_it_is_pickled() -> None:
    dataset = ArrayDataset((np.arange(10), torch.arange(10).bfloat16()))
    first, second = pickle.dumps(dataset), pickle.dumps(dataset)
    assert first == second
    assert len(first) < 1000
    other = pickle.loads(first)
    assert (9, torch.tensor(9.0, dtype=torch.bfloat16)) == other[9]
    assert dataset._held._memory is not None
    assert dataset._held._memory.reference == other._held._memory.reference


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_deliver_every_row(method: str) -> None:
    dataset = ArrayDataset({"x": np.arange(200).reshape(100, 2)})
    with ShmLoader(dataset, batch_size=7, num_workers=2, multiprocessing_context=method) as loader:
        assert list(range(0, 200, 2)) == [v for b in loader for v in b["x"][:, 0].tolist()]


def test_an_index_beyond_the_rows_writes_nothing() -> None:
    dataset = ArrayDataset(np.arange(4))
    out = np.full(2, 9)
    with pytest.raises(IndexError, match="index 4 is out of range for 4 samples"):
        dataset.read_batch_into([0, 4], {"data": out})
    assert out.tolist() == [9, 9]
    with pytest.raises(IndexError, match="index -5 is out of range for 4 samples"):
        dataset[-5]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, ValueError, "one row for each sample; got {'a': 3, 'b': 4}"),
        ({}, ValueError, "got no array"),
        (np.zeros(()), ValueError, "array 'data' has no axis"),
        (np.array(["a"]), TypeError, "dtype <U1, which no tensor has"),
        (np.zeros(2, "O"), TypeError, "dtype object, which no tensor has"),
        ([3], TypeError, "array '0' is a int; needs a numpy array"),
        (torch.zeros(2, requires_grad=True), TypeError, "requires_grad=True; rows are read from dense tensors"),
    ],
)
def test_what_cannot_be_rows_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ArrayDataset(given)


def test_a_batch_of_the_wrong_size_or_strides_is_refused() -> None:
    dataset = ArrayDataset(np.arange(4))
    with pytest.raises(ValueError, match="1 rows of 8 bytes do not fill 16"):
        dataset.read_batch_into([0], {"data": np.zeros(2)})
    with pytest.raises(ValueError, match="field 'data': rows are written into C-contiguous memory"):
        dataset.read_batch_into([0, 1], {"data": np.zeros(4)[::2]})


def test_any_damage_to_a_head_is_an_error_or_another_array(tmp_path: Path) -> None:
    """A .npy file has no checksum: what is still a sound file may be another array, and all else is ShardCorrupt."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(20).reshape(5, 4))
    whole, draw = path.read_bytes(), np.random.default_rng(1)
    num_refused = 0
    for i in range(300):
        damaged = bytearray(whole[: draw.integers(len(whole))] if i % 3 == 0 else whole)
        for at in draw.integers(0, 128, 2):
            if at < len(damaged):
                damaged[at] = draw.integers(256)
        path.write_bytes(damaged)
        try:
            dataset = ArrayDataset(path)
        except (ShardCorrupt, TypeError, ValueError) as error:
            num_refused += 1
            assert not isinstance(error, ShardCorrupt) or str(path) in str(error)
        else:
            [dataset[index] for index in range(min(len(dataset), 50))]
    assert num_refused > 100
    path.write_bytes(whole[:-1])
    with pytest.raises(ShardCorrupt, match=r"x.npy, offset 128: shape \(5, 4\) of int64 needs 160 bytes, 159 are left"):
        ArrayDataset(path)


def equal(mine: Any, torchs: Any) -> bool:
    return type(mine) is type(torchs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, torchs, strict=True)
    )


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tensor_dataset_is_gathered_and_equals_torchs(num_workers: int) -> None:
    tensors = torch.randn(50, 3), torch.arange(50), torch.randn(50, 4).bfloat16(), torch.randn(50, 4, 6)[:, ::2, 1:5]
    dataset = TensorDataset(*tensors)
    for data in (dataset, torch.utils.data.Subset(dataset, [3, -1, 7]), ConcatDataset([dataset, dataset])):
        loader = ShmLoader(data, batch_size=8, shuffle=True, num_workers=num_workers)
        torch.manual_seed(1)
        mine = [[t.clone() for t in batch] for batch in loader]
        torch.manual_seed(1)
        assert all(equal(a, b) for a, b in zip(mine, DataLoader(data, batch_size=8, shuffle=True), strict=True))
        assert loader.in_place is not None


def test_a_tensor_dataset_given_other_tensors_reads_those() -> None:
    dataset = TensorDataset(torch.zeros(4))
    loader = ShmLoader(dataset, batch_size=4)
    ((first,),) = loader
    assert first.tolist() == [0, 0, 0, 0]
    dataset.tensors = (torch.ones(4),)
    ((second,),) = loader
    assert second.tolist() == [1, 1, 1, 1]


def test_tensors_that_are_not_plain_memory_are_left_to_torch() -> None:
    class Odd(torch.Tensor): ...

    for tensor in (torch.zeros(4, requires_grad=True), torch.zeros(4).as_subclass(Odd), torch.eye(4).to_sparse()):
        assert ShmLoader(TensorDataset(tensor)).in_place is None
