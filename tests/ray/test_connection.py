"""Tasks that wait for a connection to the cluster and for actors. Without Ray."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmload import Ray
from shmload.errors import ClusterUnreachable
from shmload.ray import actor_set as module
from shmload.ray.actor_set import ActorSet
from shmload.ray.agent_config import AgentConfig
from shmload.ray.cluster_connection import unreachable_error
from shmload.ray.messages import ActorStarted
from shmload.ray.ray_pool import RayPool
from shmload.ray.version_check import version_error, versions
from shmload.storage import retry

EARLY, LATE = -1e9, 1e18  # on the clock that the test replaces


def agent_config(address: str, **options: Any) -> AgentConfig:
    given = {"is_seeded": True, "num_ahead": 1, "num_local": 0, "num_ordered": 0, "connect_timeout_s": 60.0, **options}
    return AgentConfig((), address, (), **given)


def unconnected(monkeypatch: pytest.MonkeyPatch, **options: Any) -> ActorSet:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "LOG_S", -1.0)
    return ActorSet(agent_config("head:6379", **options), np.empty(200_000_000, np.uint8), [], lambda: None, -1)


def test_task_fails_with_an_explanation_if_the_cluster_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = unconnected(monkeypatch, connect_timeout_s=0.5)
    cluster._asked_at = EARLY
    cluster.wait(lambda: True)
    with pytest.raises(ClusterUnreachable) as caught:
        cluster.begin(0, "work")
    assert str(caught.value) == (
        "the Ray cluster at address='head:6379' did not answer within 0.5 s. Is its head running, and does this machine belong "
        "to it (`ray status`)? If it is only slow, raise connect_timeout_s"
    )


@pytest.mark.parametrize(
    ("asked_at", "joined_at", "told"),
    [
        (None, None, "Ray is being imported"),
        (LATE, None, "the Ray cluster at address='head:6379' has not answered yet (connect_timeout_s=0.5)"),
        (EARLY, EARLY, "the dataset, 200 MB, is being sent to Ray's object store"),
    ],
)
def test_only_the_clusters_answer_has_a_time_limit_and_every_wait_is_logged(
    asked_at: float | None, joined_at: float | None, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = unconnected(monkeypatch, connect_timeout_s=0.5)
    cluster._asked_at, cluster._joined_at = asked_at, joined_at
    asked = iter([True, True, False])
    with caplog.at_level(logging.WARNING, "shmload"):
        cluster.wait(lambda: next(asked))
    assert next(asked, None) is None
    assert [f"{told}, for 0 s so far"] * 2 == caplog.messages


class ActorStartsDuringWait(threading.Condition):
    """A condition during whose `wait` another actor starts."""

    def __init__(self, started: dict[int, Any]) -> None:
        super().__init__()
        self._started = started

    def wait(self, timeout: float | None = None) -> bool:
        self._started[len(self._started)] = SimpleNamespace(place=("node", 1))
        return True


def test_number_of_started_actors_is_logged_until_all_have_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = unconnected(monkeypatch)
    cluster._settings = [None, None]  # type: ignore[list-item]  # only their number counts
    cluster._changed = ActorStartsDuringWait(cluster._started)
    monkeypatch.setattr(cluster, "_resources", lambda: "num_cpus=1")
    with caplog.at_level(logging.WARNING, "shmload"):
        cluster.watch(lambda: True)
    assert caplog.messages == [
        "1 of 2 Ray actors have started; the dataset, 200 MB, is on 1 node. The others wait for the dataset, or for num_cpus=1"
    ]


def test_connecting_stops_when_no_task_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([True, False])
    unconnected(monkeypatch).wait(lambda: next(asked))
    assert next(asked, None) is None


def test_different_versions_are_named_and_cpu_builds_count_as_the_same_version() -> None:
    ours = versions()
    assert version_error("node", "host", ours) is None
    text = version_error("node", "host", {**ours, "shmload": "9.9", "torch": ""}) or ""
    assert (
        f"node node of the Ray cluster (host) has shmload 9.9 where the trainer has {ours['shmload']}, torch missing where" in text
    )


class FlakyCluster:
    """A cluster that refuses the first `num_failures` connections."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures, self.num_asked = num_failures, 0

    def join(self, address: str, timeout_s: float) -> None:
        self.num_asked += 1
        if self.num_asked <= self.num_failures:
            raise ClusterUnreachable("nothing listens there")


