"""Ranks that read different samples: their workers help each other, and no batch is another for it."""

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
    Marks,
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
    with loader_of(rank, Samples(Marks(folder), act), **others) as loader:
        found = [digest(batch) for _ in range(2) for batch in loader]
        if act is not None:
            read_until(Marks(folder), "helped", loader)  # a rank that has closed its loader helps nobody
        return found, loader.stats()["num_chunks_by_helpers"]


def check_alike(outcomes: list[Outcome], folder: Path, num_epochs: int = 2, **others: Any) -> None:
    """Each rank has read what it reads alone."""
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert alone(rank, Samples(Marks(folder)), num_epochs, **others) == outcome.given[0]


def collated(samples: list[Any]) -> dict[str, Any]:
    return {"x": [sample["x"].sum() for sample in samples], "noise": [sample["noise"] for sample in samples]}


@pytest.mark.parametrize(
    "others", [{}, {"collate_fn": collated}, {"shuffle": True, "num_workers": 2}], ids=["rows", "packed", "shuffled"]
)
def test_each_rank_reads_what_it_reads_alone(tmp_path: Path, others: dict[str, Any]) -> None:
    check_alike(run_ranks(read, 2, tmp_path, None, others), tmp_path, **others)


def test_a_rank_whose_worker_stands_still_is_helped_by_its_neighbors_and_no_batch_is_another(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, own_wait_for_a_helper, {})
    check_alike(outcomes, tmp_path)
    assert outcomes[1].given[1] > 0


def test_three_ranks_with_two_workers_each_read_what_they_read_alone(tmp_path: Path) -> None:
    others = {"num_workers": 2, "world_size": 3, "shuffle": True}
    check_alike(run_ranks(read, 3, tmp_path, None, others), tmp_path, **others)


@pytest.mark.slow(reason="workers start as new interpreters, which import everything anew")
def test_workers_that_were_not_forked_help_as_well(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, own_wait_for_a_helper, {"multiprocessing_context": "spawn", "timeout": 60})
    check_alike(outcomes, tmp_path)
    assert outcomes[1].given[1] > 0


def test_a_helper_that_is_killed_over_a_sample_costs_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path, helper_is_killed, {"prefetch_factor": 4})
    check_alike(outcomes, tmp_path)


def read_with_charges(rank: int, folder: Path, num_charges: int) -> tuple[list[str], int]:
    (folder / "charges").mkdir(exist_ok=True)
    faults._folder, faults.armed = (str(folder / "charges"), True)  # what `SHMLOAD_FAULTS` does, in this process and its workers
    # a batch that has lost a helper is its own worker pool's: there must be others for the next helpers
    with loader_of(rank, Samples(Marks(folder), own_wait_for_a_helper), prefetch_factor=2 * num_charges) as loader:
        if rank == 0:
            for number in range(num_charges):
                (folder / "charges" / f"visiting.{number}").touch()
        found = [digest(batch) for _ in range(2) for batch in loader]
        read_until(Marks(folder), "helped", loader)
        spent = [name for name in os.listdir(folder / "charges") if name.startswith("spent-visiting")]
        return found, len(spent)


def test_helpers_that_are_killed_right_after_their_claim_cost_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(read_with_charges, 2, tmp_path, 3)
    check_alike(outcomes, tmp_path)
    assert outcomes[1].given[1] == 3


def die_or_read(rank: int, folder: Path, dying: int, share: str | None) -> list[str]:
    """Rank 0's worker stands still in a chunk of rank 1's when its rank ends; or rank 1 ends with it inside."""
    marks, found = Marks(folder), []
    with loader_of(rank, Samples(marks, helper_hangs)) as loader:
        for step, batch in enumerate(loader):
            found.append(digest(batch))
            if rank == dying and (rank == 1 or step == 1):
                marks.wait("helped")
                os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_a_rank_that_is_killed_with_its_worker_in_a_neighbors_chunk_leaves_the_neighbor_as_it_was(tmp_path: Path) -> None:
    first, second = run_ranks(die_or_read, 2, tmp_path, 0, "node")
    assert first.exitcode == -signal.SIGKILL
    assert second.text == ""
    assert second.given == alone(1, Samples(Marks(tmp_path)))


def close_early(rank: int, folder: Path, closing: int, ended: Any) -> list[str]:
    """One rank closes its loader after two batches; the other reads on when it has."""
    with loader_of(rank, Samples(Marks(folder))) as loader:
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(2)]
        if rank == closing:
            loader.close()
            ended.wait(30)
            return found
        ended.wait(30)
        return found + [digest(batch) for batch in batches] + [digest(batch) for batch in loader]


