"""Changes of a running cluster: new nodes are used, drained nodes lose no work, and a cluster that cannot go on is one clear
error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shmload import ClusterUnreachable, ShmLoader
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, on, other_machine_command, started
from tests.ray.ray_datasets import Rows

slow = pytest.mark.slow(reason="starts actors on a Ray cluster whose nodes come and go")
SEEDED = {"batch_size": 4, "shuffle": True, "seed": 3}


def expected() -> list[Any]:
    with ShmLoader(Rows(), **SEEDED) as local:
        return copied_batches(local)


@slow
def test_actors_without_room_delay_nothing_and_start_on_a_new_node(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, num_workers=3, **on(cluster, actor_options={"num_cpus": 3})) as far:
        assert_same(expected(), copied_batches(far))
        before = cluster.ask("wait_for_nodes", 2, 60.0)
        cluster.ask("add_node")
        after = cluster.ask("wait_for_nodes", 3, 60.0)
        assert len({node for node, pid in before if pid}) == 2
        assert len({node for node, pid in after if pid}) == 3
        far.set_epoch(0)
        batches = iter(far)
        begun = copied_batches(next(batches) for _ in range(3))
        drained = cluster.ask("drain_node")  # afterwards there are as many nodes as before
        assert_same(expected(), begun + copied_batches(batches))
        assert drained not in {node for node, _ in cluster.ask("actors")}


@pytest.mark.slow(reason="starts a Ray cluster of its own, whose autoscaler starts a node")
def test_actors_that_request_cpus_make_the_autoscaler_add_a_node_and_run_there(running_cluster: Cluster) -> None:
    if not other_machine_command():
        pytest.skip("needs namespaces (unshare --mount --pid), which end all processes that Ray has started")
    with started("autoscaling_host.py") as own:
        (head,) = own.ask("nodes")
        with ShmLoader(Rows(), **SEEDED, num_workers=2, **on(own)) as far:
            assert_same(expected(), copied_batches(far))
            came = set(own.ask("nodes")) - {head}
            assert len(came) == 1
            assert set(own.ask("actors")) == came


@slow
@pytest.mark.parametrize("seed", [None, 3])
def test_error_for_actors_without_room_in_time_names_the_resources_they_request(cluster: Cluster, seed: int | None) -> None:
    asked = {"resources": {"nowhere": 1}}
    with (
        ShmLoader(Rows(), 4, seed=seed, num_workers=1, **on(cluster, ship_timeout_s=0.5, actor_options=asked)) as far,
        pytest.raises(ClusterUnreachable) as caught,
    ):
        next(iter(far))
    assert "no Ray actor could start within ship_timeout_s=0.5: 0 of 1 Ray actors have started" in str(caught.value)
    assert "num_cpus=1, resources={'nowhere': 1}" in str(caught.value)


@slow
def test_node_with_different_versions_is_reported_before_the_first_batch(cluster: Cluster, tmp_path: Path) -> None:
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
def test_killed_head_loses_no_batch_or_raises_one_error(running_cluster: Cluster) -> None:
    with started() as own, ShmLoader(Rows(), **SEEDED, num_workers=2, **on(own, connect_timeout_s=2.0)) as far:
        batches, got = iter(far), []
        got += copied_batches(next(batches) for _ in range(2))
        own.ask("kill_head")
        try:
            got += copied_batches(batches)
        except ClusterUnreachable as error:
            assert own.address in str(error)  # noqa: PT017  # both outcomes are right: it is a race
        assert_same(expected()[: len(got)], got)
