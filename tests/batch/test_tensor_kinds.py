"""Tensors that are more than a block of bytes are delivered as by torch, in both modes, however many batches are kept."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shmload import ShmLoader
from shmload.batch import collate
from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.collate import SMALL_NBYTES
from shmload.batch.layout import is_plain_tensor
from shmload.batch.packed_batch import pack
from shmload.batch.unpacking import unpack

NUM_BATCHES = 24
MODES = pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])


def matrix(i: int) -> torch.Tensor:
    return torch.eye(4).mul(i + 1)


def complexes(i: int) -> torch.Tensor:
    return torch.full((4,), 1j * i, dtype=torch.complex64)


class Tagged(torch.Tensor):
    """A tensor subclass of a user."""


class Guarded(torch.Tensor):
    """A tensor subclass whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def tagged(i: int) -> torch.Tensor:
    return torch.full((3,), float(i)).as_subclass(Tagged)


class Boxed:
    """An object with a sparse tensor that can only be pickled."""

    def __init__(self, i: int) -> None:
        self.inside = matrix(i).to_sparse()


PASSED: dict[str, Callable[[int], torch.Tensor]] = {
    "coo": lambda i: matrix(i).to_sparse(),
    "not coalesced": lambda i: torch.sparse_coo_tensor([[0, 0]], [1.0 * i, 2.0], (3,)),
    "hybrid": lambda i: torch.ones(3, 4, 2).mul(i + 1).to_sparse(2),
    "empty coo": lambda i: torch.zeros(3, i).to_sparse(),
    "csr": lambda i: matrix(i).to_sparse_csr(),
    "csc": lambda i: matrix(i).to_sparse_csc(),
    "bsr": lambda i: matrix(i).to_sparse_bsr((2, 2)),
    "bsc": lambda i: matrix(i).to_sparse_bsc((2, 2)),
    "quantized": lambda i: torch.quantize_per_tensor(torch.arange(4.0) * i, 0.5, 1, torch.quint8),
    "quantized by channel": lambda i: torch.quantize_per_channel(
        matrix(i), torch.full((4,), 0.5 + i), torch.arange(4), 0, torch.qint8
    ),
    "nested": lambda i: torch.nested.nested_tensor([torch.full((2,), i), torch.full((3,), i)], layout=torch.jagged),
    "complex": complexes,
    "conjugated": lambda i: complexes(i).conj(),
    "negated": lambda i: complexes(i).conj().imag,
    "no elements": lambda i: torch.empty(0, 3),
    "transposed": lambda i: torch.arange(12).view(3, 4).mul(i).t(),
    "expanded": lambda i: torch.tensor([i]).expand(3, 4),
    "meta": lambda i: torch.empty(4, i, device="meta"),
    "subclass without torch functions": lambda i: matrix(i).as_subclass(Guarded),
    "gradient": lambda i: matrix(i).requires_grad_(),
    "parameter": lambda i: torch.nn.Parameter(matrix(i)),
    "buffer": lambda i: torch.nn.Buffer(matrix(i)),
    "subclass": tagged,
    "subclass with gradient": lambda i: tagged(i).requires_grad_(),
}


