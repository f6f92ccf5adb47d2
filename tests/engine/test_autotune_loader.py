"""A loader with "auto" values: its attributes, its copies, its reports, and batches equal to those of any other loader."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from shmload import ShmLoader
from shmload.engine.tuning import autotune, tuning_limits
from shmload.engine.tuning.auto_number import is_auto
from tests.engine.tuning_kit import BATCH, SEED, Rows, change, expected_epochs, values_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
BOTH: dict[str, Any] = {"num_workers": "auto", "prefetch_factor": "auto"}


def loader_of(**options: Any) -> ShmLoader[Any]:
    return ShmLoader(Rows(), **{"batch_size": BATCH, "shuffle": True, **BOTH, **options})


@pytest.mark.parametrize("seed", [None, SEED])
def test_attributes_are_numbers_that_make_another_auto_loader(seed: int | None) -> None:
    with loader_of(seed=seed) as loader:
        assert loader.num_workers == (tuning_limits.fixed_workers() if seed is None else tuning_limits.first_workers())
        assert loader.prefetch_factor == 2
        again = ShmLoader(Rows(), num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor, seed=seed)
        for made in (again, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            with made:
                assert is_auto(made.num_workers)
                assert is_auto(made.prefetch_factor)
                assert "autotune" in made.stats()


@pytest.mark.parametrize("options", [{"num_workers": 0, "prefetch_factor": None}, {"num_workers": 1, "prefetch_factor": 3}])
def test_given_numbers_are_not_tuned(options: dict[str, Any]) -> None:
    with loader_of(seed=SEED, **options) as loader:
        assert "autotune" not in loader.stats()
        assert [values_of(batch) for batch in loader] == expected_epochs(1)[0]
        assert loader.stats().get("slots", {"parked": 0})["parked"] == 0


def test_one_number_can_be_given_and_the_other_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "3")
    with loader_of(seed=SEED, prefetch_factor=5) as loader:
        next(iter(loader))
        change(loader, 3, 5)
        assert (loader.num_workers, repr(loader.prefetch_factor)) == (3, "5")
    with loader_of(seed=SEED, num_workers=1) as loader:
        next(iter(loader))
        change(loader, 1, 7)
        assert (repr(loader.num_workers), loader.prefetch_factor) == ("1", 7)


def test_copy_on_a_smaller_host_has_the_workers_of_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    with loader_of(seed=SEED) as loader:
        next(iter(loader))
        change(loader, 4)
        dumped = pickle.dumps(loader)
    assert pickle.loads(dumped).num_workers == 4
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "2")
    with pickle.loads(dumped) as again:
        assert again.num_workers == 2
        assert [values_of(batch) for batch in again][-1] == expected_epochs(1)[0][-1]


@pytest.mark.parametrize(
    ("most", "options", "num_slots"),
    [(1, {}, 10), (4, {}, 34), (8, {}, 66), (40, {}, 82), (4, {"prefetch_factor": 3}, 14), (4, {"prefetch_factor": 30}, 122)],
)
def test_ring_is_made_for_the_largest_pool(
    most: int, options: dict[str, Any], num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", str(most))
    with loader_of(seed=SEED, **options) as loader:
        next(iter(loader))
        engine: Any = loader._builder.last
        assert (engine._ring.num_workers, engine.num_slots) == (most, num_slots)


def test_auto_prefetch_factor_without_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        loader_of(num_workers=0)


def test_decisions_are_reported_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(seed=SEED) as loader, caplog.at_level(logging.INFO, "shmload"):
        assert loader.stats()["autotune"] == {
            "num_workers": loader.num_workers,
            "prefetch_factor": 2,
            "most_workers": tuning_limits.most_workers(),
            "bottleneck": "unknown",
            "decisions": [],
        }
        next(iter(loader))
        change(loader, 1, 4)
        report = loader.stats()["autotune"]
        assert (report["num_workers"], report["prefetch_factor"]) == (1, 4)
        assert report["decisions"] == [
            {
                "num_workers": 1,
                "prefetch_factor": 4,
                "reason": "a test wants it",
                "batches": 1,
                "batches_per_s": None,
                "trainer_waits": None,
                "workers_busy": None,
            }
        ]
    assert "autotune: a test wants it" in [record.message for record in caplog.records]


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Returns a clock that the test advances."""
    now = [0.0]
    monkeypatch.setattr(autotune, "monotonic", lambda: now[0])
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    return now


def read(loader: ShmLoader[Any], now: list[float], num_batches: int, figures: Any) -> list[Any]:
    """Reads batches that take 0.1 s each, while the engine reports the given pace."""
    found = []
    for batch in loader:
        engine: Any = loader._builder.last
        engine.pace, engine.worker_set.is_complete = figures, lambda: True
        now[0] += 0.1
        found.append(values_of(batch))
        if len(found) == num_batches:
            break
    return found


