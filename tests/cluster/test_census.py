"""What num_workers="auto" means on a cluster."""

from __future__ import annotations

import pytest

from shmload import ClusterUnreachable, ShmLoader
from shmload.ray.cluster import Node, cpus_elsewhere
from tests.cluster.cluster_kit import Cluster
from tests.cluster.ray_datasets import Rows

HERE = Node("here", 8, True)


def test_the_other_nodes_cpus_count() -> None:
    assert cpus_elsewhere([HERE, Node("a", 4, False), Node("b", 16, True)], "here") == 20


def test_alone_this_nodes_cpus_count_and_one_actor_is_the_least() -> None:
    assert cpus_elsewhere([HERE], "here") == 8
    assert cpus_elsewhere([Node("here", 0, False)], "here") == 1


@pytest.mark.slow
def test_a_loader_asks_the_cluster(cluster: Cluster) -> None:
    with ShmLoader(Rows(), num_workers="auto", num_local_workers=2, backend="ray", address=cluster.address) as loader:
        assert loader.num_workers == 1  # of two nodes with a CPU each
        assert loader._config().total_workers == 3
        assert "num_workers=1, num_local_workers=2" in repr(loader)


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_said_at_once(running_cluster: Cluster) -> None:
    with pytest.raises(ClusterUnreachable, match=r"there is no Ray cluster at address='127.0.0.1:1' .*ray start --head"):
        ShmLoader(Rows(), num_workers="auto", backend="ray", address="127.0.0.1:1")
