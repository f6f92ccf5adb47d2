"""torch's TensorDataset is gathered as a whole, without any visible difference in batches or errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from shmload import ShmLoader

N = 20
TENSORS = (
    torch.randn(N, 3),
    torch.arange(N),
    torch.randn(N, 4).bfloat16(),
    torch.randn(N, 4, 6)[:, ::2, 1:5],
    torch.randn(N, 2, dtype=torch.complex64),
    torch.arange(N).to(torch.float8_e4m3fn),
    torch.arange(N) % 2 == 0,
    torch.arange(4.0).expand(N, 4),
    torch.empty(N, 0),
)
WORKERS = [0, pytest.param(2, marks=pytest.mark.slow(reason="starts two workers for each loader"))]


class GivenBatches:
    """A batch sampler with given batches."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def outcome(make: type, dataset: Any, **options: Any) -> Any:
    """Returns the batches, or the type and last line of the error."""
    torch.manual_seed(1)
    loader = make(dataset, **options)
    try:
        found = [_copied(batch) for batch in loader]
    except Exception as error:
        found = [type(error), _said(error)]
    gc.collect()
    return found


def _copied(batch: Any) -> Any:
    return [t.clone() for t in batch] if type(batch) in (list, tuple) else batch


def _said(error: Exception) -> str:
    return next(line for line in reversed(str(error).splitlines()) if line and not line.startswith("shmload:")).removeprefix(
        f"{type(error).__name__}: "
    )


def assert_equal_outcomes(found: Any, expected: Any) -> None:
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
        assert expected.contiguous().view(-1).view(torch.uint8).tolist() == found.reshape(-1).view(torch.uint8).tolist()
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for a, b in zip(found, expected, strict=True):
            assert_equal_outcomes(a, b)
    else:
        assert expected == found


def assert_equal(dataset: Any, num_workers: int = 0, **options: Any) -> ShmLoader:
    """Compares with torch without workers, because torch's workers take 5 s to end after an error."""
    found = outcome(ShmLoader, dataset, num_workers=num_workers, **options)
    assert_equal_outcomes(found, outcome(DataLoader, dataset, **options))
    return ShmLoader(dataset, num_workers=num_workers, **options)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_batches_equal_torchs(num_workers: int) -> None:
    dataset = TensorDataset(*TENSORS)
    subset = Subset(dataset, [3, -1, 7])
    for data in (dataset, subset, Subset(subset, (2, 0)), ConcatDataset([dataset, subset])):
        loader = assert_equal(data, batch_size=8, shuffle=True, num_workers=num_workers)
        assert loader._config().plan.layout is not None


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "keys",
    [
        [np.int64(3), np.int32(-1), 5],
        [torch.tensor(3), torch.tensor(-2)],
        [True, True],
        [[1, 2], [3, 4]],
        [slice(2), slice(4, 6)],
        [torch.tensor([1, 2]), torch.tensor([0, 3])],
        [None],
        [...],
        torch.tensor([4, 2]),
        (4, 2),
        [1.0],
        [np.float64(2)],
        ["a"],
        [N],
        [0, -N - 1],
        [1 << 63],
        [-(1 << 70)],
        [np.uint64(3)],
    ],
    ids=str,
)
def test_every_key_of_a_sampler_is_read_as_in_torch(keys: Any, num_workers: int) -> None:
    dataset = TensorDataset(*TENSORS)
    wrapped = [Subset(dataset, range(N)), ConcatDataset([dataset, dataset])] if num_workers == 0 else []
    for data in (dataset, *wrapped):
        assert_equal(data, batch_sampler=GivenBatches([1, 0], keys), num_workers=num_workers)


@pytest.mark.parametrize("inside", [[0, 1.5, 2], ["a", "b"], [[1, 2], [3, 4]], [3, N], torch.tensor([1, 2])], ids=str)
def test_subset_of_any_keys_is_read_as_in_torch(inside: Any) -> None:
    subset = Subset(TensorDataset(*TENSORS), inside)
    for data in (subset, ConcatDataset([subset, subset])):
        assert_equal(data, batch_size=2)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_nothing_is_gathered_without_batches_or_with_a_collate_fn(num_workers: int) -> None:
    dataset = TensorDataset(*TENSORS)
    assert assert_equal(dataset, batch_size=None, num_workers=num_workers)._config().plan.layout is None
    assert assert_equal(dataset, batch_size=None, sampler=[[1, 2], [3]], num_workers=num_workers)._config().plan.layout is None
    assert assert_equal(dataset, batch_size=4, collate_fn=len, num_workers=num_workers)._config().plan.layout is None


class Scaled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(t * 2 for t in super().__getitem__(index))


class Plain(TensorDataset): ...


class Odd(torch.Tensor): ...


@pytest.mark.parametrize(
    "dataset",
    [
        Scaled(torch.randn(4, 2)),
        Plain(torch.randn(4, 2)),
        TensorDataset(torch.zeros(4, requires_grad=True)),
        TensorDataset(torch.randn(4, 2, dtype=torch.complex64).conj()),
        TensorDataset(torch.eye(4).to_sparse()),
        TensorDataset(torch.zeros(4).as_subclass(Odd)),
        TensorDataset(torch.nn.Parameter(torch.zeros(4), requires_grad=False)),
        TensorDataset(torch.arange(4).to("meta")),
    ],
    ids=["subclass", "plain subclass", "gradient", "conjugate", "sparse", "tensor subclass", "parameter", "meta"],
)
def test_unusual_datasets_and_tensors_are_left_to_torch(dataset: Any) -> None:
    assert ShmLoader(dataset)._config().plan.layout is None
    if dataset.tensors[0].layout == torch.strided and dataset.tensors[0].device.type == "cpu":
        found, expected = (outcome(make, dataset, batch_size=2) for make in (ShmLoader, DataLoader))
        assert [[t.tolist() for t in batch] for batch in expected] == [[t.tolist() for t in batch] for batch in found]


def test_changed_tensors_of_a_dataset_are_read_at_once() -> None:
    dataset = TensorDataset(torch.zeros(6))
    batches = iter(ShmLoader(dataset, batch_size=2))
    ((first,), expected) = next(batches), [0.0, 0.0]
    assert expected == first.tolist()
    dataset.tensors = (torch.ones(6),)
    assert next(batches)[0].tolist() == [1.0, 1.0]
    dataset.tensors[0].data = torch.full((6,), 2.0)
    assert next(batches)[0].tolist() == [2.0, 2.0]
    batches = iter(ShmLoader(dataset, batch_size=2))
    dataset.tensors = (torch.eye(6).to_sparse(),)
    with pytest.raises(RuntimeError, match="Batches of sparse tensors are not currently supported"):
        next(batches)


@pytest.mark.slow(reason="starts a worker")
def test_only_the_bad_index_of_a_gathered_batch_is_skipped() -> None:
    dataset = TensorDataset(torch.arange(4))
    with ShmLoader(dataset, batch_sampler=GivenBatches([0, 9, 2], ["a", 3]), num_workers=1, on_error="skip") as loader:
        assert [batch.tolist() for (batch,) in loader] == [[0, 2], [3]]
