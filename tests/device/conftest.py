"""Loaders over a simulated device, with slots that are poisoned as soon as they are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmload import ShmLoader, debug
from tests.device.device_kit import Rows
from tests.simulated_device.device import SimulatedDevice


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Overwrites free slots of loaders made in the test."""
    debug.enable()
    yield
    debug.enable(False)


@pytest.fixture
def make(poisoned: None) -> Iterator[Callable[..., ShmLoader[Any]]]:
    """Returns a function that makes loaders of 24 batches in seed mode over a device. Closes them afterwards."""
    made: list[ShmLoader[Any]] = []

    def make_one(device: Any, dataset: Any = None, **options: Any) -> ShmLoader[Any]:
        options = {"batch_size": 2, "num_workers": 1, "seed": 0, "multiprocessing_context": "fork"} | options
        made.append(ShmLoader(Rows(48) if dataset is None else dataset, device=device, **options))
        return made[-1]

    yield make_one
    for loader in made:
        loader.close()


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Returns the device that pin_memory=True pins for."""
    calls = SimulatedDevice()
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("shmload.engine.builder.current_cuda", lambda: calls)
    monkeypatch.setattr("shmload.modes.seed_mode.pin_memory", lambda batch: batch)
    return calls
