"""Actors run on the nodes on which they were placed."""

from __future__ import annotations

from collections import Counter

import pytest

from shmload import Ray, ShmLoader
from tests.ray.cluster_kit import Cluster
from tests.ray.ray_datasets import Rows


@pytest.mark.slow(reason="starts four actors on a Ray cluster")
def test_four_actors_are_placed_two_on_each_of_two_nodes(cluster: Cluster) -> None:
    with ShmLoader(Rows(), 4, seed=1, num_workers=4, backend=Ray(address=cluster.address)) as far:
        next(iter(far))
        assert sorted(Counter(node for node, _ in cluster.ask("actors")).values()) == [2, 2]
