"""Waiting for a cluster that does not answer ends in a stated time, or when nobody wants the batch any more. Without Ray."""

from __future__ import annotations

import numpy as np
import pytest

from shmload import ClusterUnreachable
from shmload.worker.actors import cluster
from shmload.worker.actors.cluster import Cluster, Unwanted


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(cluster, "LOOK_S", 0.0)
    return Cluster("head:6379", np.empty(0, np.uint8), [], is_seeded=True)


def test_a_head_that_does_not_answer_is_an_error_in_time(silent: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.0)
    with pytest.raises(ClusterUnreachable) as caught:
        silent.do(0, "work", (), lambda: True)
    assert str(caught.value) == (
        "the Ray cluster at address='head:6379' did not answer within 0 s. Is its head running, and does this machine belong to it "
        "(`ray status`)?"
    )


def test_nobody_waits_for_a_batch_that_is_not_wanted(silent: Cluster) -> None:
    with pytest.raises(Unwanted):
        silent.do(0, "work", (), lambda: False)
