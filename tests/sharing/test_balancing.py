"""Ranks that read different samples: their workers help each other, and batches do not change."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shmload import SampleTimeout, faults
from tests.sharing.balancing_kit import (
    BATCH,
    DEADLY,
    HALF,
    NUM_SAMPLES,
    Events,
    Samples,
    alone,
    deadly,
    digest,
    helper_hangs,
    helper_is_killed,
    loader_of,
    own_wait_for_a_helper,
    owner_of,
    read_until,
)
from tests.sharing.sharing_kit import Outcome, digests_or_deaths, run_ranks

NUM_STEPS = NUM_SAMPLES // BATCH // HALF
_fork = multiprocessing.get_context("fork")


def read(rank: int, folder: Path, act: Any, others: dict[str, Any]) -> tuple[list[str], int]:
    with loader_of(rank, Samples(Events(folder), act), **others) as loader:
        found = [digest(batch) for _ in range(2) for batch in loader]
        if act is not None:
            read_until(Events(folder), "helped", loader)  # a rank that has closed its loader does not help
        return found, loader.stats()["num_chunks_by_helpers"]


def assert_same_as_alone(outcomes: list[Outcome], folder: Path, num_epochs: int = 2, **others: Any) -> None:
    """Asserts that each rank has read the same as without sharing."""
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert alone(rank, Samples(Events(folder)), num_epochs, **others) == outcome.given[0]


def collated(samples: list[Any]) -> dict[str, Any]:
    return {"x": [sample["x"].sum() for sample in samples], "noise": [sample["noise"] for sample in samples]}


@pytest.mark.parametrize(
    "others", [{}, {"collate_fn": collated}, {"shuffle": True, "num_workers": 2}], ids=["rows", "packed", "shuffled"]
)
def test_each_rank_reads_the_same_as_alone(tmp_path: Path, others: dict[str, Any]) -> None:
    assert_same_as_alone(run_ranks(read, 2, tmp_path, None, others), tmp_path, **others)


def test_rank_with_a_blocked_worker_is_helped_and_batches_are_unchanged(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, own_wait_for_a_helper, {})
    assert_same_as_alone(outcomes, tmp_path)
    assert outcomes[1].given[1] > 0


def test_three_ranks_with_two_workers_each_read_the_same_as_alone(tmp_path: Path) -> None:
    others = {"num_workers": 2, "world_size": 3, "shuffle": True}
    assert_same_as_alone(run_ranks(read, 3, tmp_path, None, others), tmp_path, **others)


@pytest.mark.slow(reason="workers start as new interpreters, which import all modules")
def test_spawned_workers_help_too(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, own_wait_for_a_helper, {"multiprocessing_context": "spawn", "timeout": 60})
    assert_same_as_alone(outcomes, tmp_path)
    assert outcomes[1].given[1] > 0


def test_helper_killed_during_a_sample_loses_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, helper_is_killed, {"prefetch_factor": 4})
    assert_same_as_alone(outcomes, tmp_path)


def read_with_charges(rank: int, folder: Path, num_charges: int) -> tuple[list[str], int]:
    (folder / "charges").mkdir(exist_ok=True)
    faults._folder, faults.armed = (str(folder / "charges"), True)  # the same as `SHMLOAD_FAULTS`, in this process and its workers
    # a batch that has lost a helper is left to its own worker pool, so later helpers need other batches
    with loader_of(rank, Samples(Events(folder), own_wait_for_a_helper), prefetch_factor=2 * num_charges) as loader:
        if rank == 0:
            for number in range(num_charges):
                (folder / "charges" / f"visiting.{number}").touch()
        found = [digest(batch) for _ in range(2) for batch in loader]
        read_until(Events(folder), "helped", loader)
        spent = [name for name in os.listdir(folder / "charges") if name.startswith("spent-visiting")]
        return found, len(spent)


def test_helpers_killed_right_after_their_claim_lose_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(read_with_charges, 2, tmp_path, 3)
    assert_same_as_alone(outcomes, tmp_path)
    assert outcomes[1].given[1] == 3


def die_or_read(rank: int, folder: Path, dying: int, share: str | None) -> list[str]:
    """Runs a rank that ends while rank 0's worker is blocked in a chunk of rank 1's."""
    marks, found = Events(folder), []
    with loader_of(rank, Samples(marks, helper_hangs)) as loader:
        for step, batch in enumerate(loader):
            found.append(digest(batch))
            if rank == dying and (rank == 1 or step == 1):
                marks.wait("helped")
                os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_rank_killed_with_its_worker_in_a_neighbors_chunk_does_not_affect_the_neighbor(tmp_path: Path) -> None:
    first, second = run_ranks(die_or_read, 2, tmp_path, 0, "node")
    assert first.exitcode == -signal.SIGKILL
    assert second.text == ""
    assert second.given == alone(1, Samples(Events(tmp_path)))


def close_early(rank: int, folder: Path, closing: int, ended: Any) -> list[str]:
    """Closes one rank's loader after two batches; the other rank continues after that."""
    with loader_of(rank, Samples(Events(folder))) as loader:
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(2)]
        if rank == closing:
            loader.close()
            ended.wait(30)
            return found
        ended.wait(30)
        return found + [digest(batch) for batch in batches] + [digest(batch) for batch in loader]


