"""The blocks of docs/memory.md on an idle device: safe blocks are safe, and late reads are detected."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader, debug
from tests.device.device_kit import rows_of
from tests.simulated_device.as_cuda import as_cuda
from tests.simulated_device.device import SimulatedDevice, Stream

Make = Callable[..., ShmLoader[Any]]
PAGE = next(p / "docs" / "memory.md" for p in Path(__file__).parents if (p / "docs").exists())
BLOCKS = dict(re.findall(r"```py\n# ((?:un)?safe: [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL))


def run(block: str, loader: ShmLoader[Any], device: SimulatedDevice, ahead: str) -> list[list[torch.Tensor]]:
    """Runs a block while either the main stream or all others work at once. Returns what it trained with in the end."""
    trained: list[list[torch.Tensor]] = []
    program = {"torch": torch, "loader": loader, "train": lambda images: trained.append(device.read(images))}
    device.main.is_eager = ahead == "main"

    def side_stream() -> Stream:
        made = SimulatedDevice.side_stream(device)
        made.is_eager = ahead == "side"
        return made

    device.side_stream = side_stream  # type: ignore[method-assign]  # only on this object
    with as_cuda(device):
        exec(compile(BLOCKS[block], "<block>", "exec"), program)
    program.clear()
    return trained


def test_page_has_the_tested_blocks() -> None:
    assert sum(name.startswith("unsafe") for name in BLOCKS) == 2
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("ahead", ["main", "side"])
@pytest.mark.parametrize("block", [name for name in BLOCKS if name.startswith("safe")])
def test_safe_block_trains_with_the_right_batches(block: str, ahead: str, make: Make, pinning: SimulatedDevice) -> None:
    loader = make(None, pin_memory=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "CUDA is in use")  # if there is a GPU, and another test has used it
        trained = run(block, loader, pinning, ahead)
        pinning.run()
        loader.close()
    assert [torch.equal(rows_of(2 * step), found[0]) for step, found in enumerate(trained)] == [True] * 24
    assert pinning.violations == []


def test_copy_by_a_bare_address_reads_poison(make: Make, pinning: SimulatedDevice) -> None:
    loader = make(None, pin_memory=True)
    pinning.main.is_eager = True
    batch = next(iter(loader))
    with pinning.using(pinning.side_stream()):
        late = pinning.copy(batch["x"])
    engine = loader._builder.last
    assert engine is not None
    engine.abandon()  # nothing reuses its slot afterwards
    del batch
    engine._pending_copies.look()
    pinning.run()
    assert debug.is_poisoned(late)
