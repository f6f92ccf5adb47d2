"""Iterable datasets in torch mode are resumed from their own states, or read again up to the position."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from shmload import ShmLoader
from shmload.errors import StateMismatch
from shmload.schedule.state_codec import opened
from tests.resume import noisy_data as data

slow = pytest.mark.slow(reason="most cases start workers for their loaders")
KINDS = {"iterator": data.StatefulIteratorLines, "dataset": data.StatefulLines, "neither": data.Lines}


def rest(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@slow
@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_pass_continues_as_if_never_stopped(kind: str, workers: int, stop: int) -> None:
    torch.manual_seed(3)
    data.random.seed(1), data.np.random.seed(1)
    with ShmLoader(KINDS[kind](), 6, num_workers=workers) as loader:
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        generators = data.random.getstate(), data.np.random.get_state(), torch.get_rng_state()
        expected = rest(iterator)
    with ShmLoader(KINDS[kind](), 6, num_workers=workers) as loader:
        loader.load_state_dict(state)
        if workers == 0:  # the program restores the trainer's own generators
            data.random.setstate(generators[0]), data.np.random.set_state(generators[1]), torch.set_rng_state(generators[2])
        assert rest(loader) == expected


class Epochs(IterableDataset[int]):
    """Ten samples in a pass, in which each iterator begins an epoch."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(100 * self.epoch, 100 * self.epoch + 10))


@pytest.mark.parametrize("batch_size", [5, 4], ids=["whole", "partial"])
def test_pass_after_one_that_is_resumed_at_its_last_batch_is_the_next_epoch(batch_size: int) -> None:
    loader, again = (ShmLoader(Epochs(), batch_size) for _ in range(2))
    for _, batch in zip(range(-(-10 // batch_size)), loader, strict=False):
        assert batch[-1] < 100
    again.load_state_dict(loader.state_dict())
    assert [list(chain.from_iterable(rest(again))) for _ in range(3)] == [[], [*range(100, 110)], [*range(200, 210)]]


def test_pass_whose_first_batch_has_failed_continues_after_it() -> None:
    def collate(samples: list[Any]) -> list[int]:
        if any(sample[0] == 0 for sample in samples):
            raise ValueError("first")
        return [int(sample[0]) for sample in samples]

    with ShmLoader(data.Lines(), 6, num_workers=1, collate_fn=collate) as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match="first"):
            next(iterator)
        state = loader.state_dict()
        expected = list(iterator)
    with ShmLoader(data.Lines(), 6, num_workers=1, collate_fn=collate) as loader:
        loader.load_state_dict(state)
        assert list(loader) == expected


@slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_batches_equal_those_of_torchdatas_loader(kind: str, stop: int, workers: int) -> None:
    def resumed(make: Any) -> list[Any]:
        loader = make(KINDS[kind](), batch_size=6, num_workers=workers)
        for _ in zip(range(stop), loader, strict=False):
            pass
        state = loader.state_dict()
        again = make(KINDS[kind](), batch_size=6, num_workers=workers)
        again.load_state_dict(state)
        return [batch[:, 0].tolist() for batch in again]

    assert resumed(ShmLoader) == resumed(StatefulDataLoader)


@slow
@pytest.mark.parametrize("kind", ["iterator", "dataset"])
def test_state_stays_the_loaded_one_until_the_next_batch(kind: str) -> None:
    with ShmLoader(KINDS[kind](), 6, num_workers=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with ShmLoader(KINDS[kind](), 6, num_workers=2) as loader:
        loader.load_state_dict(state)
        iter(loader)
        assert state == loader.state_dict()


@slow
def test_reading_again_up_to_the_position_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with ShmLoader(data.Lines(), 6, num_workers=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with ShmLoader(data.Lines(), 6, num_workers=1) as loader, caplog.at_level(logging.WARNING, "shmload"):
        loader.load_state_dict(state)
        next(iter(loader))
    assert "the first 1 batches are read again" in caplog.text


@slow
def test_reading_again_without_snapshots_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    """The dataset has both methods, so asking for them would be wrong."""
    with ShmLoader(data.StatefulLines(), 6, num_workers=1, snapshot_every_n_steps=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
        with caplog.at_level(logging.WARNING, "shmload"):
            loader.load_state_dict(state)
            next(iter(loader))
    assert "snapshot_every_n_steps of at least 1" in caplog.text


@slow
@pytest.mark.parametrize("every", [2, 3, 0])
def test_resume_works_with_rare_snapshots(every: int) -> None:
    torch.manual_seed(3)
    with ShmLoader(data.StatefulIteratorLines(), 6, num_workers=2, snapshot_every_n_steps=every) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
        expected = rest(iterator)
    assert opened(state["details"], is_trusted=False)["snapshot"] == {2: 4, 3: 3, 0: 0}[every]
    with ShmLoader(data.StatefulIteratorLines(), 6, num_workers=2, snapshot_every_n_steps=every) as loader:
        loader.load_state_dict(state)
        assert rest(loader) == expected


@slow
def test_state_for_another_number_of_workers_is_refused() -> None:
    with ShmLoader(data.StatefulLines(), 6, num_workers=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with pytest.raises(StateMismatch, match="num_workers: saved 2, now 1"):
        ShmLoader(data.StatefulLines(), 6, num_workers=1).load_state_dict(state)


@slow
@pytest.mark.parametrize("sizes", [(40, 6), (7, 3), (1, 4), (0, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_passes_equal_torchs(sizes: tuple[int, int], drop_last: bool, workers: int) -> None:
    def passes(make: Any) -> list[Any]:
        torch.manual_seed(7)
        loader = make(data.Lines(sizes[0]), batch_size=sizes[1], drop_last=drop_last, num_workers=workers)
        return [rest(loader) for _ in range(2)]

    assert passes(ShmLoader) == passes(torch.utils.data.DataLoader)


@slow
@pytest.mark.parametrize("batch_size", [4, None])
def test_persistent_workers_restart_each_pass(batch_size: int | None) -> None:
    def passes(make: Any) -> list[Any]:
        torch.manual_seed(7)
        loader = make(data.Lines(11), batch_size=batch_size, num_workers=2, persistent_workers=True)
        got = [rest(loader), rest(loader)]
        next(iter(loader))
        return [*got, rest(loader)]

    assert passes(ShmLoader) == passes(torch.utils.data.DataLoader)


class LargeStateOfIdleWorker(IterableDataset):
    """Its second worker has no samples but a large state; afterwards the first worker gets its first sample."""

    def __init__(self) -> None:
        self.said, self.num_said = multiprocessing.Event(), 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        if worker.id == 0:
            assert self.said.wait(60)
            yield from range(4)

    def state_dict(self) -> dict[str, Any]:
        self.num_said += 1
        if self.num_said == 2:  # by now, the first state is in the ring
            self.said.set()
        return {"ballast": bytes(1 << 16)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"ballast": bytes(1 << 16)}


def test_state_of_a_worker_without_samples_survives_a_change_of_slot_memory() -> None:
    with ShmLoader(LargeStateOfIdleWorker(), 2, num_workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        assert len(opened(loader.state_dict()["details"], is_trusted=False)["workers"][1]["dataset"]["ballast"]) == 1 << 16
