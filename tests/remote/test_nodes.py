"""Each node reads its share: all shares contain each sample exactly once, are the same in each epoch, and need few bytes of other
shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload.remote import NodeShuffle, RemoteDataset
from shmload.remote.listing import shards_in
from shmload.schedule.schedule import Schedule
from shmload.storage.local_store import LocalStore
from tests.remote.remote_kit import WatchedStore, labels, write_packed

COUNTS = [10] * 40
TOTAL = sum(COUNTS)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda sizes: sum(sizes) >= 8),
    nodes=st.integers(1, 8),
    per_node=st.integers(1, 6),
    window=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_epoch_has_every_sample_once_and_each_node_reads_its_share(
    sizes: list[int], nodes: int, per_node: int, window: int, shuffle: bool, seed: int
) -> None:
    batch = nodes * per_node
    order = NodeShuffle(sizes, nodes=nodes, global_batch=batch, window=window, shuffle=shuffle)
    assert order.n == sum(sizes)
    of_nodes = []
    for epoch in range(2):
        whole = order.take(0, order.n, seed=seed, epoch=epoch)
        assert sorted(whole.tolist()) == list(range(order.n))
        cuts = sorted(np.random.default_rng(3).integers(0, order.n + 1, 6).tolist())
        pieces = [order.take(a, b, seed=seed, epoch=epoch) for a, b in zip([0, *cuts], [*cuts, order.n], strict=True)]
        assert np.array_equal(np.concatenate(pieces), whole)
        steps = order.n // batch
        of_nodes.append(whole[: steps * batch].reshape(steps, nodes, per_node))
    spans = [order.n * node // nodes for node in range(nodes + 1)]
    for node in range(nodes):
        mine = {int(index) for found in of_nodes for index in found[:, node].ravel()}
        assert len(mine) <= spans[node + 1] - spans[node]  # in both epochs together, because the node has no other samples


def test_shares_are_the_same_in_each_epoch_and_samples_in_another_order() -> None:
    order = NodeShuffle(COUNTS, nodes=4, global_batch=16, window=2)
    first, second = (order.take(0, TOTAL, seed=5, epoch=epoch).reshape(-1, 4, 4) for epoch in range(2))
    for node in range(4):
        assert set(first[:, node].ravel()) == set(second[:, node].ravel())
        assert first[:, node].tolist() != second[:, node].tolist()


def test_window_of_a_shard_contains_the_shard() -> None:
    sizes = [3, 0, 5, 2, 7, 1, 4, 6]
    order = NodeShuffle(sizes, nodes=3, global_batch=6, window=2)
    for shard, size in enumerate(sizes):
        if not size:
            with pytest.raises(ValueError, match="has no samples"):
                order.window_of(shard, seed=5, epoch=1)
            continue
        window = order.window_of(shard, seed=5, epoch=1)
        assert shard in order.shards_from(window, seed=5, epoch=1, num_windows=1)[0]


@pytest.mark.parametrize(("sizes", "nodes", "batch"), [([4, 4], 3, 4), ([1], 2, 2), ([4], 0, 4)])
def test_invalid_numbers_of_nodes_or_samples_are_errors(sizes: list[int], nodes: int, batch: int) -> None:
    with pytest.raises(ValueError, match="NodeShuffle: "):
        NodeShuffle(sizes, nodes=nodes, global_batch=batch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_packed(tmp_path / "data", COUNTS)
    return tmp_path / "data"


class Node:
    """The reads of one machine, through its own cache."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.store, self.cache = WatchedStore(LocalStore(folder)), cache

    @property
    def shards(self) -> set[str]:
        """Returns the shards that it has fetched."""
        return {key for method, key in self.store.asked if method == "read_into" and key.endswith(".tar")}


