"""What an errand waits for before there are actors, without Ray."""

from __future__ import annotations

import numpy as np
import pytest

from shmload.errors import ClusterUnreachable
from shmload.worker.actors import cluster as module
from shmload.worker.actors.cluster import Cluster


def unconnected(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    return Cluster("head:6379", np.empty(0, np.uint8), [], is_seeded=True)


def test_without_an_answer_in_time_an_errand_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.0)
    cluster = unconnected(monkeypatch)
    cluster.wait(lambda: True)
    with pytest.raises(ClusterUnreachable) as caught:
        cluster.begin(0, "work")
    assert str(caught.value) == (
        "the Ray cluster at address='head:6379' did not answer within 0 s. Is its head running, and does this machine belong to it "
        "(`ray status`)?"
    )


def test_a_connection_that_nobody_waits_for_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([True, False])
    unconnected(monkeypatch).wait(lambda: next(asked))
    assert next(asked, None) is None