def test_waiting_trainer_gets_more_workers_and_the_same_batches(manual_clock: list[float]) -> None:
    now = manual_clock
    with loader_of(seed=SEED) as loader:

        def waiting() -> tuple[float, float, int]:
            return now[0] * 0.8, now[0] * int(loader.num_workers), 0

        found = [batch for _ in range(12) for batch in read(loader, now, 60, waiting)]
        report = loader.stats()["autotune"]
        assert [decision["num_workers"] for decision in report["decisions"][:1]] == [2]
        assert report["decisions"][0]["reason"] == "the trainer waits 80% of the time, 1 worker is busy 100%: 2 workers"
        assert report["decisions"][0]["trainer_waits"] == pytest.approx(0.8)
        assert report["decisions"][0]["batches_per_s"] == pytest.approx(10)
        assert "back to 1" in report["decisions"][1]["reason"], "the clock shows no gain"
        assert report["bottleneck"] == "decode"
    assert found == [batch for epoch in expected_epochs(12) for batch in epoch]


class WorkerTagged(Rows):
    """Samples with the id of the worker that read them and a number from its random stream."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, info.id, info.num_workers, torch.rand(1)


@pytest.mark.slow(reason="reads two passes of batches of one sample with each of two loaders")
@pytest.mark.parametrize("in_order", [True, False])
def test_torch_mode_raises_the_prefetch_factor_without_changing_a_batch(manual_clock: list[float], in_order: bool) -> None:
    now = manual_clock

    def idle() -> tuple[float, float, int]:
        return now[0] * 0.8, now[0] * 0.1, 0

    def passes(**options: Any) -> Iterator[Any]:
        torch.manual_seed(4)
        with ShmLoader(WorkerTagged(), batch_size=1, shuffle=True, num_workers=2, in_order=in_order, **options) as loader:
            for _ in range(2):
                for batch in loader:
                    engine: Any = loader._builder.last
                    engine.pace, engine.worker_set.is_complete = idle, lambda: True
                    now[0] += 0.1
                    yield [value.tolist() for value in batch]
            if options:
                report = loader.stats()["autotune"]["decisions"]
                assert report[0]["prefetch_factor"] == 4
                assert {2} == {decision["num_workers"] for decision in report}

    found, plain = list(passes(prefetch_factor="auto")), list(passes())
    if in_order:
        assert found == plain
    else:
        assert list(range(60)) == sorted(batch[0][0] for batch in found[:60])


@pytest.mark.slow(reason="starts four workers for each of two loaders")
def test_torch_mode_chooses_a_number_of_workers_and_keeps_it(manual_clock: list[float]) -> None:
    now = manual_clock
    torch.manual_seed(3)
    with ShmLoader(WorkerTagged(), batch_size=2, num_workers="auto") as loader:
        assert loader.num_workers == 4 == tuning_limits.fixed_workers()
        found = [[value.tolist() for value in batch] for batch in loader]
        assert loader.num_workers == 4
        assert "autotune" not in loader.stats(), "nothing is tuned"
    torch.manual_seed(3)
    with ShmLoader(WorkerTagged(), batch_size=2, num_workers=4) as loader:
        assert found == [[value.tolist() for value in batch] for batch in loader]
    assert now == [0.0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 50, info.num_workers))


def test_iterable_dataset_ends_the_same_way_after_prefetch_grows(manual_clock: list[float]) -> None:
    with ShmLoader(Stream(), batch_size=3, num_workers=2, prefetch_factor="auto") as loader:
        batches = iter(loader)
        found = [next(batches).tolist()]
        change(loader, 2, 6)
        found += [batch.tolist() for batch in batches]
    with ShmLoader(Stream(), batch_size=3, num_workers=2) as loader:
        assert found == [batch.tolist() for batch in loader]


def test_numbers_set_between_passes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShmLoader(WorkerTagged(), batch_size=1, num_workers=1, prefetch_factor="auto") as loader:
        assert {1} == {int(num) for _, _, num, _ in loader}
        loader.num_workers = 2
        assert {2} == {int(num) for _, _, num, _ in loader}
        assert loader.stats()["autotune"]["num_workers"] == 2


def test_sampler_is_read_only_as_far_ahead_as_the_prefetch_factor() -> None:
    taken = []

    class Counting(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                taken.append(index)
                yield index

    with ShmLoader(Rows(), sampler=Counting(Rows()), num_workers=1, prefetch_factor="auto") as loader:
        batches = iter(loader)
        assert len(taken) == 2
        next(batches)
        assert len(taken) == 3
        change(loader, 1, 5)
        next(batches)
        assert len(taken) == 2 + 5
        change(loader, 1, 1)
        next(batches)
        assert len(taken) == 2 + 5


def test_tuning_restarts_with_another_engine(manual_clock: list[float]) -> None:
    now = manual_clock
    with loader_of(seed=SEED) as loader:
        assert loader._builder.tuner is not None
        read(loader, now, 10, lambda: (0.0, 0.0, 0))
        began = loader._builder.tuner._began
        stream = loader._passes
        assert stream is not None
        stream._end_workers()  # as after a change of the world size
        read(loader, now, 2, lambda: (0.0, 0.0, 0))
        assert loader._builder.tuner._began > began
