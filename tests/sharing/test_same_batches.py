"""Ranks that share a ring read the same as each would alone, and every sample is decoded once."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sharing.sharing_kit import BATCH, NUM_SAMPLES, digest, digests, digests_or_deaths, loader_of, run_ranks

NUM_STEPS = NUM_SAMPLES // BATCH


def two_epochs(rank: int, log: Path, share: str | None, others: dict[str, Any]) -> list[str]:
    with loader_of(log, share=share, **others) as loader:
        return [found for _ in range(2) for found in digests(loader)]


@pytest.mark.slow(reason="starts up to three ranks with workers, by spawn, too")
@pytest.mark.parametrize(
    ("num_ranks", "others"),
    [
        (2, {}),
        (3, {"num_workers": 2, "prefetch_factor": 1}),
        (2, {"ragged": {"noise": "list"}}),
        pytest.param(2, {"multiprocessing_context": "spawn"}, id="spawn"),
    ],
)
def test_all_ranks_read_the_same_as_alone_and_each_sample_is_decoded_once(
    tmp_path: Path, num_ranks: int, others: dict[str, Any]
) -> None:
    alone = two_epochs(0, tmp_path / "alone", None, {})
    outcomes = run_ranks(two_epochs, num_ranks, tmp_path / "shared", "node", others)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    assert all(outcome.given == alone for outcome in outcomes)
    read = Counter((tmp_path / "shared").read_text().splitlines())
    assert {f"{epoch} {index}": 1 for epoch in (0, 1) for index in range(NUM_SAMPLES)} == {
        line: count for line, count in read.items() if int(line.split()[0]) < 2
    }


def write_into(rank: int, log: Path, barrier: Any) -> list[list[int]]:
    """Writes into each batch on rank 0 before rank 1 reads it; slots are reused many times."""
    found = []
    with loader_of(log) as loader:
        for _ in range(3):
            for batch in loader:
                if rank == 0:
                    found.append(batch["x"][:, 0, 0].tolist())
                    batch["x"].zero_()
                barrier.wait(30)
                if rank == 1:
                    found.append(batch["x"][:, 0, 0].tolist())
                    batch["x"].fill_(-1)
                del batch
    return found


def test_writes_into_a_batch_are_private_to_a_rank(tmp_path: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    first, second = run_ranks(write_into, 2, tmp_path / "log", barrier)
    assert (first.text, second.text) == ("", "")
    assert first.given == second.given
    assert sorted(index for batch in first.given[:NUM_STEPS] for index in batch) == list(range(NUM_SAMPLES))


def break_and_resume(rank: int, log: Path, share: str | None) -> tuple[list[str], list[Any]]:
    found, states = [], []
    with loader_of(log, share=share) as loader:
        for step, batch in enumerate(loader):
            found.append(digest(batch))
            if step == 2:
                states.append(loader.state_dict())
                break
        found += digests(loader)  # epoch 1 as a whole
        loader.set_epoch(5)
        batches = iter(loader)
        found += [digest(next(batches)), digest(next(batches))]
        loader.load_state_dict(states[0])
        del batches
        found += digests(loader)
        states.append(loader.state_dict())
    with loader_of(log, share=share) as loader:  # a second ring of the same run
        loader.load_state_dict(states[0])
        found += digests(loader)
    return found, states


def test_breaks_epochs_and_resumes_are_the_same_on_all_ranks_and_alone(tmp_path: Path) -> None:
    outcomes = run_ranks(break_and_resume, 2, tmp_path / "shared", "node")
    assert [outcome.text for outcome in outcomes] == ["", ""]
    alone = break_and_resume(0, tmp_path / "alone", None)
    assert [outcome.given for outcome in outcomes] == [alone, alone]


def keep_all(rank: int, log: Path) -> tuple[list[str], list[str]]:
    with loader_of(log) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = list(loader)
        return digests(kept), [str(warning.message) for warning in caught]


def test_ranks_that_keep_all_batches_do_not_block_others(tmp_path: Path) -> None:
    first, second = run_ranks(keep_all, 2, tmp_path / "log")
    assert (first.text, second.text) == ("", "")
    assert first.given[0] == second.given[0]
    for _, told in (first.given, second.given):
        assert len(told) == 1
        assert "batches are still in use, and the workers need the other slots that a rank may have of a shared ring" in told[0]


def read_bad(rank: int, log: Path) -> list[str]:
    found = []
    with loader_of(log, bad=5) as loader:
        batches = iter(loader)
        for _ in range(NUM_STEPS):
            try:
                found.append(digest(next(batches)))
            except KeyError as error:
                found.append(str(error.args[0]).splitlines()[-1])
    return found


def test_unreadable_sample_is_the_same_error_in_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(read_bad, 2, tmp_path / "log")
    assert (first.text, second.text) == ("", "")
    assert first.given == second.given
    assert [found for found in first.given if len(found) != 64] == ["KeyError: 'no sample 5'"]


def read_deadly(rank: int, log: Path) -> list[str]:
    with loader_of(log, bad=5, kills=True) as loader:
        return digests_or_deaths(iter(loader), NUM_STEPS, digest)


def test_sample_that_kills_its_workers_is_an_error_in_all_ranks_and_the_rest_is_read(tmp_path: Path) -> None:
    first, second = run_ranks(read_deadly, 2, tmp_path / "log")
    assert (first.text, second.text) == ("", "")
    (step,) = [step for step, found in enumerate(first.given) if len(found) != 64]
    assert "two workers have died while reading one sample of step " in second.given.pop(step)
    assert "5" in first.given.pop(step)
    assert first.given == second.given


def in_groups(rank: int, log: Path) -> tuple[list[int], int | None]:
    """Reads as one of four ranks, of which two read each half of every global batch."""
    with loader_of(Path(f"{log} {rank // 2}")) as loader:
        loader.rank, loader.world_size = rank // 2, 2
        found = [index for batch in loader for index in batch["x"][:, 0, 0].tolist()]
        return found, loader.stats().get("shared_by")


@pytest.mark.slow(reason="starts four ranks with workers")
def test_each_group_of_a_node_has_its_own_ring(tmp_path: Path) -> None:
    outcomes = run_ranks(in_groups, 4, tmp_path / "log")
    assert [outcome.text for outcome in outcomes] == [""] * 4
    (a, _), (b, _), (c, _), (d, _) = given = [outcome.given for outcome in outcomes]
    assert (a, c) == (b, d)
    assert sorted(a + c) == list(range(NUM_SAMPLES))
    assert {shared_by for _, shared_by in given} == {2}
