"""Columns of a batch: a sample's bytes are copied completely into its row, by every way of copying."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from shmload._core.rows import ArrayColumn, Column, DictPart, IntColumn, SequencePart, TensorColumn, copy_from
from shmload.batch.element_types import ELEMENT_TYPES, of_torch
from shmload.batch.layout import is_plain_tensor


@pytest.mark.parametrize("num_bytes", [100, 20_000, (1 << 18) - 1, 1 << 18, (1 << 18) + 77])
@pytest.mark.parametrize("kind", ["array", "tensor", "address"])
def test_row_of_any_size_is_copied_completely_without_changing_others(kind: str, num_bytes: int) -> None:
    around = np.full(3 * num_bytes + 1, 7, np.uint8)
    rows = around[1:].reshape(3, num_bytes)  # not aligned to a cache line
    value = np.random.default_rng(4).integers(0, 256, num_bytes, np.uint8)
    column: Any
    if kind == "array":
        column = ArrayColumn(rows.ctypes.data, num_bytes, rows, rows, False)
        assert column.put(value, 1)
    elif kind == "tensor":
        column = TensorColumn(rows.ctypes.data, num_bytes, rows, torch.from_numpy(rows), 1, lambda _: True)
        assert column.put(torch.from_numpy(value), 1)
    else:
        copy_from(rows[1].ctypes.data, value.ctypes.data, num_bytes)
    np.testing.assert_array_equal(value, rows[1])
    assert {7} == set(around[: num_bytes + 1].tolist()) | set(rows[2].tolist())


def negative(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and dtype whose negation is lazy."""
    return torch.complex(value, value).conj().imag


REAL = {
    "plain": (lambda: torch.arange(6.0).reshape(2, 3), True),
    "transposed": (lambda: torch.arange(6.0).reshape(3, 2).T, True),
    "every second": (lambda: torch.arange(12.0).reshape(2, 6)[:, ::2], True),
    "expanded": (lambda: torch.arange(3.0).expand(2, 3), True),
    "at an offset": (lambda: torch.arange(9.0)[3:].reshape(2, 3), True),
    "detached": (lambda: torch.ones(2, 3, requires_grad=True).detach(), True),
    "with a gradient": (lambda: torch.ones(2, 3, requires_grad=True), False),
    "a parameter": (lambda: torch.nn.Parameter(torch.ones(2, 3)), False),
    "lazily negated": (lambda: negative(torch.arange(6.0).reshape(2, 3)), False),
    "another shape": (lambda: torch.ones(3, 2), False),
    "one axis more": (lambda: torch.ones(1, 2, 3), False),
    "another type": (lambda: torch.ones(2, 3, dtype=torch.float64), False),
    "another type of the same size": (lambda: torch.ones(2, 3, dtype=torch.int32), False),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), False),
    "on the meta device": (lambda: torch.ones(2, 3, device="meta"), False),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.qint8), False),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]), False),
    "an array": (lambda: np.ones((2, 3), np.float32), False),
    "zeros without memory": (lambda: torch._efficientzerotensor((2, 3)), False),
}


@pytest.fixture(params=["exchange API", "attributes"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tensors with DLPack's C exchange API, and tensors without it as in older torch."""
    if request.param == "attributes":
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None, raising=False)


def bytes_of(value: torch.Tensor) -> list[int]:
    return torch.atleast_1d(value).contiguous().view(torch.uint8).flatten().tolist()


def column_of(rows: torch.Tensor) -> TensorColumn:
    element = of_torch(rows.dtype)
    assert element is not None
    return TensorColumn(rows.data_ptr(), rows[0].nbytes, rows, rows, element.code, is_plain_tensor)


@pytest.mark.usefixtures("exchange")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", REAL)
def test_only_plain_tensors_of_the_columns_type_are_copied(kind: str) -> None:
    make, is_taken = REAL[kind]
    rows = torch.full((3, 2, 3), 7.0)
    value = make()
    assert column_of(rows).put(value, 1) is is_taken
    assert torch.equal(rows[1], value if is_taken else torch.full((2, 3), 7.0))
    assert {7.0} == set(rows[[0, 2]].flatten().tolist())


@pytest.mark.usefixtures("exchange")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [dtype for name in ELEMENT_TYPES if (dtype := getattr(torch, name, None)) is not None], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 1, 3)], ids=str)
def test_every_type_and_shape_is_copied(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = torch.zeros(2, *shape, dtype=torch.uint8).to(dtype)
    value = torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dtype)
    assert column_of(rows).put(value, 1)
    assert bytes_of(value) == bytes_of(rows[1])


@pytest.mark.usefixtures("exchange")
def test_lazy_conjugate_is_not_copied() -> None:
    rows = torch.zeros(2, 3, dtype=torch.complex64)
    assert not column_of(rows).put(torch.ones(3, dtype=torch.complex64).conj(), 0)
    assert column_of(rows).put(torch.full((3,), 1 + 2j).conj().resolve_conj(), 0)
    assert rows[0].tolist() == [1 - 2j] * 3


def test_only_samples_with_the_structure_of_the_first_are_copied() -> None:
    numbers = np.zeros((3, 4), np.int64)
    columns = [IntColumn(numbers[row].ctypes.data, 8, numbers) for row in range(3)]
    part = DictPart(["a", 1], [columns[0], SequencePart((tuple, list), columns[1:])])
    assert part.put({"a": 1, 1: (2, 3)}, 0)
    assert part.put({1: [5, 6], "a": 4}, 3)
    assert numbers[:, [0, 3]].T.tolist() == [[1, 2, 3], [4, 5, 6]]
    for wrong in (
        *({"a": 1}, {"a": 1, 2: (2, 3)}, {"a": 1, 1: (2, 3), "b": 0}, {"a": 1, 1: (2,)}, {"a": 1, 1: (2, 3, 4)}),
        *(
            {"a": 1.0, 1: (2, 3)},
            {"a": 1, 1: (2, "x")},
            {"a": 1, 1: "ab"},
            {"a": True, 1: (2, 3)},
            OrderedDict(a=1),
            [1, (2, 3)],
            None,
        ),
    ):
        assert not part.put(wrong, 1)
    assert numbers[:, 2].tolist() == [0, 0, 0]
    assert not Column(numbers.ctypes.data, 8, numbers).put(1, 0)
