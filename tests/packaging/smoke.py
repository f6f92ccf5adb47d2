"""Checks of an installed wheel before it counts as built: `python smoke.py`. Needs only the core's requirements."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import shmload
from shmload._core.crc32c import crc32c


def main() -> None:
    """Runs the checks. Raises AssertionError or ImportError."""
    assert "site-packages" in Path(shmload.__file__).parts, f"{shmload.__file__} is not installed"
    stubs = sorted((Path(shmload.__file__).parent / "_core").glob("*.pyi"))
    assert len(stubs) > 20
    for stub in stubs:
        importlib.import_module(f"shmload._core.{stub.stem}")
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the CRC catalogue
    numbers = shmload.Permutation(1000, seed=1, epoch=0)
    assert sorted(numbers[i] for i in range(1000)) == list(range(1000))

    dataset = TensorDataset(torch.arange(103 * 5.0).reshape(103, 5), torch.arange(103))
    arguments = {"batch_size": 10, "num_workers": 2, "multiprocessing_context": "spawn"}
    expected = list(DataLoader(dataset, batch_size=10))
    with shmload.ShmLoader(dataset, **arguments) as loader:
        for (x, y), (x_expected, y_expected) in zip(loader, expected, strict=True):
            assert torch.equal(x, x_expected)
            assert torch.equal(y, y_expected)
    with shmload.ShmLoader(dataset, shuffle=True, seed=7, **arguments) as loader:
        assert sorted(number for _, y in loader for number in y.tolist()) == list(range(103))
    print(f"shmload {shmload.__version__}, torch {torch.__version__}, numpy {np.__version__}: as it should be")


if __name__ == "__main__":
    main()
