"""pin_memory without an accelerator gives a warning and the same batches, in seed mode as in torch mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import WORKERS, Numbers, Shards, batches, observed, same_as_torch
from tests.matrix.versions import TORCH

pytestmark = [
    pytest.mark.skipif(TORCH < (2, 7), reason="older releases do not warn without an accelerator"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a host without an accelerator"),
]
IGNORES_DEVICE = pytest.mark.skipif(TORCH < (2, 9), reason="older releases use the named device")
WARNING = "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
DEVICE = "pin_memory_device is deprecated, the current accelerator will be used as the device,ignore pin_memory_device='cuda'."


@WORKERS
@pytest.mark.parametrize("iterable", [False, True])
def test_each_iterator_warns_and_batches_are_the_same(num_workers: int, iterable: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Shards([1, 2], [3]) if iterable else Numbers(5), num_workers=num_workers, pin_memory=True)
        found = [(batch.tolist(), batch.is_pinned()) for batch in loader]
        return found, batches(loader), iter(loader)._pin_memory

    same_as_torch(program, num_warnings=3)


@IGNORES_DEVICE
@WORKERS
def test_warnings_are_torchs(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(Numbers(3), num_workers=num_workers, pin_memory=True, pin_memory_device="cuda"))

    same_as_torch(program, num_warnings=2)
    assert [text for _, text in observed(program, ShmLoader)[1]] == [DEVICE, WARNING]


@IGNORES_DEVICE
@WORKERS
def test_pin_memory_device_without_pinning_gives_no_warning(num_workers: int) -> None:
    same_as_torch(lambda kind: batches(kind(Numbers(3), num_workers=num_workers, pin_memory_device="cuda")))


def test_persistent_workers_warn_once() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(3), num_workers=1, pin_memory=True, persistent_workers=True)
        return batches(loader), batches(loader)

    same_as_torch(program, num_warnings=1)


class Custom:
    """A batch type with a pin_memory method, which counts its calls."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.num_pinned = 0

    def pin_memory(self) -> Custom:
        self.num_pinned += 1
        return self


@WORKERS
def test_pin_memory_of_a_custom_batch_is_not_called(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(4), batch_size=2, num_workers=num_workers, pin_memory=True, collate_fn=Custom)
        return [(type(batch), batch.samples, batch.num_pinned) for batch in loader]

    assert same_as_torch(program, num_warnings=1) == [(Custom, [0, 1], 0), (Custom, [2, 3], 0)]


@WORKERS
def test_seed_mode_gives_torchs_warning(num_workers: int) -> None:
    with (
        ShmLoader(Numbers(4), 2, seed=1, num_workers=num_workers, pin_memory=True) as loader,
        pytest.warns(UserWarning, match="pin_memory") as caught,
    ):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert [(str(one.message), one.filename) for one in caught] == [(WARNING, __file__)]


@WORKERS
def test_seed_mode_copies_every_batch_to_pinned_memory(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pin(batch: torch.Tensor) -> torch.Tensor:
        pinned.append(batch.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("shmload.modes.seed_mode.pin_memory", pin)
    with ShmLoader(Numbers(4), 2, seed=1, num_workers=num_workers, pin_memory=True) as loader:
        found = list(loader)
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3]]
    assert all(batch is copied for batch, copied in zip(found, pinned, strict=True))
