"""A loader whose numbers are found: what it says, what it keeps, and that it yields what any other does."""

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
from shmload.engine import autotune, tuning_limits
from shmload.engine.auto_number import is_auto
from tests.engine.tuning_kit import BATCH, SEED, Rows, change, expected_epochs, told

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
BOTH: dict[str, Any] = {"num_workers": "auto", "prefetch_factor": "auto"}


def loader_of(**options: Any) -> ShmLoader[Any]:
    return ShmLoader(Rows(), **{"batch_size": BATCH, "shuffle": True, **BOTH, **options})


@pytest.mark.parametrize("seed", [None, SEED])
def test_the_attributes_are_numbers_and_make_another_auto_loader(seed: int | None) -> None:
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
def test_numbers_that_are_given_stay(options: dict[str, Any]) -> None:
    with loader_of(seed=SEED, **options) as loader:
        assert "autotune" not in loader.stats()
        assert [told(batch) for batch in loader] == expected_epochs(1)[0]
        assert loader.stats().get("slots", {"parked": 0})["parked"] == 0


def test_one_number_may_be_given_and_the_other_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "3")
    with loader_of(seed=SEED, prefetch_factor=5) as loader:
        next(iter(loader))
        change(loader, 3, 5)
        assert (loader.num_workers, repr(loader.prefetch_factor)) == (3, "5")
    with loader_of(seed=SEED, num_workers=1) as loader:
        next(iter(loader))
        change(loader, 1, 7)
        assert (repr(loader.num_workers), loader.prefetch_factor) == ("1", 7)


def test_a_copy_on_a_smaller_host_has_the_pool_of_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    with loader_of(seed=SEED) as loader:
        next(iter(loader))
        change(loader, 4)
        dumped = pickle.dumps(loader)
    assert pickle.loads(dumped).num_workers == 4
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "2")
    with pickle.loads(dumped) as again:
        assert again.num_workers == 2
        assert [told(batch) for batch in again][-1] == expected_epochs(1)[0][-1]


