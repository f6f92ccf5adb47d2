"""Which ranks share with each other, and which combinations are refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

import shmload.sharing.rank_group
from shmload import BlockShuffle, LengthBuckets, ShmLoader
from tests.sharing.sharing_kit import BATCH, NUM_SAMPLES, digests, loader_of, run_ranks


def read(rank: int, log: Path, others: dict[int, dict[str, Any]]) -> list[str]:
    with loader_of(log, **others.get(rank, {})) as loader:
        loader.rank, loader.world_size = others.get(rank, {}).get("place", (0, 1))
        return digests(loader)


def test_different_loaders_are_refused_in_both_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(read, 2, tmp_path / "log", {1: {"seed": 4, "num_workers": 2}})
    assert {outcome.error for outcome in outcomes} == {"ValueError"}
    assert "read the same part of the data with loaders that differ (seed: 3 and 4; num_workers: 1 and 2)" in outcomes[0].text
    assert outcomes[0].text == outcomes[1].text


def in_blocks_of(size: int) -> dict[str, Any]:
    return {"shuffle": None, "sampler": BlockShuffle(NUM_SAMPLES, block_size=size)}


def in_buckets_of(length: int) -> dict[str, Any]:
    buckets = LengthBuckets(np.arange(NUM_SAMPLES) % length + 1, batch_size=BATCH)
    return {"shuffle": None, "batch_size": 1, "batch_sampler": buckets}


@pytest.mark.parametrize("order", [in_blocks_of, in_buckets_of])
def test_orders_with_different_parameters_are_refused(order: Any, tmp_path: Path) -> None:
    """Otherwise a rank that reads another's ring would return batches of other samples."""
    outcomes = run_ranks(read, 2, tmp_path / "log", {0: order(2), 1: order(3)})
    assert {outcome.error for outcome in outcomes} == {"ValueError"}
    assert "loaders that differ (sampler: " in outcomes[0].text


def read_apart(rank: int, log: Path) -> list[str]:
    with loader_of(log, prefetch_factor=2 + rank) as loader:
        loader.rank, loader.world_size = rank, 2
        return digests(loader)


def test_different_loaders_of_different_ranks_are_refused_too(tmp_path: Path) -> None:
    outcomes = run_ranks(read_apart, 2, tmp_path / "log")
    assert [outcome.error for outcome in outcomes] == ["ValueError", "ValueError"]
    assert "read parts of the same data with loaders that differ (prefetch_factor: 2 and 3)" in outcomes[0].text
    assert outcomes[0].text == outcomes[1].text


def test_ranks_with_different_layouts_of_ragged_fields_are_refused(tmp_path: Path) -> None:
    """Helpers fill a neighbor's batch by their own plan, so plans must be the same."""
    outcomes = run_ranks(read, 2, tmp_path / "log", {1: {"ragged": "pad"}})
    assert [outcome.error for outcome in outcomes] == ["ValueError", "ValueError"]
    assert "loaders that differ (ragged: " in outcomes[0].text


def test_only_rank_of_a_node_reads_as_without_sharing(tmp_path: Path) -> None:
    (outcome,) = run_ranks(read, 1, tmp_path / "log", {})
    with loader_of(tmp_path / "alone", share=None) as loader:
        assert outcome.given == digests(loader)


def read_and_report(local_rank: int, folder: str) -> None:
    with loader_of(Path(folder, "log")) as loader:
        Path(folder, str(local_rank)).write_text(repr((digests(loader), loader.stats()["shared_by"])))


@pytest.mark.slow(reason="the launcher starts two ranks, which start workers")
def test_ranks_of_a_launcher_find_each_other(tmp_path: Path) -> None:
    shmload.spawn(read_and_report, (str(tmp_path),), 2, start_method="fork")
    with loader_of(tmp_path / "alone", share=None) as loader:
        expected = repr((digests(loader), 2))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected, expected]


def read_soon(rank: int, log: Path) -> list[str]:
    shmload.sharing.rank_group.MEET_S = 0.05
    return read(rank, log, {})


def test_error_names_a_missing_rank(tmp_path: Path) -> None:
    (outcome,) = run_ranks(read_soon, 1, tmp_path / "log", num_told=2)
    assert outcome.error == "RankLeft"
    assert outcome.text == (
        'share="node": 1 of the node\'s 2 ranks have begun to read within 0.05 seconds; local ranks [1] have not. All ranks of a node must '
        "create this loader and iterate over it"
    )


@pytest.mark.parametrize("told", [{}, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}], ids=["nothing", "a rank beyond the last"])
def test_error_without_a_launcher_says_what_is_needed(
    told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if name in told:
            monkeypatch.setenv(name, told[name])
    with (
        loader_of(tmp_path / "log") as loader,
        pytest.raises(
            ValueError, match=r"start the program by shmload\.spawn, `shmload launch`, torchrun, mpirun or srun, or set them"
        ),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": "host"}, r"share must be \"node\" or None; got 'host'"),
        ({"seed": None}, r'share="node" needs a seed: in torch mode.* Give all ranks the same seed; got seed=None'),
        ({"sampler": SequentialSampler(range(8))}, r"an order that all ranks can compute.*; got sampler=SequentialSampler"),
        ({"num_workers": 0}, r"num_workers above 0.*; got num_workers=0"),
        ({"num_workers": "auto"}, r"got num_workers='auto'"),
        ({"prefetch_factor": "auto"}, r"prefetch_factor as a number or None; got prefetch_factor='auto'"),
        ({"device": "cuda"}, r"batches on the host: leave device out.*; got device='cuda'"),
        ({"on_error": "skip"}, r"each rank would skip or replace bad samples by itself; got on_error='skip'"),
        ({"audit": "folder"}, r"audit a run without share; got audit='folder'"),
    ],
)
def test_unsupported_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShmLoader(torch.arange(8), **{"share": "node", "seed": 1, "num_workers": 1, **arguments})


def warnings_of(rank: int, log: Path) -> list[str]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with loader_of(log, num_workers=2) as loader:
            digests(loader)
    return [str(one.message) for one in told]


def test_rank_with_one_processor_does_not_warn_about_the_shared_pools_size(tmp_path: Path) -> None:
    outcomes = run_ranks(warnings_of, 2, tmp_path / "log")
    assert [(outcome.given, outcome.text) for outcome in outcomes] == [([], "")] * 2
