"""benchmarks/gpu.py on a simulated device: every case runs, so that time on a GPU is not lost to a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import gpu, gpu_training
from benchmarks.common import Settings, markdown
from tests.simulated_device.device import SimulatedDevice, Stream
from tests.simulated_device.device_log import load_log
from tests.simulated_device.device_replay import replay


class Eager(SimulatedDevice):
    """A device whose streams do everything at once that they can."""

    def __init__(self) -> None:
        super().__init__()
        self.main.is_eager = True

    def side_stream(self) -> Stream:
        stream = super().side_stream()
        stream.is_eager = True
        return stream


class Timestamp:
    """A time of a device's clock, in milliseconds."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: Timestamp) -> float:
        return later.at_ms - self.at_ms

    def synchronize(self) -> None:
        """Returns at once, because the time has come."""


class Rehearsal(gpu.Cuda):
    """A simulated device of 1 GHz, which is always available."""

    num_workers, batch_size, pin_torch, start_method = 1, 2, False, "fork"

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self._now_ms = 0.0

    def name(self) -> str:
        return "rehearsal"

    def calls(self) -> SimulatedDevice:
        return Eager()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.copy(tensor)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.device.run()

    def event(self) -> Timestamp:
        return Timestamp(self._now_ms)

    def spin(self, cycles: int) -> None:
        self._now_ms += cycles / 1e6


class Zeros(gpu.Blocks16):
    """Blocks that take no time to make."""

    def __init__(self, num_samples: int = 400) -> None:
        self.blocks = np.zeros((64, 1 << 18), np.float32)
        self.num_samples = num_samples


@pytest.mark.slow(reason="runs every case of the GPU benchmark")
@pytest.mark.usefixtures("pinning")
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_every_case_runs_and_gives_a_table_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "Blocks16", Zeros)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "gpu.log.jsonl")
    monkeypatch.setattr(gpu, "NUM_LOGGED", 12)

    def run(name: str, *arguments: Any) -> dict[str, float]:
        if name == "registering":
            arguments = (32 << 20,)
        found: dict[str, float] = getattr(gpu, name)(Rehearsal(Eager()), *arguments)
        return found

    result = gpu.measured(Settings(1, 0.0), run, Rehearsal(Eager()))
    json.dumps(result.measured)
    assert len(markdown(result.rows).splitlines()) == 2 + len(result.rows) == 14
    rows = {row.what: row for row in result.rows}
    assert [name for name, row in rows.items() if row.aim in ("0", "1") and not row.met] == [
        "batches of a pinned ring that are pinned"  # torch queries CUDA
    ]
    assert {kind: waits["worst_ms"] for kind, waits in result.measured["bubbles"].items()} == dict.fromkeys(gpu.KINDS, 0.0)
    assert {round(waits["step_ms"]) for waits in result.measured["bubbles"].values()} == {20}
    origin, entries = load_log(tmp_path / "gpu.log.jsonl")
    assert origin["origin"] == "benchmarks/gpu.py"
    assert sum(entry[0] == "copy" for entry in entries) >= 12
    assert replay(entries) == []


@pytest.mark.slow(reason="runs a program that imports torch")
def test_without_cuda_the_benchmark_reports_that_and_measures_nothing() -> None:
    code = "import torch; torch.cuda.is_available = lambda: False; from benchmarks import gpu; from benchmarks.common import Settings; "
    done = subprocess.run(
        [sys.executable, "-c", code + "assert gpu.measure(Settings()).rows == []"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "benchmarks.gpu: skipped, as torch.cuda.is_available() is False here: nothing was measured" in done.stderr


class Small(gpu_training.Training):
    """A tiny network on the CPU."""

    device, start_method, batch_size = "cpu", "fork", 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1000))

    def synchronize(self) -> None: ...


@pytest.mark.slow(reason="starts every loader of the GPU training and encodes its photographs")
def test_every_loader_trains_and_has_a_row_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_training, "NUM_WORKERS", (1,))

    def run(*arguments: Any) -> dict[str, float]:
        return gpu_training.trained(Small(), *arguments)

    result = gpu_training.measured(Settings(1, 0.0), run, "rehearsal")
    json.dumps(result.measured)
    assert len(result.rows) == 2
    assert {case: found["images_s"] > 0 for case, found in result.measured["rounds"][0].items()} == {
        "resident, 1": True,
        "torch, 1": True,
        "torch and ImageFolder, 1": True,
        "shmload, 1": True,
    }