@pytest.mark.parametrize("closing", [0, 1])
def test_a_rank_that_closes_its_loader_is_none_of_its_neighbors_affair(tmp_path: Path, closing: int) -> None:
    outcomes = run_ranks(close_early, 2, tmp_path, closing, _fork.Barrier(2))
    assert [outcome.text for outcome in outcomes] == ["", ""]
    assert outcomes[1 - closing].given == alone(1 - closing, Samples(Marks(tmp_path)), 2)


def read_deadly(rank: int, folder: Path) -> list[str]:
    with loader_of(rank, Samples(Marks(folder), deadly)) as loader:
        found = digests_or_deaths(iter(loader), NUM_STEPS, digest)
        read_until(Marks(folder), "helped", loader)
    return found


def test_a_sample_that_kills_its_workers_is_its_own_ranks_error_alone(tmp_path: Path) -> None:
    first, second = run_ranks(read_deadly, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == alone(0, Samples(Marks(tmp_path)))
    (step,) = [step for step, found in enumerate(second.given) if len(found) != 64]
    assert f"sample {DEADLY} of epoch 0 (row 1 of batch {step}) ended its worker twice" in second.given.pop(step)
    expected = alone(1, Samples(Marks(tmp_path)))
    del expected[step]
    assert second.given == expected


def read_late(rank: int, folder: Path) -> Any:
    found, told = [], []
    with loader_of(rank, Samples(Marks(folder), helper_hangs), sample_timeout_s=2) as loader:
        batches = iter(loader)
        for _ in range(NUM_STEPS):
            try:
                found.append(digest(next(batches)))
            except SampleTimeout as error:
                told.append(str(error))
                Marks(folder).set("told")
        read_until(Marks(folder), "told", loader)
    return found, told


@pytest.mark.slow(reason="a sample's time limit of 2 s runs out")
def test_a_helper_that_is_late_over_a_sample_is_ended_by_the_rank_whose_sample_it_is(tmp_path: Path) -> None:
    first, second = run_ranks(read_late, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == (alone(0, Samples(Marks(tmp_path))), [])
    found, (told,) = second.given
    assert len(found) == NUM_STEPS - 1
    assert "took longer than sample_timeout_s=2" in told
    assert "in helper_hangs" in told


class Growing(Samples):
    """Rank 1's batches take more room from step to step; rank 0's never wait for a trainer to grant it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "text": "word " * (index**2 if owner_of(index) == 1 else 1)}


def owed_to_others(marks: Marks, index: int, is_helper: bool) -> None:
    """In the first batches rank 1's worker waits for a helper, then until rank 0 has read all of its own."""
    if index < NUM_SAMPLES // 2:
        own_wait_for_a_helper(marks, index, is_helper)
    elif is_helper:
        marks.set("helped late")
    else:
        marks.wait("all is read")


def read_while_it_stands(rank: int, folder: Path) -> list[str]:
    """Rank 1 takes nothing from its ring, and grants nothing in it, until rank 0 has read everything."""
    marks = Marks(folder)
    with loader_of(rank, Growing(marks, owed_to_others), prefetch_factor=4) as loader:
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


def test_a_helper_never_waits_for_the_trainer_whose_batch_it_fills(tmp_path: Path) -> None:
    first, second = run_ranks(read_while_it_stands, 2, tmp_path)
    assert (first.text, second.text) == ("", "")
    assert first.given == alone(0, Samples(Marks(tmp_path)))
    assert second.given == alone(1, Samples(Marks(tmp_path)))


def read_under_kills(rank: int, folder: Path, num_epochs: int) -> tuple[list[str], int]:
    """Kills workers of this rank at random, wherever they are."""
    chance = random.Random(rank)
    found, num_kills = [], 0
    with loader_of(rank, Samples(Marks(folder)), num_workers=2, prefetch_factor=3) as loader:
        for _ in range(num_epochs):
            for batch in loader:
                found.append(digest(batch))
                if chance.random() < 0.25:
                    pids = [worker["pid"] for worker in loader.stats()["workers"] if worker["pid"]]
                    with suppress(ProcessLookupError):  # killed before, and not yet replaced
                        os.kill(chance.choice(pids), signal.SIGKILL)
                        num_kills += 1
    return found, num_kills


@pytest.mark.slow(reason="two ranks read on while their workers are killed and replaced")
def test_kills_of_random_workers_do_not_show_in_any_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(read_under_kills, 2, tmp_path, 60)
    check_alike(outcomes, tmp_path, 60, num_workers=2)
    assert min(outcome.given[1] for outcome in outcomes) > NUM_STEPS
