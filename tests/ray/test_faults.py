"""Actors, nodes, agents and trainers are killed: no sample is lost or repeated, and nothing remains in the cluster."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ClusterUnreachable, Ray, ShmLoader, WorkerDied
from shmload.formats import ArrayDataset
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, kill_worker, on
from tests.ray.ray_datasets import BlockedByPipe, Deadly, Failing, ReportsMappings, Rows
from tests.ray.stuck_datasets import block_on_other_nodes

slow = pytest.mark.slow(reason="starts actors on a Ray cluster, and some are killed")
SLOW_S = float(os.environ.get("SHMLOAD_SLOW_BATCH_S", "0.5"))  # set it higher by hand to exceed Ray's own timeouts
SEEDED = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 2}


def expected() -> list[Any]:
    with ShmLoader(Rows(), **SEEDED) as local:
        return copied_batches(local)


@slow
def test_actors_killed_by_a_sample_are_replaced_and_no_sample_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    with ShmLoader(Deadly(str(tmp_path), {5: 1, 40: 2}), **SEEDED, **on(cluster)) as far:
        assert_same(expected(), copied_batches(far))
    assert len(list(tmp_path.iterdir())) == 3


@slow
def test_sample_that_kills_every_actor_is_an_error_and_the_rest_is_delivered(cluster: Cluster, tmp_path: Path) -> None:
    wanted = {**SEEDED, "shuffle": False, "num_workers": 1}
    with ShmLoader(Deadly(str(tmp_path), {5: 99}, 12), **wanted, **on(cluster)) as far:
        batches = iter(far)
        assert next(batches)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(WorkerDied, match=r"^sample 5 of epoch 0 \(row 1 of batch 1\) ended its actor .*: 3 Ray actors"):
            next(batches)
        assert next(batches)["index"].tolist() == [8, 9, 10, 11]


@slow
def test_in_torch_mode_the_death_of_an_actor_fails_the_loader(cluster: Cluster, tmp_path: Path) -> None:
    with ShmLoader(Deadly(str(tmp_path), {5: 1}), 4, num_workers=1, **on(cluster)) as far:
        batches = iter(far)
        for _ in range(2):  # twice: also after a batch was under way while its actor began the deadly sample
            with pytest.raises(WorkerDied, match="the Ray actor of DataLoader worker 0 has died, and with it"):
                list(islice(batches, 2))


@pytest.mark.slow(reason="a node of a Ray cluster starts, and another is killed")
def test_new_node_is_used_by_the_next_loader_and_a_killed_node_loses_no_sample(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, **on(cluster)) as far:
        batches = iter(far)
        begun = copied_batches(next(batches) for _ in range(3))
        before = cluster.ask("wait_for_nodes", 2, 60.0)
        assert len({node for node, _ in before}) == 2
        cluster.ask("add_node")
        with ShmLoader(Rows(), **{**SEEDED, "num_workers": 3}, **on(cluster)) as wider:
            begun_wider = copied_batches(next(iter(wider)) for _ in range(1))
            after = cluster.ask("wait_for_nodes", 3, 60.0)
            assert set(before) < set(after)  # actors that run stay on their nodes
            assert len({node for node, _ in after}) == 3
            dead = cluster.ask("kill_node")
            assert dead in {node for node, _ in before}
            whole = expected()
            assert_same(whole, begun + copied_batches(batches))
            wider.load_state_dict(wider.state_dict())
            assert_same(whole, begun_wider + copied_batches(wider))


@pytest.mark.slow(reason="a Ray cluster, and a batch that takes half a second")
def test_slow_batch_is_delivered(cluster: Cluster, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    wanted = {**SEEDED, "shuffle": False, "num_workers": 1}
    opened: list[float] = []

    def open_gate() -> None:
        pause = threading.Event()
        while (waits := far.stats()["waits_for"]) is None or waits["for_s"] < SLOW_S:
            pause.wait(0.05)
        opened.append(waits["for_s"])
        (tmp_path / "gate").write_bytes(b"\n")

    with ShmLoader(BlockedByPipe(str(tmp_path / "gate"), 16), **wanted, **on(cluster)) as far:
        batches = iter(far)
        begun = copied_batches(next(batches) for _ in range(1))
        opener = threading.Thread(target=open_gate, daemon=True)
        opener.start()
        assert [int(batch["index"][0]) for batch in begun + copied_batches(batches)] == [0, 4, 8, 12]
        opener.join()
        assert opened[0] >= SLOW_S


@pytest.mark.slow(reason="starts actors on a Ray cluster, and waits until they have gone")
def test_deleted_loader_leaves_no_actor_and_no_object(cluster: Cluster) -> None:
    dataset = ArrayDataset(np.zeros((64, 4096), np.float32))
    nbytes = 64 * 4096 * 4
    far = ShmLoader(dataset, **SEEDED, **on(cluster))
    assert len(copied_batches(far)) == 16
    actors, stored = cluster.ask("actors"), cluster.ask("stored_nbytes")
    del far
    gc.collect()
    assert len(actors) == 2
    assert stored >= nbytes
    assert cluster.ask("wait_for_none", 60.0) == []
    assert cluster.ask("wait_for_stored", nbytes, 60.0) < nbytes


@pytest.mark.slow(reason="starts actors on a Ray cluster")
def test_actors_of_a_node_share_a_large_array_and_have_private_tensors(cluster: Cluster) -> None:
    dataset = ReportsMappings(64, tensor=torch.zeros(1 << 18))
    places: dict[tuple[int, ...], set[int]] = {}
    with ShmLoader(dataset, **{**SEEDED, "num_workers": 4}, persistent_workers=True, **on(cluster)) as far:
        for _ in range(5000):  # until actors on all nodes have taken part
            for batch in copied_batches(far):
                assert batch["kinds"].tolist() == [[False, True]] * 4
                assert (batch["count"] >= 1).all()
                rows = zip(batch["index"].tolist(), batch["pid"].tolist(), batch["places"].tolist(), strict=True)
                for index, pid, (array, tensor) in rows:
                    places.setdefault((array[0], array[1] - 8 * index), set()).add(pid)
                    assert tensor[0] != array[0] != 0
            if sum(map(len, places.values())) > 2:
                break
    assert len(places) <= 2 < sum(map(len, places.values()))


@pytest.mark.slow(reason="starts actors on a Ray cluster, one of which does not come to its end, and waits until they have gone")
def test_actor_ended_while_starting_leaves_no_object(cluster: Cluster) -> None:
    dataset = ArrayDataset(np.zeros((64, 4096), np.float32))
    nbytes = 64 * 4096 * 4
    with ShmLoader(dataset, **SEEDED, **on(cluster), worker_init_fn=block_on_other_nodes) as far:
        assert len(copied_batches(far)) == 16
        assert cluster.ask("wait_until_stored", 2 * nbytes, 60.0) >= 2 * nbytes
    assert cluster.ask("wait_for_none", 60.0) == []
    assert cluster.ask("wait_for_stored", nbytes, 60.0) < nbytes


@slow
def test_killed_agent_is_replaced_and_its_actors_end(cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, **on(cluster)) as far:
        batches = iter(far)
        begun = copied_batches(next(batches) for _ in range(3))
        before = set(cluster.ask("actors"))
        kill_worker(far, 0)
        assert_same(expected(), begun + copied_batches(batches))
        assert not before & set(cluster.ask("actors"))


@pytest.mark.slow(reason="kills a trainer of a Ray cluster, a process that imports torch")
def test_killed_trainer_leaves_nothing_in_the_cluster(cluster: Cluster) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from shmload import Ray, ShmLoader
from tests.ray.ray_datasets import Rows
batches = iter(ShmLoader(Rows(), 4, seed=1, num_workers=2, backend=Ray(address={cluster.address!r})))
next(batches)
print("begun", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "begun\n"
        assert len(cluster.ask("actors")) == 2
        trainer.kill()
    assert cluster.ask("wait_for_none", 60.0) == []


@pytest.mark.slow(reason="starts actors on a Ray cluster for each of two loaders")
def test_unreadable_sample_raises_its_own_error_or_is_skipped(cluster: Cluster) -> None:
    wanted = {**SEEDED, "shuffle": False, "num_workers": 1}
    with ShmLoader(Failing(16), **wanted, **on(cluster)) as far:
        batches = iter(far)
        next(batches)
        with pytest.raises(KeyError, match="the seventh") as caught:
            next(batches)
        assert caught.value.__notes__ == [
            "shmload: sample 7, epoch 0, batch 1; to step through it: shmload.debug.read(dataset, 7, seed=3, epoch=0)"
        ]
    with ShmLoader(Failing(16), **wanted, **on(cluster), on_error="skip") as far:
        assert [batch["index"].tolist() for batch in far][1] == [4, 5, 6]


@pytest.mark.slow(reason="an agent imports Ray, and finds no cluster")
def test_missing_head_raises_an_error_that_says_what_to_do(running_cluster: Cluster) -> None:
    with ShmLoader(Rows(), **SEEDED, backend=Ray(address="127.0.0.1:1")) as far:
        for _ in range(2):
            with pytest.raises(ClusterUnreachable, match=r"there is no Ray cluster at address='127.0.0.1:1' .*ray start --head"):
                next(iter(far))


@pytest.mark.slow(reason="needs a Ray cluster, which the first of these tests starts")
def test_dataset_that_cannot_be_pickled_is_refused_with_the_reason(running_cluster: Cluster) -> None:
    dataset = Rows()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]  # what should not be there
    with (
        ShmLoader(dataset, **SEEDED, **on(running_cluster)) as far,
        pytest.raises(TypeError, match=r"backend=\"ray\" sends the dataset.*cannot pickle '_thread.lock' object"),
    ):
        next(iter(far))