@pytest.mark.parametrize(
    ("most", "options", "num_slots"),
    [(1, {}, 10), (4, {}, 34), (8, {}, 66), (40, {}, 82), (4, {"prefetch_factor": 3}, 14), (4, {"prefetch_factor": 30}, 122)],
)
def test_a_ring_is_made_for_the_largest_pool(
    most: int, options: dict[str, Any], num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", str(most))
    with loader_of(seed=SEED, **options) as loader:
        next(iter(loader))
        engine: Any = loader._builder.last
        assert (engine._ring.num_workers, engine.num_slots) == (most, num_slots)


def test_no_batches_ahead_can_be_found_where_no_worker_reads() -> None:
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        loader_of(num_workers=0)


def test_it_says_what_it_did_and_why(caplog: pytest.LogCaptureFixture) -> None:
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
        said = loader.stats()["autotune"]
        assert (said["num_workers"], said["prefetch_factor"]) == (1, 4)
        assert said["decisions"] == [
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
def by_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that a test moves on, and windows of eight batches."""
    now = [0.0]
    monkeypatch.setattr(autotune, "monotonic", lambda: now[0])
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", "4")
    return now


def read(loader: ShmLoader[Any], now: list[float], num_batches: int, figures: Any) -> list[Any]:
    """Reads batches of 0.1 s each, where the engine says of its pace what a test wants."""
    found = []
    for batch in loader:
        engine: Any = loader._builder.last
        engine.pace, engine.worker_set.is_complete = figures, lambda: True
        now[0] += 0.1
        found.append(told(batch))
        if len(found) == num_batches:
            break
    return found


def test_a_trainer_that_waits_for_busy_workers_gets_more_and_the_same_batches(by_count: list[float]) -> None:
    now = by_count
    with loader_of(seed=SEED) as loader:

        def waiting() -> tuple[float, float, int]:
            return now[0] * 0.8, now[0] * int(loader.num_workers), 0

        found = [batch for _ in range(12) for batch in read(loader, now, 60, waiting)]
        said = loader.stats()["autotune"]
        assert [decision["num_workers"] for decision in said["decisions"][:1]] == [2]
        assert said["decisions"][0]["reason"] == "the trainer waits 80% of the time, 1 worker is busy 100%: 2 workers"
        assert said["decisions"][0]["trainer_waits"] == pytest.approx(0.8)
        assert said["decisions"][0]["batches_per_s"] == pytest.approx(10)
        assert "back to 1" in said["decisions"][1]["reason"], "the clock gives no gain"
        assert said["bottleneck"] == "decode"
    assert found == [batch for epoch in expected_epochs(12) for batch in epoch]


class Who(Rows):
    """Which worker read it, and what that drew from its own stream."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, info.id, info.num_workers, torch.rand(1)


@pytest.mark.slow(reason="two passes of batches of one sample, by each of two loaders with workers")
@pytest.mark.parametrize("in_order", [True, False])
def test_torch_mode_orders_further_ahead_without_changing_a_batch(by_count: list[float], in_order: bool) -> None:
    now = by_count

    def idle() -> tuple[float, float, int]:
        return now[0] * 0.8, now[0] * 0.1, 0

    def passes(**options: Any) -> Iterator[Any]:
        torch.manual_seed(4)
        with ShmLoader(Who(), batch_size=1, shuffle=True, num_workers=2, in_order=in_order, **options) as loader:
            for _ in range(2):
                for batch in loader:
                    engine: Any = loader._builder.last
                    engine.pace, engine.worker_set.is_complete = idle, lambda: True
                    now[0] += 0.1
                    yield [value.tolist() for value in batch]
            if options:
                said = loader.stats()["autotune"]["decisions"]
                assert said[0]["prefetch_factor"] == 4
                assert {2} == {decision["num_workers"] for decision in said}

    found, plain = list(passes(prefetch_factor="auto")), list(passes())
    if in_order:
        assert found == plain
    else:
        assert list(range(60)) == sorted(batch[0][0] for batch in found[:60])


@pytest.mark.slow(reason="starts four workers for each of two loaders")
def test_torch_mode_takes_one_number_and_keeps_it(by_count: list[float]) -> None:
    now = by_count
    torch.manual_seed(3)
    with ShmLoader(Who(), batch_size=2, num_workers="auto") as loader:
        assert loader.num_workers == 4 == tuning_limits.fixed_workers()
        found = [[value.tolist() for value in batch] for batch in loader]
        assert loader.num_workers == 4
        assert "autotune" not in loader.stats(), "nothing of it changes"
    torch.manual_seed(3)
    with ShmLoader(Who(), batch_size=2, num_workers=4) as loader:
        assert found == [[value.tolist() for value in batch] for batch in loader]
    assert now == [0.0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 50, info.num_workers))


def test_a_stream_ends_as_it_would_whatever_is_ordered_ahead(by_count: list[float]) -> None:
    with ShmLoader(Stream(), batch_size=3, num_workers=2, prefetch_factor="auto") as loader:
        batches = iter(loader)
        found = [next(batches).tolist()]
        change(loader, 2, 6)
        found += [batch.tolist() for batch in batches]
    with ShmLoader(Stream(), batch_size=3, num_workers=2) as loader:
        assert found == [batch.tolist() for batch in loader]


def test_numbers_that_are_set_between_passes_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShmLoader(Who(), batch_size=1, num_workers=1, prefetch_factor="auto") as loader:
        assert {1} == {int(num) for _, _, num, _ in loader}
        loader.num_workers = 2
        assert {2} == {int(num) for _, _, num, _ in loader}
        assert loader.stats()["autotune"]["num_workers"] == 2


def test_a_sampler_has_grown_no_further_ahead_than_the_numbers_say() -> None:
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


def test_the_first_look_at_another_engine_begins_anew(by_count: list[float]) -> None:
    now = by_count
    with loader_of(seed=SEED) as loader:
        assert loader._builder.tuner is not None
        read(loader, now, 10, lambda: (0.0, 0.0, 0))
        began = loader._builder.tuner._began
        stream = loader._passes
        assert stream is not None
        stream._end_workers()  # as where the world's size has changed
        read(loader, now, 2, lambda: (0.0, 0.0, 0))
        assert loader._builder.tuner._began > began
