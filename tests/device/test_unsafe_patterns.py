"""The blocks of docs/gpu.md, over a device that stands still: the watch warns of what is unsafe, and of nothing else."""

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
from tests.stand_in.as_cuda import as_cuda
from tests.stand_in.device import StandIn

Make = Callable[..., ShmLoader[Any]]
PAGE = next(p / "docs" / "gpu.md" for p in Path(__file__).parents if (p / "docs").exists())
BLOCKS = dict(re.findall(r"```text\n# ((?:un)?safe: [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL))
WARNED = {
    "unsafe: the stream that copies is not current when the batch dies": (
        r"the copy at <block>:4 in <module> of batch \d+ of epoch 0, taken at <block>:2 in <module>, is not done, and nothing waits "
        r"for it: its slot is used again, and it may read another batch's bytes. Call loader.record_stream\(batch, stream\) before "
        "the batch is dropped, or drop it while that stream is current"
    ),
    "unsafe: the copy is a part of the graph": (
        "the copy at <block>:4 in <module> of batch 0 of epoch 0, taken at <block>:2 in <module>, is captured in a graph, which will "
        "read that address at each replay, whatever lies there then. Copy into a tensor of your own before, and capture what reads that"
    ),
}


def run(block: str, loader: ShmLoader[Any], device: StandIn, *, close: bool = False) -> list[list[torch.Tensor]]:
    """Runs one under the watch, on a main stream that is idle; what it trained with, once everything is done."""
    trained: list[list[torch.Tensor]] = []
    program = {"torch": torch, "loader": loader, "train": lambda images: trained.append(device.read(images))}
    device.main.is_eager = True
    with as_cuda(device), debug.watch_copies(loader):
        exec(compile(BLOCKS[block], "<block>", "exec"), program)
    program.clear()
    if close:
        loader.close()
    return trained


def test_the_page_has_what_is_tested() -> None:
    assert WARNED.keys() == {name for name in BLOCKS if name.startswith("unsafe")}
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("block", WARNED)
def test_an_unsafe_block_is_warned_of_by_line_and_batch(block: str, make: Make, pinning: StandIn) -> None:
    loader = make(None, pin_memory=True)
    with pytest.warns(RuntimeWarning) as caught:
        run(block, loader, pinning, close=True)
    texts = [str(warning.message) for warning in caught]
    assert re.fullmatch(WARNED[block], texts[0])
    assert caught[0].filename == "<block>"


@pytest.mark.parametrize("block", [name for name in BLOCKS if name.startswith("safe")])
def test_a_safe_block_trains_with_its_own_batches_and_is_not_warned_of(block: str, make: Make, pinning: StandIn) -> None:
    loader = make(None, pin_memory=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = run(block, loader, pinning)
        pinning.run()
        loader.close()
    assert [torch.equal(rows_of(2 * step), found[0]) for step, found in enumerate(trained)] == [True] * 24
    assert pinning.violations == []


def test_a_copy_under_way_at_close_is_warned_of(make: Make, pinning: StandIn) -> None:
    pinning.main.is_eager = True
    loader = make(None, pin_memory=True)
    with as_cuda(pinning), debug.watch_copies(loader):
        batch = next(iter(loader))
        with torch.cuda.stream(torch.cuda.Stream()):
            late = batch["x"].to("cuda", non_blocking=True)
        del batch
    with pytest.warns(RuntimeWarning, match="of batch 0 of epoch 0, .* is not done, and nothing waits for it"):
        loader.close()
    del late


def test_what_stays_on_the_host_is_not_noted_and_what_is_waited_for_is_done(make: Make, pinning: StandIn) -> None:
    pinning.main.is_eager = True
    loader = make(None, pin_memory=True)
    with as_cuda(pinning), debug.watch_copies(loader):
        batch = next(iter(loader))
        batch["x"].to(torch.float32).add_(batch["x"])
        torch.zeros(3).to("cuda")
        assert loader._builder.last._pending_copies.late is None
        batch["x"].to("cuda")
    (noted,) = loader._builder.last._pending_copies.late.noted.values()
    assert [copy.event.is_done for copy in noted] == [True]


def test_a_copy_by_a_bare_address_reads_the_poison(make: Make, pinning: StandIn) -> None:
    loader = make(None, pin_memory=True)
    pinning.main.is_eager = True
    batch = next(iter(loader))
    with pinning.using(pinning.side_stream()):
        late = pinning.copy(batch["x"])
    engine = loader._builder.last
    assert engine is not None
    engine.abandon()  # nothing comes into its slot after it
    del batch
    engine._pending_copies.look()
    pinning.run()
    assert debug.is_poisoned(late)


def test_a_watch_over_workers_that_run_already_is_refused(make: Make, pinning: StandIn) -> None:
    debug.enable(False)
    loader = make(None, pin_memory=True)
    next(iter(loader))
    with pytest.raises(RuntimeError) as caught, debug.watch_copies(loader):
        pass
    assert str(caught.value) == (
        "watch_copies needs a loader whose workers start in its block, and these run already: make the loader, or begin its first "
        "pass, in the block, or set SHMLOAD_DEBUG_BATCHES=1"
    )


def test_the_watch_leaves_the_switch_as_it_was(make: Make) -> None:
    debug.enable(False)
    with debug.watch_copies(make(None)):
        assert debug.is_enabled()
    assert not debug.is_enabled()
