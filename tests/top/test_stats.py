"""`loader.stats()` gives the same figures under the same names as observers in other processes see."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import ShmLoader, TokenBudget
from shmload.tools.top.watch import Watch
from tests.top.live_program import Rows

DOCS = next(p / "docs" for p in Path(__file__).parents if (p / "docs").exists())
OF_THE_PROCESS = {
    "stem",
    "kind",
    "uid",
    "pid",
    "owner_pid",
    "parent_pid",
    "is_stopped",
    "command",
    "rank",
    "world_size",
    "history",
    "stages",
}
OF_THE_TRAINER = {"num_queued", "num_repacked", "num_taken_back", "bad_samples"}
GOES_ON = {"interval_s", "age_s", "time", "bottleneck", "remedy", "samples_per_s", "batches_per_s", "nbytes_per_s", "memory"}
GOES_ON_IN_A_WORKER = {"busy_share", "samples_per_s", "rss_bytes", "private_bytes", "is_waiting"}


def loader_of(**arguments: Any) -> ShmLoader[Any]:
    return ShmLoader(Rows(40), batch_size=4, num_workers=2, **{"seed": 1, **arguments})


def settled(loader: ShmLoader[Any]) -> dict[str, Any]:
    """Returns the stats once every ordered batch is ready."""
    while True:
        stats = loader.stats()
        slots = stats["slots"]
        if slots["ready"] == slots["ordered"] and all(worker["state"] == "waiting" for worker in stats["workers"]):
            return stats


def seen_from_outside(loader: ShmLoader[Any]) -> dict[str, Any]:
    look = Watch([os.getpid()]).look()
    (found,) = (one for one in look["loaders"] if one["pid"] == os.getpid())
    return found  # type: ignore[no-any-return]


def test_stats_equal_those_seen_from_outside() -> None:
    with loader_of() as loader:
        batches = iter(loader)
        kept = [next(batches), next(batches)]
        inside, outside = settled(loader), seen_from_outside(loader)
        assert len(kept) == 2
    assert set(inside) - OF_THE_TRAINER == set(outside) - OF_THE_PROCESS
    for name in set(inside) - OF_THE_TRAINER - GOES_ON - {"workers", "orders"}:
        assert inside[name] == outside[name], name
    for mine, theirs in zip(inside["workers"], outside["workers"], strict=True):
        assert set(mine) == set(theirs)
        for name in set(mine) - GOES_ON_IN_A_WORKER:
            assert mine[name] == theirs[name], name
    assert [order["step"] for order in inside["orders"]] == [order["step"] for order in outside["orders"]] == [2, 3, 4, 5]


class BlocksUnpickling(Rows):
    """Rows that a worker can unpickle only when the test lets it continue."""

    def __init__(self, path: Path) -> None:
        super().__init__(40)
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["path"].read_bytes()  # blocks on a FIFO until a writer has closed it
        self.__dict__.update(state)


def test_starting_worker_has_its_processs_pid(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with ShmLoader(
        BlocksUnpickling(tmp_path / "fifo"), batch_size=4, num_workers=2, seed=1, multiprocessing_context="spawn"
    ) as loader:
        stream: Any = loader._passes
        stream.begin()
        engine = stream._made_engine()
        workers = loader.stats()["workers"]
        assert [worker["state"] for worker in workers] == ["starting", "starting"]
        assert [worker["pid"] for worker in workers] == engine.pool.pids
        assert loader.stats()["bottleneck"] == "unknown"
        for pid in engine.pool.pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [None, 1])
def test_epochs_and_steps_are_those_of_the_batch_just_delivered(seed: int | None) -> None:
    with loader_of(seed=seed) as loader:
        for epoch in range(3):
            for step, _ in enumerate(loader):
                found = loader.stats()
                assert (found["epoch"], found["step"], found["num_steps"]) == (epoch, step, 10)
        assert found["mode"] == ("torch" if seed is None else "seed")


def test_persistent_workers_continue_counting_passes() -> None:
    with loader_of(seed=None, persistent_workers=True) as loader:
        for epoch in range(3):
            for _ in loader:
                pass
            assert loader.stats().items() >= {"epoch": epoch, "step": 9, "batches": 10 * (epoch + 1)}.items()


def test_epochs_have_their_own_lengths_and_ranks_their_own_steps() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 60)
    batches = TokenBudget(lengths, max_tokens=100, window=4)
    lengths_seen = set()
    with ShmLoader(Rows(60), num_workers=2, seed=1, batch_sampler=batches, rank=1, world_size=2) as loader:
        for epoch in range(4):
            for step, _ in enumerate(loader):
                found = loader.stats()
                assert (found["epoch"], found["step"]) == (epoch, step)
            assert found["num_steps"] == step + 1
            lengths_seen.add(step)
    assert len(lengths_seen) > 1, "otherwise the test shows nothing"


class Lengthless:
    """A batch sampler without a length."""

    def __iter__(self) -> Any:
        yield from ([0, 1], [2, 3])


@pytest.mark.parametrize("seed", [None, 1])
def test_unknown_length_is_none(seed: int | None) -> None:
    arguments: dict[str, Any] = {"batch_sampler": Lengthless(), "seed": seed}
    with ShmLoader(Rows(4), num_workers=1, **arguments) as loader:
        assert len(list(loader)) == 2
        assert loader.stats().items() >= {"num_steps": None, "step": 1}.items()


def test_without_workers_only_read_batches_are_counted() -> None:
    with ShmLoader(Rows(8), batch_size=4, seed=1) as loader:
        list(loader)
        assert loader.stats() == {
            "num_bad_samples": 0,
            "bad_samples": [],
            "num_irregular": 0,
            "bottleneck": "unknown",
            "remedy": None,
        }


def test_rank_is_0_if_unspecified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with loader_of(seed=None) as loader:
        batches = iter(loader)
        next(batches)
        assert seen_from_outside(loader).items() >= {"rank": 0, "world_size": 1}.items()


def test_page_names_every_key() -> None:
    told = set(re.findall(r"`(\w+)`", (DOCS / "top.md").read_text()))
    with loader_of() as loader:
        batches = iter(loader)
        next(batches)
        inside, outside = loader.stats(), seen_from_outside(loader)
    nested = [inside["slots"], inside["time"], inside["orders"][0], inside["workers"][0], inside["memory"]]
    nested.append({"for_s": 0, "epoch": 0, "step": 0, "worker": 0})
    look = Watch([os.getpid()]).look()
    for keys in (inside, outside, *nested, look, look["totals"], look["leftovers"]):
        assert set(keys) - told == set()