@pytest.mark.parametrize("closing", [0, 1])
def test_rank_that_closes_its_loader_does_not_affect_its_neighbor(tmp_path: Path, closing: int) -> None:
    outcomes = run_ranks(close_early, 2, tmp_path, closing, _fork.Barrier(2))
    assert [outcome.text for outcome in outcomes] == ["", ""]
    assert outcomes[1 - closing].given == alone(1 - closing, Samples(Events(tmp_path)), 2)


def read_deadly(rank: int, folder: Path) -> list[str]:
    with loader_of(rank, Samples(Events(folder), deadly)) as loader:
        found = digests_or_deaths(iter(loader), NUM_STEPS, digest)
        read_until(Events(folder), "helped", loader)
    return found


def test_sample_that_kills_its_workers_fails_only_its_own_rank(tmp_path: Path) -> None:
    first, second = run_ranks(read_deadly, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == alone(0, Samples(Events(tmp_path)))
    (step,) = [step for step, found in enumerate(second.given) if len(found) != 64]
    assert f"sample {DEADLY} of epoch 0 (row 1 of batch {step}) ended its worker twice" in second.given.pop(step)
    expected = alone(1, Samples(Events(tmp_path)))
    del expected[step]
    assert second.given == expected


def read_late(rank: int, folder: Path) -> Any:
    found, told = [], []
    with loader_of(rank, Samples(Events(folder), helper_hangs), sample_timeout_s=2) as loader:
        batches = iter(loader)
        for _ in range(NUM_STEPS):
            try:
                found.append(digest(next(batches)))
            except SampleTimeout as error:
                told.append(str(error))
                Events(folder).set("told")
        read_until(Events(folder), "told", loader)
    return found, told


@pytest.mark.slow(reason="a sample's time limit of 2 s runs out")
def test_late_helper_is_ended_by_the_rank_that_owns_the_sample(tmp_path: Path) -> None:
    first, second = run_ranks(read_late, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == (alone(0, Samples(Events(tmp_path))), [])
    found, (told,) = second.given
    assert len(found) == NUM_STEPS - 1
    assert "took longer than sample_timeout_s=2" in told
    assert "in helper_hangs" in told


class Growing(Samples):
    """Batches of rank 1 that need more memory from step to step; those of rank 0 never wait for memory."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "text": "word " * (index**2 if owner_of(index) == 1 else 1)}


def wait_for_helper_and_rank_0(marks: Events, index: int, is_helper: bool) -> None:
    """Makes rank 1's worker wait for a helper in the first batches, then until rank 0 has read all of its own."""
    if index < NUM_SAMPLES // 2:
        own_wait_for_a_helper(marks, index, is_helper)
    elif is_helper:
        marks.set("helped late")
    else:
        marks.wait("all is read")


def read_while_other_rank_waits(rank: int, folder: Path) -> list[str]:
    """Reads rank 0; rank 1 takes and grants nothing in its ring until rank 0 has read everything."""
    marks = Events(folder)
    with loader_of(rank, Growing(marks, wait_for_helper_and_rank_0), prefetch_factor=4) as loader:
        found = []
        for step, batch in enumerate(loader):
            found.append(digest({"x": batch["x"], "noise": batch["noise"]}))
            if rank == 1 and step == 1:
                marks.set("stands")
                marks.wait("all is read")
            if rank == 0 and step == 2:
                marks.wait("stands")
                marks.wait("helped late")
        if rank == 0:
            marks.set("all is read")
        return found


def test_helper_never_waits_for_the_trainer_whose_batch_it_fills(tmp_path: Path) -> None:
    first, second = run_ranks(read_while_other_rank_waits, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == alone(0, Samples(Events(tmp_path)))
    assert second.given == alone(1, Samples(Events(tmp_path)))


def read_under_kills(rank: int, folder: Path, num_epochs: int) -> tuple[list[str], int]:
    """Kills workers of this rank at random moments, but none during a batch that was ordered before the last kill: a sample that
    loses its worker twice is an error.
    """
    chance = random.Random(rank)
    found, num_kills, num_since = [], 0, 0
    with loader_of(rank, Samples(Events(folder)), num_workers=2, prefetch_factor=3) as loader:
        for _ in range(num_epochs):
            for batch in loader:
                found.append(digest(batch))
                num_since += 1
                if num_since > MOST_AHEAD and chance.random() < 0.5:
                    num_since = 0
                    pids = [worker["pid"] for worker in loader.stats()["workers"] if worker["pid"]]
                    with suppress(ProcessLookupError):  # may have been killed before and not yet replaced
                        os.kill(chance.choice(pids), signal.SIGKILL)
                        num_kills += 1
    return found, num_kills


MOST_AHEAD = 8  # batches that may be in progress


@pytest.mark.slow(reason="two ranks read on while their workers are killed and replaced")
def test_kills_of_random_workers_change_no_ranks_batches(tmp_path: Path) -> None:
    outcomes = run_ranks(read_under_kills, 2, tmp_path, 60)
    assert_same_as_alone(outcomes, tmp_path, 60, num_workers=2)
    assert min(outcome.given[1] for outcome in outcomes) > NUM_STEPS
