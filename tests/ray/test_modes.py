"""Batches decoded by a Ray cluster equal local ones: map and iterable datasets, both modes, all layouts, and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from shmload import ShmLoader
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, generator, on
from tests.ray.ray_datasets import Changing, InPlace, Rows, Texts
from tests.ray.torch_datasets import Counting, Drawing, FailingAfterDraw, listed, seed_worker

pytestmark = pytest.mark.slow(reason="each starts actors on a Ray cluster")
SEEDED = {"batch_size": 8, "shuffle": True, "seed": 3, "num_workers": 2}


def test_two_loaders_on_both_nodes_deliver_the_local_rows_and_text(cluster: Cluster) -> None:
    with (
        ShmLoader(Rows(), **SEEDED) as local,
        ShmLoader(Texts(), **SEEDED) as local_texts,
        ShmLoader(Rows(), **SEEDED, **on(cluster)) as far,
        ShmLoader(Texts(), **SEEDED, **on(cluster)) as far_texts,
    ):
        assert_same(copied_batches(zip(local, local_texts, strict=True)), copied_batches(zip(far, far_texts, strict=True)))
        assert len({node for node, _ in cluster.ask("actors")}) == 2
        assert_same(copied_batches(local), copied_batches(far))  # the next epoch


def test_datasets_that_decode_in_place_or_change_dtype_equal_the_local_ones(cluster: Cluster) -> None:
    for dataset in (InPlace(), Changing()):
        with ShmLoader(dataset, **SEEDED) as local, ShmLoader(dataset, **SEEDED, **on(cluster)) as far:
            assert_same(copied_batches(local), copied_batches(far))


@pytest.mark.parametrize(
    ("dataset", "keywords"),
    [
        (Drawing(), {"shuffle": True}),
        (Drawing(), {"sampler": DistributedSampler(range(31), 2, 1, seed=4), "worker_init_fn": seed_worker, "collate_fn": listed}),
        (Counting(), {}),
    ],
    ids=["map", "sampler", "iterable"],
)
def test_torch_mode_keeps_torchs_order_and_each_workers_streams(cluster: Cluster, dataset: Any, keywords: dict[str, Any]) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        return ShmLoader(dataset, 4, num_workers=2, generator=generator(), **keywords, **pool)

    with make() as local, make(**on(cluster)) as far:
        assert_same(copied_batches(local), copied_batches(far))


def test_in_torch_mode_draws_after_a_bad_sample_equal_a_local_workers(cluster: Cluster) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "on_error": "skip", "generator": generator()}
        return ShmLoader(FailingAfterDraw(), 4, **options, **pool)

    with make() as local, make(**on(cluster)) as far:
        expected, got = copied_batches(local), copied_batches(far)
        assert len(expected) == 7  # the second worker has no sample left
        assert_same(expected, got)


@pytest.mark.parametrize("begins_far", [False, True])
def test_torch_mode_state_resumes_in_the_other_kind_of_pool(cluster: Cluster, begins_far: bool) -> None:
    pools: list[dict[str, Any]] = [{}, on(cluster)]
    whole, begins, goes_on = (
        ShmLoader(Counting(), 4, num_workers=2, generator=generator(), **pools[far]) for far in (False, begins_far, not begins_far)
    )
    with whole, begins, goes_on:
        batches = iter(begins)
        begun = copied_batches(next(batches) for _ in range(3))
        goes_on.load_state_dict(begins.state_dict())
        assert_same(copied_batches(whole), begun + copied_batches(goes_on))


def test_stats_and_top_show_the_actors_nodes_and_the_bytes_received(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, **on(cluster)) as far:
        copied_batches(far)
        cluster.ask("wait_for_nodes", 2, 60.0)
        for _ in range(5000):  # an actor that started late takes part in a later pass
            copied_batches(far)
            if len((inside := far.stats())["cluster"]["nodes"]) == 2:
                break
        command = [sys.executable, "-m", "shmload", "top", "--pid", str(os.getpid()), "--once", "--json"]
        shown = json.loads(subprocess.run([*command, "--interval", "0.01"], stdout=subprocess.PIPE, check=True).stdout)
        nodes = Counter(node[:11] for node, _ in cluster.ask("actors"))
    assert [loader["cluster"]["nodes"] for loader in shown["loaders"]] == [nodes]
    told = inside["cluster"]
    assert (told["nodes"], told["num_actors"], told["num_replaced"]) == (nodes, 2, 0)
    assert told["nbytes_fetched"] >= 61 * 56  # rows and the gaps between a batch's fields
    near, far_off = ({w["node"] for w in inside["workers"] if (w["nbytes_remote"] > 0) is far} for far in (False, True))
    assert near | far_off == set(nodes)
    assert not near & far_off
    assert len(far_off) == len(nodes) - 1  # the agent is on one of the nodes
    assert inside["num_restarts"] == 0
