"""A real Ray cluster of two nodes for all tests of this folder.

Ray uses the machine's own address. If that does not work, run these tests in their own network namespace:
    unshare -rn sh -c 'ip link set lo up; python -m pytest tests/ray'
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.ray.cluster_kit import Cluster, started


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "shmload[ray]"')
    with started() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, and checks afterwards that the test left no actor."""
    yield running_cluster
    assert running_cluster.ask("wait_for_none", 60.0) == []
