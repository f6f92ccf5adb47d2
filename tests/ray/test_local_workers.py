"""Processes of this machine and actors in one loader: batches equal those of either kind alone, and the death of one loses
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shmload import SampleTimeout, ShmLoader, WorkerDied
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, generator, kill_worker, on
from tests.ray.ray_datasets import Rows, Texts
from tests.ray.torch_datasets import Counting, Drawing, seed_worker
from tests.ray.uneven_datasets import HERE, DyingThere, StuckHere

pytestmark = pytest.mark.slow(reason="each starts actors on a Ray cluster, and processes beside them")
SEEDED: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
MOST_EPOCHS = 2000  # far more than are read until an actor has started


def both(cluster: Cluster, num_local_workers: int) -> dict[str, Any]:
    return {"num_workers": 1, **on(cluster, num_local_workers=num_local_workers)}


def read_until(is_enough: Callable[[dict[str, Any]], bool], local: ShmLoader[Any], joint: ShmLoader[Any]) -> None:
    """Reads epochs of both loaders, which must be equal, until the stats of `joint` satisfy `is_enough`."""
    for _ in range(MOST_EPOCHS):
        assert_same(copied_batches(local), copied_batches(joint))
        if is_enough(joint.stats()):
            return
    pytest.fail(f"not within {MOST_EPOCHS} epochs: {joint.stats()}")


def all_have_read(told: dict[str, Any]) -> bool:
    return all(worker["num_samples"] for worker in told["workers"])


def test_in_seed_mode_both_kinds_take_part_and_batches_equal_the_local_ones(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, num_workers=1) as local, ShmLoader(Rows(), **SEEDED, **both(cluster, 2)) as joint:
        read_until(all_have_read, local, joint)
        told = joint.stats()
        assert (told["cluster"]["num_actors"], told["num_restarts"]) == (1, 0)
        assert [worker["node"] is None for worker in told["workers"]] == [False, True, True]
        assert len({worker["pid"] for worker in told["workers"]} - {os.getpid()}) == 3
        begun = copied_batches(islice(iter(joint), 3))
        local.load_state_dict(joint.state_dict())
        rest = copied_batches(local)
        joint.set_epoch(local.state_dict()["epoch"] - 1)
        assert_same(copied_batches(joint), begun + rest)


def test_in_torch_mode_both_kinds_alternate_and_the_death_of_a_process_fails_the_loader(cluster: Cluster) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        return ShmLoader(Drawing(61), 4, shuffle=True, generator=generator(), worker_init_fn=seed_worker, **pool)

    with make(num_workers=2) as whole, make(num_workers=2) as local, make(**both(cluster, 1)) as joint:
        batches = iter(joint)
        begun = copied_batches(islice(batches, 5))
        assert [(set(ids.tolist()), set(counts.tolist())) for *_, ids, counts, _ in begun] == [
            ({step % 2}, {2}) for step in range(5)
        ]
        local.load_state_dict(joint.state_dict())
        kill_worker(joint, 1)
        with pytest.raises(WorkerDied, match="exited unexpectedly"):
            list(batches)
        assert_same(copied_batches(whole), begun + copied_batches(local))


def test_iterable_dataset_resumes_from_a_local_state(cluster: Cluster) -> None:
    def make(**pool: Any) -> ShmLoader[Any]:
        return ShmLoader(Counting(), 4, generator=generator(), **pool)

    with make(num_workers=2) as whole, make(num_workers=2) as local, make(**both(cluster, 1)) as joint:
        begun = copied_batches(islice(iter(local), 3))
        joint.load_state_dict(local.state_dict())
        assert_same(copied_batches(whole), begun + copied_batches(joint))


def test_killed_process_actor_and_agent_are_replaced_and_no_sample_is_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HERE, "yes")
    dataset = DyingThere(str(tmp_path))
    pool = {**both(cluster, 1), "multiprocessing_context": "spawn"}  # the job is sent in two ways
    with ShmLoader(Texts(), **SEEDED, num_workers=1) as local, ShmLoader(dataset, **SEEDED, **pool) as joint:
        begun = copied_batches(islice(batches := iter(joint), 2))
        kill_worker(joint, 1)
        assert_same(copied_batches(local), begun + copied_batches(batches))
        read_until(lambda told: all_have_read(told) and (tmp_path / "dead").exists(), local, joint)
        assert joint.stats()["num_restarts"] == 1
        kill_worker(joint, 0)
        read_until(lambda told: told["num_restarts"] == 2, local, joint)


def test_late_sample_of_a_process_fails_its_batch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HERE, "yes")
    wanted = {**SEEDED, "shuffle": False, "sample_timeout_s": 0.3}
    with ShmLoader(StuckHere(16), **wanted, **both(cluster, 1)) as joint:
        batches = iter(joint)
        assert next(batches)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(SampleTimeout, match=r"row 1 of batch 1\) took longer than sample_timeout_s=0.3: worker 1 "):
            next(batches)  # no actor has started this early
        assert [batch["index"].tolist() for batch in batches] == [[8, 9, 10, 11], [12, 13, 14, 15]]
