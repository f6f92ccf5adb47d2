"""Samples that exceed their time limit on an actor: the error is the local one, and the actor is replaced."""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from shmload import Ray, SampleTimeout, ShmLoader
from shmload.ray.messages import Task
from shmload.ray.sample_timer import SampleTimer, failure_in
from tests.ray.cluster_kit import Cluster
from tests.ray.stuck_datasets import AtOnce, RowsAtOnce, Stuck

TASK = Task(2, 7, 3, 6, 6, np.array([9, 8, 7, 6, 5, 4], np.int64).tobytes(), False, False)


class Ring:
    """A worker's state in the ring."""

    def __init__(self, row: int, age_s: float) -> None:
        self.row, self.since_ns = row, monotonic_ns() - int(age_s * 1e9)

    def held_by(self, worker: int) -> tuple[int, int, int, int]:
        return 0, 0, 1, self.row

    def worker(self, worker: int) -> dict[str, int]:
        return {"since_ns": self.since_ns}


def looked(row: int, age_s: float) -> list[bytes]:
    words: list[bytes] = []
    sample_timer = SampleTimer(Ring(row, age_s), 1, 60.0, words.append)
    sample_timer.begin(TASK)
    assert sample_timer.look() is bool(words)
    return words


@pytest.mark.parametrize(("row", "age_s"), [(1, 0.0), (-1, 90.0)])
def test_sample_in_time_or_not_begun_is_not_late(row: int, age_s: float) -> None:
    assert looked(row, age_s) == []


def test_late_sample_is_named_by_its_position_in_the_whole_batch() -> None:
    failure = failure_in(looked(1, 90.0)[0], TASK)
    assert failure is not None
    assert (failure.kind, failure.rows) == (SampleTimeout, (4,))
    begin = (
        f"sample 5 of epoch 2 (row 4 of batch 7) took longer than sample_timeout_s=60.0: worker 1 (pid {os.getpid()}) was killed"
    )
    assert str(failure.exception()).startswith(begin)
    assert "test_lateness.py" in failure.text  # the traceback shows where it was stuck


@pytest.mark.parametrize("is_suspect", [False, True])
def test_late_samples_read_in_one_call_are_not_named_individually(is_suspect: bool) -> None:
    words: list[bytes] = []
    ring, task = Ring(-1, 0.0), TASK._replace(is_suspect=is_suspect)
    sample_timer = SampleTimer(ring, 1, 0.0, words.append)
    sample_timer.begin(task)
    ring.since_ns = monotonic_ns()
    assert sample_timer.look() is not is_suspect  # when read one by one, each sample has its own row
    assert [failure_in(word, task).rows for word in words] == [()] * (not is_suspect)  # type: ignore[union-attr]  # it is there


def test_late_sample_of_a_pickled_order_is_named_by_its_key() -> None:
    import pickle

    assert TASK._replace(order=pickle.dumps(["a", "b"]), is_pickled=True).key(1) == "b"


def test_status_of_another_task_is_ignored() -> None:
    word = looked(1, 90.0)[0]
    assert failure_in(word, TASK._replace(step=8)) is None
    assert failure_in(None, TASK) is None


@pytest.mark.slow(reason="a sample's time limit runs out on a Ray cluster, and its actor is replaced")
def test_late_sample_fails_its_batch_and_the_rest_is_delivered(cluster: Cluster) -> None:
    wanted: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 1, "sample_timeout_s": 0.5}
    with ShmLoader(Stuck(16), **wanted, backend=Ray(address=cluster.address)) as far:
        batches = iter(far)
        assert next(batches)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(SampleTimeout) as caught:
            next(batches)
        assert [batch["index"].tolist() for batch in batches] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    text = str(caught.value)
    assert text.startswith("sample 5 of epoch 0 (row 1 of batch 1) took longer than sample_timeout_s=0.5: worker 0 (pid ")
    assert "stuck_datasets.py" in text
    assert 'Raise sample_timeout_s if such samples are valid, or give on_error="skip"' in text


@pytest.mark.slow(reason="a sample's time limit runs out on a Ray cluster, or several actors end over it")
@pytest.mark.parametrize(("kind", "harm"), [(AtOnce, "waits"), (RowsAtOnce, "waits"), (AtOnce, "kills")])
def test_only_the_bad_one_of_samples_read_in_one_call_is_skipped(cluster: Cluster, kind: Any, harm: str) -> None:
    wanted: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 1, "on_error": "skip"}
    wanted |= {"sample_timeout_s": 0.5} if harm == "waits" else {}
    with ShmLoader(kind(harm), **wanted, backend=Ray(address=cluster.address)) as far:
        assert [batch["index"].tolist() for batch in far] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
        assert [bad["index"] for bad in far.stats()["bad_samples"]] == [5]
