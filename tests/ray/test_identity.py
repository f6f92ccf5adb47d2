"""For every kind of dataset, the cluster's batches equal local ones, and a state resumes in the other kind of worker pool, both
ways.

The nodes have their own /dev/shm and /proc, so data in the trainer's shared memory must be sent. Files are on a file system that
the nodes share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, WeightedRandomSampler

from shmload import Mix, SharedIndex, ShmLoader, Weighted
from shmload.formats import ArrayDataset, TarWriter, TFRecordDataset, TFRecordWriter, TokenDataset
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Join, Map, Permutation
from shmload.remote import RemoteDataset
from tests.ray.cluster_kit import Cluster, assert_same, copied_batches, generator, on
from tests.ray.ray_datasets import Labeled, Numbers, Rows, drawn

pytestmark = pytest.mark.slow(reason="each starts actors on a Ray cluster")
Made = tuple[Any, dict[str, Any]]  # a dataset, and the loader's arguments


def mixture(folder: Path) -> Made:
    members = [(Rows(30), 2), (Mix([(Numbers(9), 1), (Numbers(4), 1)]), 1)]
    return Mix(members, stop="all"), {"batch_size": 6, "num_workers": 2}


def pipeline(folder: Path) -> Made:
    members = [(Conveyer([Permutation(n, seed=n, repeating=False)]), n) for n in (20, 9)]
    return Conveyer([Join(members, seed=3), Map(drawn)]), {"batch_size": 4}


def arrays(folder: Path) -> Made:
    held = ArrayDataset({"x": np.arange(93, dtype=np.float32).reshape(31, 3), "y": torch.arange(31)})
    return held, {"batch_size": 4, "num_workers": 2}


def index(folder: Path) -> Made:
    return Labeled(SharedIndex([(f"{n}.jpg", n) for n in range(31)])), {"batch_size": 4}


def weighted(folder: Path) -> Made:
    return Rows(31), {"batch_size": 4, "sampler": Weighted(np.arange(1, 32)), "shuffle": None}


def tokens(folder: Path) -> Made:
    held = TokenDataset(np.arange(1, 300, dtype=np.uint16), 9, document_index=np.arange(0, 300, 23), pack=True, seed=4)
    return held, {"batch_size": 4}


def records(folder: Path) -> Made:
    with TFRecordWriter(folder / "a.tfrecord", index=True) as writer:
        for n in range(31):
            writer.write({"label": n, "tokens": np.arange(n % 5), "text": f"sample {n}"})
    schema = {"label": "int64", "tokens": ("int64", (None,)), "text": str}
    return TFRecordDataset(folder / "a.tfrecord", schema), {"batch_size": 4, "ragged": "jagged"}


def shards(folder: Path) -> RemoteDataset:
    for shard in range(3):
        with TarWriter(folder / f"part-{shard:06d}.tar") as writer:
            for n in range(10 * shard, 10 * shard + 10):
                writer.write({"__key__": f"{n:04d}", "npy": np.full(3, n, np.float32), "cls": n})
    return RemoteDataset.from_urls(f"{folder}", seed=5)


def shards_by_index(folder: Path) -> Made:
    return shards(folder).indexed(), {"batch_size": 4}


def shards_as_items(folder: Path) -> Made:
    return shards(folder).decode().to_tuple("npy", "cls").batched(4), {"batch_size": None, "shuffle": None}


SEEDED: list[Callable[[Path], Made]] = [mixture, arrays, index, shards_by_index, shards_as_items]
if os.environ.get("SHMLOAD_EVERY_KIND"):  # by hand only: what they add to the kinds above is tested without Ray
    SEEDED += [pipeline, weighted, tokens, records]


@pytest.mark.parametrize("make", SEEDED, ids=[make.__name__ for make in SEEDED])
def test_seed_mode_batches_and_states_equal_the_local_ones(cluster: Cluster, make: Callable[[Path], Made], tmp_path: Path) -> None:
    dataset, keywords = make(tmp_path)
    keywords = {"shuffle": True, "seed": 3, "num_workers": 1, **keywords}
    with ShmLoader(dataset, **keywords) as local, ShmLoader(dataset, **keywords, **on(cluster)) as far:
        whole = copied_batches(local)
        begun = copied_batches(islice(iter(far), 3))
        local.load_state_dict(far.state_dict())
        assert_same(whole, begun + copied_batches(local))
        begun = copied_batches(islice(iter(local), 2))  # the next epoch
        far.load_state_dict(local.state_dict())
        epoch = begun + copied_batches(far)
        local.set_epoch(1)
        assert_same(copied_batches(local), epoch)
        assert len(epoch) == len(whole)


def test_torch_mode_tensors_weighted_sampler_and_stream_of_shards_equal_the_local_ones(cluster: Cluster, tmp_path: Path) -> None:
    tensors = TensorDataset(torch.arange(30.0).reshape(10, 3).share_memory_(), torch.arange(10))
    stream = shards(tmp_path).decode().to_tuple("npy", "cls").shuffle(5)

    def make(**pool: Any) -> list[ShmLoader[Any]]:
        sampler = WeightedRandomSampler(list(range(1, 11)), 12, generator=generator())
        return [
            ShmLoader(tensors, 4, sampler=sampler, num_workers=1, generator=generator(), **pool),
            ShmLoader(stream.repeat(1), 4, num_workers=2, generator=generator(), **pool),
        ]

    for local, far in zip(make(), make(**on(cluster)), strict=True):
        with local, far:
            num_epochs = 1 if local.dataset is tensors else 2  # each pass of a stream is the next epoch
            epochs = [copied_batches(local) for _ in range(num_epochs)]
            assert_same(epochs, [copied_batches(far) for _ in range(num_epochs)])
            assert len({repr(epoch) for epoch in epochs}) == num_epochs


def test_pipeline_runs_its_workers_on_the_cluster(cluster: Cluster) -> None:
    def make(**options: Any) -> Conveyer:
        stages = [Permutation(23, seed=6, repeating=False), DistributedBatchedMap(lambda item: drawn(2 * item), 2), Collate(4)]
        return Conveyer(stages, **options)

    with make() as local, make(**on(cluster)) as far:
        begun = [copied_batches([pipeline() for _ in range(3)]) for pipeline in (local, far)]
        assert_same(begun[0], begun[1])
        local.load_state(far.state())
        assert_same(copied_batches(far), copied_batches(local))
