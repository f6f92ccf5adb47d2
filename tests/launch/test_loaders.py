"""Loaders in ranks: their rank and world size, and their workers' CPUs."""

from __future__ import annotations

import ast
import multiprocessing
import os
from pathlib import Path

import pytest

import shmload
import shmload.loader  # forked ranks then have it, and torch, already
from shmload import RankFailed
from tests.launch import rank_loaders
from tests.launch.launch_kit import all_end


@pytest.mark.slow(reason="ranks start workers, also by spawn; one is killed and replaced")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_stay_on_the_cpus_of_their_rank(context: str, tmp_path: Path) -> None:
    """Replacements of workers do, too."""
    shmload.spawn(rank_loaders.write_samples, (str(tmp_path), context), 2, start_method="fork")
    found = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert len(list(tmp_path.glob("token *"))) == 1, "exactly one worker is killed"
    assert sorted(found[0]["index"] + found[1]["index"]) == list(range(rank_loaders.NUM_SAMPLES))
    for rank in found:
        assert rank["workers"] == [rank["own"]]
        assert rank["threads"] == len(rank["own"].split(",")) >= rank["auto"]
    if len(os.sched_getaffinity(0)) > 1:
        assert found[0]["own"] != found[1]["own"]


@pytest.mark.slow(reason="runs one, two and three ranks, one after the other")
def test_any_number_of_ranks_reads_the_same_global_batches(tmp_path: Path) -> None:
    steps = {}
    for world in (1, 2, 3):
        shmload.spawn(rank_loaders.batches_of, (str(tmp_path), 6), world, start_method="fork")
        ranks = [ast.literal_eval((tmp_path / f"{world} {rank}").read_text()) for rank in range(world)]
        steps[world] = [sorted(index for rank in step for index in rank) for step in zip(*ranks, strict=True)]
    assert steps[1] == steps[2] == steps[3]
    assert len(steps[1]) == 4


@pytest.mark.slow(reason="ranks start workers, and all are ended")
def test_shared_memory_and_workers_of_an_ended_rank_are_gone(tmp_path: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) raised ValueError: broken"):
        shmload.spawn(rank_loaders.read_on, (barrier, str(tmp_path)), 2, start_method="fork")
    for rank in range(2):
        below = ast.literal_eval((tmp_path / f"below {rank}").read_text())
        assert len(below) >= 2, "at least a worker, and the shell that removes the names"
        assert all_end(below)
