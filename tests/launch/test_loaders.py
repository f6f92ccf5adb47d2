"""Loaders in ranks: their place in the world, their workers' processors."""

from __future__ import annotations

import ast
import multiprocessing
import os
from pathlib import Path

import pytest

import shmload
import shmload.loader  # forked ranks have it, and torch, already
from shmload import RankFailed
from tests.launch import rank_loaders
from tests.launch.launch_kit import all_end


@pytest.mark.slow(reason="ranks start workers, by spawn, too, one of which is killed and replaced")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_keep_to_their_ranks_processors(context: str, tmp_path: Path) -> None:
    """Those that take another's place do, too."""
    shmload.spawn(rank_loaders.look_around, (str(tmp_path), context), 2, start_method="fork")
    found = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert len(list(tmp_path.glob("token *"))) == 1, "one worker was killed"
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
def test_what_a_rank_that_is_ended_has_in_shared_memory_goes_with_its_workers(tmp_path: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2)
    with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) raised ValueError: broken"):
        shmload.spawn(rank_loaders.read_on, (barrier, str(tmp_path)), 2, start_method="fork")
    for rank in range(2):
        below = ast.literal_eval((tmp_path / f"below {rank}").read_text())
        assert len(below) >= 2, "a worker, and the shell that removes the names"
        assert all_end(below)
