"""The same on a real CUDA device: it gets the same calls as the simulated one, and the bytes are correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from shmload.device.cuda import CudaDevice
from tests.device.device_kit import rows_of
from tests.device.test_unsafe_patterns import BLOCKS
from tests.simulated_device.device import SimulatedDevice
from tests.simulated_device.device_log import Logged
from tests.simulated_device.device_replay import replay

Make = Callable[..., ShmLoader[Any]]
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*CUDA:UserWarning"),  # the workers are forked after CUDA was used, but do not use it
]


def test_cuda_gets_the_same_calls_as_the_simulated_device(make: Make) -> None:
    def log_of(device: Any) -> list[tuple[Any, ...]]:
        logged = Logged(device)
        loader = make(logged)
        for batch in loader:
            del batch
            if isinstance(device, SimulatedDevice):
                device.run()
            else:
                device.synchronize()
        loader.close()
        assert replay(logged.log) == []
        num_words = {"register": 2, "unregister": 2, "copy": 4, "keep_for": 3, "side_stream": 2}  # the other entries are numbers
        return [entry[: num_words[entry[0]]] for entry in logged.log if entry[0] in num_words]

    assert sorted(map(str, log_of(SimulatedDevice()))) == sorted(map(str, log_of(CudaDevice())))


def test_batches_of_a_pinned_ring_are_pinned_and_copied_completely(make: Make) -> None:
    loader = make(None, pin_memory=True)
    found = []
    for batch in loader:
        assert batch["x"].is_pinned()
        found.append(batch["x"].to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    assert [torch.equal(rows_of(2 * step), x.cpu()) for step, x in enumerate(found)] == [True] * 24


def test_slot_waits_for_a_copy_on_a_recorded_stream(make: Make) -> None:
    loader = make(None, pin_memory=True)
    side, found = torch.cuda.Stream(), []
    for batch in loader:
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            found.append(batch["x"].to("cuda", non_blocking=True))
        loader.record_stream(batch, side)
        del batch
    torch.cuda.synchronize()
    assert [torch.equal(rows_of(2 * step), x.cpu()) for step, x in enumerate(found)] == [True] * 24


@pytest.mark.parametrize("seed", [0, None])
def test_batches_are_correct_on_a_busy_device(seed: int | None, make: Make) -> None:
    found = []
    for batch in make("cuda", seed=seed):
        torch.cuda._sleep(1_000_000)
        found.append(batch["x"] + 0)
        assert batch["x"].is_cuda
    assert [torch.equal(rows_of(2 * step), x.cpu()) for step, x in enumerate(found)] == [True] * 24


@pytest.mark.parametrize("block", [name for name in BLOCKS if name.startswith("safe")])
def test_safe_block_of_the_page_trains_with_the_right_batches(block: str, make: Make) -> None:
    trained: list[torch.Tensor] = []

    def train(images: torch.Tensor) -> None:
        torch.cuda._sleep(1_000_000)
        trained.append(images.clone())

    exec(compile(BLOCKS[block], "<block>", "exec"), {"torch": torch, "loader": make(None, pin_memory=True), "train": train})
    assert [torch.equal(rows_of(2 * step), images.cpu()) for step, images in enumerate(trained)] == [True] * 24


def test_failed_registration_leaves_no_pending_error() -> None:
    calls = CudaDevice()
    with pytest.raises(RuntimeError, match="cudaHostRegister: error"):
        calls.register(4096, 4096)  # nothing is mapped at this address
    assert torch.ones(3, device="cuda").sum().item() == 3
