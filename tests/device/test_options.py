"""Resolution of the `device` argument."""

from __future__ import annotations

import pytest
import torch

from shmload.device.cuda import CudaDevice


def test_current_device_is_the_one_that_was_current_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    calls = CudaDevice()
    found = [calls.current_stream()]
    current[0] = 0  # as torch.cuda.set_device does
    found.append(calls.current_stream())
    assert found == [torch.device("cuda", 1)] * 2