def test_first_agent_fails_at_once_if_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = FlakyCluster(1)
    monkeypatch.setattr(module, "join_cluster", heads.join)
    with pytest.raises(ClusterUnreachable, match="nothing listens there"):
        unconnected(monkeypatch)._join()
    assert heads.num_asked == 1


def test_cluster_that_requires_a_token_raises_an_error_that_says_so() -> None:
    refused = ConnectionError("Failed to connect to Ray cluster")
    refused.__cause__ = RuntimeError(
        "Failed to connect to GCS. Last connection error: ... ray.exceptions.AuthenticationError: RPC error"
    )
    said = str(unreachable_error("head:6379", refused))
    assert said.startswith("the Ray cluster at address='head:6379' requires Ray's token")
    assert "RAY_AUTH_MODE=token" in said


@pytest.mark.parametrize("num_failures", [3, 100])
def test_replacement_agent_retries_the_connection(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, pauses = FlakyCluster(num_failures), list[float]()
    monkeypatch.setattr(module, "join_cluster", heads.join)
    monkeypatch.setattr(retry, "_wait", pauses.append)
    cluster = unconnected(monkeypatch, is_replacement=True)
    if num_failures == 3:
        cluster._join()
        assert (heads.num_asked, len(pauses)) == (4, 3)
        return
    with pytest.raises(ClusterUnreachable, match="nothing listens there"):
        cluster._join()
    assert heads.num_asked == 1 + retry.RetryPolicy().retries


class Agent:
    """Replaces the agent's process."""

    pid = 0


def test_replacement_agent_is_marked_as_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[AgentConfig] = []

    def launch(pool: Any, config: AgentConfig, ship: Any = None) -> None:
        launched.append(config)
        pool._agent = Agent()

    monkeypatch.setattr(RayPool, "_launch", launch)
    monkeypatch.setattr(RayPool, "_reap", lambda pool, agent: None)
    nothing: Any = None
    pool = RayPool(agent_config("auto", connect_timeout_s=7.5), nothing, nothing, nothing)
    pool.start(0)
    pool.replace(0)
    assert [(config.is_replacement, config.connect_timeout_s) for config in launched] == [(False, 7.5), (True, 7.5)]


@pytest.mark.parametrize("given", [0, -1.0, "60", None])
def test_connect_timeout_s_must_be_a_positive_number(given: Any) -> None:
    with pytest.raises(ValueError, match=f"connect_timeout_s must be a positive number of seconds; got {given!r}"):
        Ray(connect_timeout_s=given)


class AnsweringActor:
    """Replaces an actor that answers at once, provided that it has received the dataset."""

    is_introduced = True

    @property
    def work(self) -> Any:
        assert self.is_introduced
        return SimpleNamespace(remote=lambda task: f"answer to {task}")


def test_task_for_an_actor_that_just_died_goes_to_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, made, here = unconnected(monkeypatch), list[Any](), ActorStarted(("node", 1), "host", versions())
    cluster._is_connected.set()
    cluster._repeats = [threading.Lock()]
    cluster._settings = [SimpleNamespace(sample_timeout_s=None)]  # type: ignore[list-item]  # all that is asked of it
    monkeypatch.setattr(cluster, "_make_actors", made.append)
    monkeypatch.setattr(cluster, "_start_actors", lambda settings: None)
    monkeypatch.setattr(cluster, "_answer", lambda actor, ref: ref)
    cluster._actors[0], cluster._started[0] = (dead := AnsweringActor()), here
    assert cluster.may_claim(0)
    cluster._replace(0, dead, "it was killed")
    between = cluster.begin(0, "work", "a task")
    successor = AnsweringActor()

    def started(worker: int) -> AnsweringActor:
        successor.is_introduced = True
        cluster._actors[worker], cluster._started[worker] = successor, here
        return successor

    monkeypatch.setattr(cluster, "_actor_for", started)
    assert cluster.result(0, between) == "answer to a task"
    assert len(made) == 1, "the starting actor must not be replaced as if it were dead"
    cluster._started.clear()
    successor.is_introduced = False
    made_only = cluster.begin(0, "work", "another")
    assert cluster.result(0, made_only) == "answer to another"
