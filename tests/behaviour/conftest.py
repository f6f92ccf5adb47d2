"""Makes `behaviour_kit` importable in these tests and the processes they spawn, and hides the host's number of cores."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.utils.data.dataloader

pytest.register_assert_rewrite("tests.behaviour.behaviour_kit")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates many cores, because torch warns about more workers than cores; one test needs that warning."""
    set_cores(monkeypatch, 64)


def set_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Sets the number of cores that torch's loader sees."""
    if hasattr(torch._utils, "cpu_count"):
        monkeypatch.setattr(torch._utils, "cpu_count", lambda: number)
    else:  # before 2.13
        affinity = SimpleNamespace(**{**vars(os), "sched_getaffinity": lambda pid: set(range(number))})
        monkeypatch.setattr(torch.utils.data.dataloader, "os", affinity)
