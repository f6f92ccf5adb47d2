"""Batches that a Ray cluster decodes are the local ones: map and iterable datasets, both modes, all forms, and across a resume."""

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
from tests.ray.cluster_kit import Cluster, assert_same, generator, kept, on
from tests.ray.ray_datasets import Changing, InPlace, Rows, Texts
from tests.ray.torch_datasets import Counting, Drawing, Torn, listed, seed_worker

pytestmark = pytest.mark.slow(reason="each starts actors on a Ray cluster")
SEEDED = {"batch_size": 8, "shuffle": True, "seed": 3, "num_workers": 2}


def test_two_loaders_read_rows_and_text_on_both_nodes_as_locally(cluster: Cluster) -> None:
    with (
        ShmLoader(Rows(), **SEEDED) as local,
        ShmLoader(Texts(), **SEEDED) as local_texts,
        ShmLoader(Rows(), **SEEDED, **on(cluster)) as far,
        ShmLoader(Texts(), **SEEDED, **on(cluster)) as far_texts,
    ):
        assert_same(kept(zip(local, local_texts, strict=True)), kept(zip(far, far_texts, strict=True)))
        assert len({node for node, _ in cluster.ask("actors")}) == 2
        assert_same(kept(local), kept(far))  # the next epoch


def test_datasets_that_decode_in_place_or_change_their_rows_come_as_locally(cluster: Cluster) -> None:
    for dataset in (InPlace(), Changing()):
        with ShmLoader(dataset, **SEEDED) as local, ShmLoader(dataset, **SEEDED, **on(cluster)) as far:
            assert_same(kept(local), kept(far))


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
        assert_same(kept(local), kept(far))


def test_in_torch_mode_what_is_drawn_behind_a_bad_sample_is_what_a_local_worker_draws(cluster: Cluster) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "on_error": "skip", "generator": generator()}
        return ShmLoader(Torn(), 4, **options, **pool)

    with make() as local, make(**on(cluster)) as far:
        expected, got = kept(local), kept(far)
        assert len(expected) == 7  # the second has nothing left
        assert_same(expected, got)


@pytest.mark.parametrize("begins_far", [False, True])
def test_in_torch_mode_a_state_goes_on_in_the_other_kind_of_pool(cluster: Cluster, begins_far: bool) -> None:
    pools: list[dict[str, Any]] = [{}, on(cluster)]
    whole, begins, goes_on = (
        ShmLoader(Counting(), 4, num_workers=2, generator=generator(), **pools[far]) for far in (False, begins_far, not begins_far)
    )
    with whole, begins, goes_on:
        batches = iter(begins)
        begun = kept(next(batches) for _ in range(3))
        goes_on.load_state_dict(begins.state_dict())
        assert_same(kept(whole), begun + kept(goes_on))


def test_stats_and_top_say_where_the_actors_are_and_what_came_over_the_network(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, **on(cluster)) as far:
        kept(far)
        cluster.ask("wait_for_nodes", 2, 20.0)
        for _ in range(300):  # one that has started late has its share in a later pass
            kept(far)
            if len((inside := far.stats())["cluster"]["nodes"]) == 2:
                break
        command = [sys.executable, "-m", "shmload.cli", "top", "--pid", str(os.getpid()), "--once", "--json"]
        shown = json.loads(subprocess.run([*command, "--interval", "0.01"], stdout=subprocess.PIPE, check=True).stdout)
        nodes = Counter(node[:11] for node, _ in cluster.ask("actors"))
    assert [loader["cluster"]["nodes"] for loader in shown["loaders"]] == [nodes]
    told = inside["cluster"]
    assert (told["nodes"], told["num_actors"], told["num_replaced"]) == (nodes, 2, 0)
    assert told["nbytes_fetched"] >= 61 * 56  # rows, and the gaps between a batch's fields
    near, far_off = ({w["node"] for w in inside["workers"] if (w["nbytes_remote"] > 0) is far} for far in (False, True))
    assert near | far_off == set(nodes)
    assert not near & far_off
    assert len(far_off) == len(nodes) - 1  # the agent is on one of them
    assert inside["num_restarts"] == 0