@pytest.mark.parametrize(("nodes", "ranks"), [(8, 8), (8, 16), (2, 4)])
def test_node_fetches_only_its_share(nodes: int, ranks: int, folder: Path, tmp_path: Path) -> None:
    machines = [Node(folder, tmp_path / f"cache{node}") for node in range(nodes)]
    datasets = []
    for rank in range(ranks):
        node = machines[rank * nodes // ranks]
        options: Any = {"rank": rank, "world_size": ranks, "nodes": nodes, "uneven": "exact", "window": 2}
        datasets.append(RemoteDataset(None, shards_in(node.store), cache_folder=node.cache, **options))
    for epoch in range(3):
        found = [label for dataset in datasets for label in labels(dataset)]
        assert sorted(found) == list(range(TOTAL))
        if epoch == 0:
            fetched = [node.shards for node in machines]
            assert all(len(shards) <= len(COUNTS) // nodes + 2 for shards in fetched)
            assert len(set().union(*fetched)) == len(COUNTS)
        else:
            assert [node.shards for node in machines] == fetched  # its cache holds its whole share
    for dataset in datasets:
        dataset.close()


def test_loader_reads_its_nodes_share_and_resumes_with_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    nodes, batch = 4, 16

    def loaders(world_size: int) -> tuple[list[ShmLoader[Any]], list[Node]]:
        made, machines = [], []
        for rank in range(world_size):
            machines.append(Node(folder, tmp_path / f"cache-{world_size}-{rank}"))
            view = RemoteDataset(None, shards_in(machines[-1].store), cache_folder=machines[-1].cache, window=2).indexed()
            order = view.block_shuffle(nodes=nodes, global_batch=batch)
            options: Any = {"rank": rank, "world_size": world_size, "num_workers": 0, "seed": 3, "sampler": order}
            made.append(ShmLoader(view, batch_size=batch // world_size, **options))
        return made, machines

    four, machines = loaders(4)
    expected = [[int(label) for step in batches for label in step["cls"]] for batches in zip(*four, strict=True)]
    assert sorted(label for step in expected for label in step) == list(range(TOTAL))
    assert all(len(node.shards) <= len(COUNTS) // nodes + 2 for node in machines)
    again, _ = loaders(4)
    iterators = [iter(loader) for loader in again]
    begun = [[int(label) for step in [next(it) for it in iterators] for label in step["cls"]] for _ in range(7)]
    state = again[0].state_dict()
    two, _ = loaders(2)
    for loader in two:
        loader.load_state_dict(state)
    rest = [[int(label) for step in batches for label in step["cls"]] for batches in zip(*two, strict=True)]
    assert begun + rest == expected
    for loader in (*four, *again, *two):
        loader.close()


def test_schedule_assigns_each_rank_samples_of_its_node() -> None:
    order = NodeShuffle(COUNTS, nodes=4, global_batch=32, window=2)
    share = [set(order.take(0, TOTAL // 32 * 32, seed=1, epoch=0).reshape(-1, 4, 8)[:, node].ravel()) for node in range(4)]
    for world_size in (4, 8, 16):
        schedule = Schedule(TOTAL, batch_size=32 // world_size, seed=1, shuffle=False, world_size=world_size, order=order)
        for rank in range(world_size):
            for step in range(TOTAL // 32):
                assert set(schedule.batch(0, step, rank).tolist()) <= share[rank * 4 // world_size]


def test_incompatible_options_are_errors(folder: Path) -> None:
    dataset = RemoteDataset.from_urls(str(folder), nodes=3, rank=0, world_size=4)
    with pytest.raises(ValueError, match="nodes=3 must divide the number of ranks, which is 4"):
        next(iter(dataset))
    with pytest.raises(ValueError, match="with nodes=, the order depends on the ranks"):
        dataset.keyed_items()
    with pytest.raises(ValueError, match="block_shuffle: nodes and global_batch go together; got nodes=2, global_batch=None"):
        dataset.indexed().block_shuffle(nodes=2)
    with pytest.raises(ValueError, match="nodes must be an integer of at least 1, got 0"):
        RemoteDataset.from_urls(str(folder), nodes=0)
    dataset.close()