def assert_same(found: Any, expected: torch.Tensor) -> None:
    assert type(found) is type(expected)
    assert (found.layout, found.dtype, found.device) == (expected.layout, expected.dtype, expected.device)
    assert found.requires_grad == expected.requires_grad
    if expected.is_nested:
        assert all(torch.equal(*pair) for pair in zip(found.unbind(), expected.unbind(), strict=True))
        return
    assert found.shape == expected.shape
    if expected.layout is torch.sparse_coo:
        assert found.is_coalesced() == expected.is_coalesced()
    if expected.is_quantized and expected.qscheme() is torch.per_channel_affine:
        assert found.q_per_channel_axis() == expected.q_per_channel_axis()
        assert torch.equal(found.q_per_channel_scales(), expected.q_per_channel_scales())
        assert torch.equal(found.q_per_channel_zero_points(), expected.q_per_channel_zero_points())
    elif expected.is_quantized:
        assert (found.q_scale(), found.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
    if not expected.is_meta:
        assert torch.equal(found.detach().to_dense(), expected.detach().to_dense())


class FromFunction:
    """A dataset whose samples are computed by a function of the index."""

    def __init__(self, make: Callable[[int], Any], n: int = NUM_BATCHES) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def only(samples: list[Any]) -> Any:
    return {"x": samples[0], "list": [samples[0]]}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*batches are still in use", "ignore:.*CSR tensor support")
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*TypedStorage")
@MODES
@pytest.mark.parametrize("kind", PASSED)
def test_tensors_of_a_collate_fn_are_unchanged_also_if_kept(kind: str, seed: int | None) -> None:
    make = PASSED[kind]
    with ShmLoader(FromFunction(make), 1, num_workers=1, collate_fn=only, seed=seed, shuffle=False) as loader:
        for number, batch in enumerate(loader):
            assert_same(batch["x"], make(number))
            assert_same(batch["list"][0], make(number))
            del batch
        assert loader.stats()["num_copied_out"] == 0, "every slot was released"
        kept = list(loader)
        for number, batch in enumerate(kept):
            assert_same(batch["x"], make(number))
        del kept, batch
        gc.collect()
        assert loader.stats()["slots"].get("leased", 0) == 0


EXPANDED = {
    "heads": lambda t: t[:, None].expand(3, 5, 4),
    "rows": lambda t: t[0].expand(6, 4),
    "columns": lambda t: t[:, :1].expand(3, 7),
    "transposed": lambda t: t.t()[None].expand(2, 4, 3),
    "every axis": lambda t: t[0, 0].expand(2, 3),
    "with gaps": lambda t: t[:, ::2][None].expand(2, 3, 2),
    "a number": lambda t: t[0, 0].expand(1, 1),
    "nothing": lambda t: t[None].expand(0, 3, 4),
}


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("num_rows", [1, 3, 2000])
def test_expanded_tensors_are_sent_without_their_repetitions(name: str, num_rows: int) -> None:
    base = torch.arange(num_rows * 12.0).view(num_rows, 3, 4)
    tensor = base[-1] if num_rows < 10 else base.view(3, 4, num_rows)[..., 0]
    expanded = EXPANDED[name](tensor)
    packed = pack({"x": expanded})
    found = unpack(PrivateBatch(packed))["x"]
    assert torch.equal(found, expanded)
    if expanded.numel() and expanded.shape != (1, 1):
        assert [stride == 0 for stride in found.stride()] == [stride == 0 for stride in expanded.stride()]
        assert packed.nbytes < 700
        assert found.untyped_storage().nbytes() == len({*expanded.reshape(-1).tolist()}) * 4


STACKED = ["quantized", "conjugated", "negated", "gradient", "parameter", "buffer", "subclass", "subclass with gradient"]


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*TypedStorage")
@MODES
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", STACKED)
def test_tensors_of_every_kind_are_stacked_as_by_torch(kind: str, num_workers: int, seed: int | None) -> None:
    dataset = FromFunction(PASSED[kind], 8)
    expected = list(DataLoader(dataset, 2))
    with ShmLoader(dataset, 2, num_workers=num_workers, seed=seed, shuffle=False) as loader:
        found = list(loader)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


class RandomSamples(Dataset[Any]):
    """Random samples without fixed rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), f"sample {index}"


@pytest.mark.parametrize("numel", [SMALL_NBYTES // 4, SMALL_NBYTES // 4 + 1])
def test_small_tensors_are_checked_together(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(value: Any) -> bool:
        checked.append(value)
        return is_plain_tensor(value)

    monkeypatch.setattr(collate, "is_plain_tensor", check)
    samples = [torch.full((numel,), float(i)) for i in range(100)]
    with ShmLoader(samples, batch_size=50, seed=1, shuffle=False) as loader:
        first, second = loader
    assert torch.equal(torch.cat([first, second]), torch.stack(samples))
    assert (len(checked) < 10) == (numel * 4 <= SMALL_NBYTES)


@pytest.mark.parametrize(
    "odd", [torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float64), 1j * torch.ones(4)]
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_small_tensor_that_differs_is_collated_as_by_torch_or_left_in_a_list(odd: torch.Tensor, place: int) -> None:
    samples = [torch.full((4,), float(i)) for i in range(4)]
    samples[place] = odd
    with ShmLoader(samples, batch_size=4, seed=1, shuffle=False) as loader:
        (found,) = loader
    if odd.shape != (4,):
        assert isinstance(found, list)
        assert [row.tolist() for row in found] == [row.tolist() for row in samples]
    else:
        expected = default_collate(samples)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_sample_that_occurs_twice_in_a_batch_is_read_twice() -> None:
    """Compares with torch: a sample with random noise that is drawn with replacement has different noise each time."""
    batches = [[0, 0, 1], [2, 2, 2], [1, 1, 0]]
    torch.manual_seed(3)
    expected = [draws for draws, _ in DataLoader(RandomSamples(), batch_sampler=batches, num_workers=1)]
    torch.manual_seed(3)
    with ShmLoader(RandomSamples(), batch_sampler=batches, num_workers=1) as loader:
        found = [draws.clone() for draws, _ in loader]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_sparse_tensor_within_an_object_is_sent_as_its_parts() -> None:
    """Guards against a list in which torch keeps every sparse tensor that it unpickles, together with its slot."""
    kept = vars(torch._utils).get("_sparse_tensors_to_validate")
    if kept is None:  # in newer releases, such as torch 2.15
        kept = torch.serialization._serialization_tls.sparse_tensors_to_validate
    kept.clear()
    with ShmLoader(FromFunction(Boxed), 1, num_workers=1, collate_fn=only, seed=1) as loader:
        for index, batch in enumerate(loader):
            assert torch.equal(batch["x"].inside.to_dense(), matrix(index))
            assert kept == []


def with_origin(tensor: Any) -> Any:
    tensor.origin = "left"  # an attribute of the user
    return tensor


class ShallowlyCopied:
    """An object whose copies share its array."""

    def __init__(self, i: int) -> None:
        self.inside = np.full(3, i)

    def __deepcopy__(self, memo: Any) -> ShallowlyCopied:
        return copy.copy(self)


def objects(*values: Any) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


CONTAINED: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {  # make a sample, and get an array or tensor from it
    "an array of arrays": (lambda i: objects(np.full(3, i), None), lambda sample: sample[0]),
    "an array of tensors": (lambda i: objects(torch.full((3,), i), None), lambda sample: sample[0]),
    "a table with a column of arrays": (lambda i: pd.DataFrame({"x": [np.full(3, i), None]}), lambda sample: sample["x"][0]),
    "a tensor as a key": (lambda i: {torch.full((3,), i): 1}, lambda sample: next(iter(sample))),
    "an object with a shallow copy": (ShallowlyCopied, lambda sample: sample.inside),
    "a subclass with attributes": (lambda i: with_origin(tagged(i)), lambda sample: sample if sample.origin == "left" else None),
    "a subclass with gradient and attributes": (
        lambda i: with_origin(tagged(i).requires_grad_()),
        lambda sample: sample.detach() if sample.origin == "left" else None,
    ),
}


@pytest.mark.filterwarnings("ignore:.*batches are still in use", "ignore:.*deprecated", "ignore:.*TypedStorage")
@MODES
@pytest.mark.parametrize("kind", CONTAINED)
def test_kept_batches_of_objects_do_not_keep_their_slots(kind: str, seed: int | None) -> None:
    """Covers objects whose copies share their arrays with them: the loader waited for a slot forever."""
    make, inside = CONTAINED[kind]
    with ShmLoader(FromFunction(make), 1, num_workers=1, collate_fn=list, seed=seed, shuffle=False, timeout=30) as loader:
        kept = list(loader)
    assert [inside(batch[0]).tolist() for batch in kept] == [[i] * 3 for i in range(NUM_BATCHES)]
