"""The tests here, and the processes they spawn, can import `behaviour_kit`; the host's number of cores changes nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.utils.data.dataloader

pytest.register_assert_rewrite("tests.behaviour.behaviour_kit")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch advises against more workers than cores; one test asks for that advice."""
    set_cores(monkeypatch, 64)


def set_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What torch's loader takes for the number of cores."""
    if hasattr(torch._utils, "cpu_count"):
        monkeypatch.setattr(torch._utils, "cpu_count", lambda: number)
    else:  # before 2.13
        affinity = SimpleNamespace(**{**vars(os), "sched_getaffinity": lambda pid: set(range(number))})
        monkeypatch.setattr(torch.utils.data.dataloader, "os", affinity)
