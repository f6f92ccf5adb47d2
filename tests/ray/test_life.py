"""A cluster's life: nodes that come late are used, nodes that are drained cost nothing, and what cannot go on is one clear error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shmload import ClusterUnreachable, ShmLoader
from tests.ray.cluster_kit import Cluster, assert_same, elsewhere, kept, on, started
from tests.ray.ray_datasets import Rows

slow = pytest.mark.slow(reason="starts actors on a Ray cluster whose nodes come and go")
SEEDED = {"batch_size": 4, "shuffle": True, "seed": 3}


def expected() -> list[Any]:
    with ShmLoader(Rows(), **SEEDED) as local:
        return kept(local)


@slow
def test_actors_for_which_there_is_no_room_hold_up_nothing_and_start_on_a_node_that_comes(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, num_workers=3, **on(cluster, actor_options={"num_cpus": 3})) as far:
        assert_same(expected(), kept(far))
        before = cluster.ask("wait_for_nodes", 2, 20.0)
        cluster.ask("add_node")
        after = cluster.ask("wait_for_nodes", 3, 20.0)
        assert len({node for node, pid in before if pid}) == 2
        assert len({node for node, pid in after if pid}) == 3
        far.set_epoch(0)
        batches = iter(far)
        begun = kept(next(batches) for _ in range(3))
        drained = cluster.ask("drain_node")  # as many nodes as before
        assert_same(expected(), begun + kept(batches))
        assert drained not in {node for node, _ in cluster.ask("actors")}


@pytest.mark.slow(reason="starts a Ray cluster of its own, whose autoscaler starts a node")
def test_actors_that_ask_for_cpus_bring_a_node_and_stand_there(running_cluster: Cluster) -> None:
    if not elsewhere():
        pytest.skip("needs namespaces (unshare --mount --pid), with which all that Ray has started ends")
    with started("autoscaling_host.py") as own:
        (head,) = own.ask("nodes")
        with ShmLoader(Rows(), **SEEDED, num_workers=2, **on(own)) as far:
            assert_same(expected(), kept(far))
            came = set(own.ask("nodes")) - {head}
            assert len(came) == 1
            assert set(own.ask("actors")) == came


@slow
@pytest.mark.parametrize("seed", [None, 3])
def test_actors_that_find_no_room_in_time_are_an_error_that_says_what_they_ask_for(cluster: Cluster, seed: int | None) -> None:
    asked = {"resources": {"nowhere": 1}}
    with (
        ShmLoader(Rows(), 4, seed=seed, num_workers=1, **on(cluster, ship_timeout_s=0.5, actor_options=asked)) as far,
        pytest.raises(ClusterUnreachable) as caught,
    ):
        next(iter(far))
    assert "no Ray actor could start within ship_timeout_s=0.5: 0 of 1 Ray actors have started" in str(caught.value)
    assert "num_cpus=1, resources={'nowhere': 1}" in str(caught.value)


@slow
def test_a_node_with_other_versions_is_said_before_the_first_batch(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "torch-1.2.3.dist-info").mkdir()
    (tmp_path / "torch-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    environment = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
    with (
        ShmLoader(Rows(), **SEEDED, num_workers=1, **on(cluster, actor_options=environment)) as far,
        pytest.raises(ClusterUnreachable, match=r"of the Ray cluster \(.*\) has torch 1\.2\.3 where the trainer has"),
    ):
        next(iter(far))


@pytest.mark.slow(reason="starts a Ray cluster of its own, whose head is killed")
def test_a_head_that_is_killed_costs_no_batch_or_is_one_error(running_cluster: Cluster) -> None:
    with started() as own, ShmLoader(Rows(), **SEEDED, num_workers=2, **on(own, connect_timeout_s=2.0)) as far:
        batches, got = iter(far), []
        got += kept(next(batches) for _ in range(2))
        own.ask("kill_head")
        try:
            got += kept(batches)
        except ClusterUnreachable as error:
            assert own.address in str(error)  # noqa: PT017  # either is right: it is a matter of who is quicker
        assert_same(expected()[: len(got)], got)
