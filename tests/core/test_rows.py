"""Columns of a batch: a sample's bytes arrive whole in its row, whichever way they are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shmload._core.rows import ArrayColumn, TensorColumn, copy_from


@pytest.mark.parametrize("num_bytes", [100, 20_000, (1 << 18) - 1, 1 << 18, (1 << 18) + 77])
@pytest.mark.parametrize("kind", ["array", "tensor", "address"])
def test_a_row_of_any_size_arrives_whole_and_its_neighbours_stay(kind: str, num_bytes: int) -> None:
    around = np.full(3 * num_bytes + 1, 7, np.uint8)
    rows = around[1:].reshape(3, num_bytes)  # at no multiple of a cache's line
    value = np.random.default_rng(4).integers(0, 256, num_bytes, np.uint8)
    column: Any
    if kind == "array":
        column = ArrayColumn(rows.ctypes.data, num_bytes, rows, rows, False)
        assert column.put(1, value)
    elif kind == "tensor":
        column = TensorColumn(rows.ctypes.data, num_bytes, rows, torch.from_numpy(rows), lambda _: True)
        assert column.put(1, torch.from_numpy(value))
    else:
        copy_from(rows[1].ctypes.data, value.ctypes.data, num_bytes)
    np.testing.assert_array_equal(value, rows[1])
    assert {7} == set(around[: num_bytes + 1].tolist()) | set(rows[2].tolist())
