"""A packed dataset that is followed: each epoch reads what was appended before it, the same in all ranks, and a state names its
snapshot.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmload import LengthBuckets, ShmLoader, Weighted
from shmload.errors import ShardCorrupt, StateMismatch, StoreError
from shmload.remote import RemoteDataset
from shmload.remote.following import FollowedEpochs
from shmload.storage.local_store import LocalStore
from shmload.tools.audit.verify import read_folder, verify
from tests.remote.packing.packing_kit import packed


class Numbered:
    """Samples that contain their number in the dataset, also as an array."""

    def __init__(self, first: int, stop: int) -> None:
        self._numbers = range(first, stop)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        number = self._numbers[index]
        return {"label": number, "x": np.full(4, number)}


SCHEMA = {"cls": "int64", "x.npy": ("int64", (4,))}


def grow(folder: Path, first: int, stop: int) -> None:
    packed(Numbered(first, stop), LocalStore(folder), append=True)


def loader_of(folder: Path, workers: int = 0, **options: Any) -> ShmLoader[Any]:
    view = RemoteDataset.from_urls(str(folder)).indexed(schema=SCHEMA, follow=True)
    method = {"multiprocessing_context": "fork"} if workers else {}
    return ShmLoader(view, **{"batch_size": 4, "seed": 3, "shuffle": True, "num_workers": workers, **method, **options})


def numbers(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        assert torch.equal(batch["x.npy"], batch["cls"][:, None].expand(-1, 4))
        found.append(batch["cls"].tolist())
    return found


@pytest.mark.slow(reason="starts workers")
@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_reads_what_was_appended_before_it(workers: int, tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    with loader_of(tmp_path, workers) as loader:
        first = numbers(loader)
        assert sorted(chain.from_iterable(first)) == list(range(20))
        grow(tmp_path, 20, 50)
        found = [sorted(chain.from_iterable(numbers(loader))) for _ in range(2)]  # the next epoch may have been ordered ahead
        assert found[0] in (list(range(20)), list(range(50)))
        assert found[1] == list(range(50))
        assert len(loader) == 13


def test_state_resumes_on_its_snapshot_and_the_next_epoch_reads_everything(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    with loader_of(tmp_path) as loader:
        iterator = iter(loader)
        before, state = numbers([next(iterator)]), loader.state_dict()
        rest = numbers(iterator)
    grow(tmp_path, 20, 50)
    grow(tmp_path, 50, 60)
    with loader_of(tmp_path) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert numbers(again) == rest
        assert sorted(chain.from_iterable(numbers(again))) == list(range(60))
    assert sorted(chain.from_iterable(before + rest)) == list(range(20))


def test_state_of_an_epoch_end_reads_everything_even_if_the_next_epoch_had_begun(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    with loader_of(tmp_path) as loader:
        numbers(loader)
        state = loader.state_dict()
        next(iter(loader))
        grow(tmp_path, 20, 50)
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert sorted(chain.from_iterable(numbers(loader))) == list(range(50))


def test_state_of_a_repacked_dataset_is_refused(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    with loader_of(tmp_path) as loader:
        next(iter(loader))
        state = loader.state_dict()
        packed(Numbered(0, 30), LocalStore(tmp_path))
        with pytest.raises(ShardCorrupt, match="packed again while it was read"):
            for _ in range(3):
                numbers(loader)
    with loader_of(tmp_path) as other, pytest.raises(StateMismatch, match="that the 30 samples there do not begin with: they were"):
        other.load_state_dict(state)


class Ranks:
    """Two ranks' views of one dataset, and the store that they share."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = self.store = torch.distributed.HashStore()
        monkeypatch.setattr("shmload.torch_names.default_store", lambda: store)
        self.sides = [FollowedEpochs(RemoteDataset.from_urls(str(folder))._source) for _ in range(2)]
        for side in self.sides:
            side.world_size = 2


def test_all_ranks_use_the_snapshot_of_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, 0, 20)
    one, two = Ranks(tmp_path, monkeypatch).sides
    assert one.snapshot(0).n == 20
    grow(tmp_path, 20, 50)
    assert two.snapshot(0) == one.snapshot(0)
    assert two.snapshot(1).n == one.snapshot(1).n == 50


def test_later_loader_of_all_ranks_agrees_on_a_snapshot_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of another loader, or of this one before a state was loaded, may have read fewer samples."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr("shmload.torch_names.default_store", lambda: store)
    grow(tmp_path, 0, 20)
    one, other = (FollowedEpochs(RemoteDataset.from_urls(str(tmp_path))._source, 0, 2) for _ in range(2))
    assert one.snapshot(0).n == 20
    grow(tmp_path, 20, 50)
    assert other.snapshot(0).n == 50
    beside = FollowedEpochs(RemoteDataset.from_urls(str(tmp_path))._source, 1, 2)  # another rank in this process
    assert beside.snapshot(0).n == 20
    one.restart(0)
    assert one.snapshot(0).n == 50


def test_rank_with_a_different_dataset_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, 0, 20)
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.store.set(f"shmload/followed/{tmp_path}/0/0/0", "20 0123456789abcdef")
    with pytest.raises(
        ShardCorrupt, match=r"another rank reads 20 samples in epoch 0, which this dataset of 20 does not begin with"
    ):
        ranks.sides[0].snapshot(0)


def test_ranks_without_a_common_store_raise(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    with (
        loader_of(tmp_path, rank=0, world_size=2) as loader,
        pytest.raises(StoreError, match=r"2 ranks follow .*init_process_group"),
    ):
        next(iter(loader))


PROGRAM = """
import sys
import torch
from tests.remote.test_following import grow, loader_of, numbers
from pathlib import Path

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
with loader_of(folder / "data") as loader:
    first = numbers(loader)
    if rank == 0:
        grow(folder / "data", 20, 40)
    torch.distributed.barrier()
    rest = [numbers(loader) for _ in range(2)]
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print([first, *rest])
"""


@pytest.mark.slow(reason="two processes import torch and meet")
def test_ranks_of_a_process_group_read_the_same_snapshot(tmp_path: Path) -> None:
    grow(tmp_path / "data", 0, 20)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    found = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    for epoch, sizes in enumerate(((20,), (20, 40), (40,))):
        read = [number for rank in found for batch in rank[epoch] for number in batch]
        assert sorted(set(read)) in [list(range(size)) for size in sizes]
        assert len(read) in sizes


def test_followed_view_does_not_affect_other_views_of_the_dataset(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    dataset = RemoteDataset.from_urls(str(tmp_path), shuffle=False)
    view, followed = dataset.indexed(schema=SCHEMA), dataset.indexed(schema=SCHEMA, follow=True)
    grow(tmp_path, 20, 28)
    with ShmLoader(followed, 4, seed=3) as loader:
        assert sum(map(len, numbers(loader))) == len(followed) == 28
    assert [len(dataset), len(view), len(list(dataset))] == [20, 20, 20]
    with pytest.raises(IndexError):
        view[20]


def test_two_loaders_of_a_followed_view_have_independent_epochs(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(schema=SCHEMA, follow=True)
    with ShmLoader(view, 4, seed=3) as one, ShmLoader(view, 4, seed=3) as other:
        numbers(one)
        batches = iter(one)
        next(batches)
        before = one.state_dict()
        assert before["children"]
        numbers(other)
        assert one.state_dict() == before


def test_forked_process_follows_as_far_as_its_own_samples_need(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(schema=SCHEMA, follow=True)
    grow(tmp_path, 20, 30)
    assert view[25]["cls"] in range(20, 30)  # has followed once, and the child will once
    grow(tmp_path, 30, 40)
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(int(view[35]["cls"])))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert answers.get() in range(30, 40)


def test_dataset_pinned_to_a_generation_is_not_followed(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    generation = RemoteDataset.from_urls(str(tmp_path))._source.local.shards.generation
    dataset = RemoteDataset.from_urls(str(tmp_path), generation=generation)
    with pytest.raises(ValueError, match=f"follow=True reads what is appended later, but generation='{generation}' excludes it"):
        dataset.indexed(follow=True)


def test_following_requires_a_whole_packed_dataset_without_a_fixed_order(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    dataset = RemoteDataset.from_urls(str(tmp_path))
    shard = next(tmp_path.glob("*/*.tar"))
    for other in (dataset.split({"a": 10})["a"], RemoteDataset.from_urls(str(shard))):
        with pytest.raises(ValueError, match="follow=True reads all of a dataset that upload_cv_dataset"):
            other.indexed(follow=True)
    with pytest.raises(ValueError, match="block_shuffle needs a fixed length"):
        dataset.indexed(follow=True).block_shuffle()


def test_loader_refuses_datasets_that_it_cannot_follow(tmp_path: Path) -> None:
    grow(tmp_path, 0, 20)
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(schema=SCHEMA, follow=True)
    orders: list[dict[str, Any]] = [{"sampler": Weighted([1] * 20)}, {"batch_sampler": LengthBuckets([1] * 20, batch_size=4)}]
    for order in orders:
        with pytest.raises(ValueError, match=r"the growing RemoteSamples defines .*sampler=.* is an order of fixed length"):
            ShmLoader(view, **{"batch_size": 4} if "sampler" in order else {}, seed=3, **order)
    with pytest.raises(ValueError, match="which only seed mode uses: give ShmLoader a seed"):
        ShmLoader(view, 4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_audit_treats_a_run_resumed_after_an_append_as_one_run(num_ranks: int, tmp_path: Path) -> None:
    folder, audit = tmp_path / "data", tmp_path / "audit"
    grow(folder, 0, 40)
    with loader_of(folder, audit=audit) as loader:
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        state = loader.state_dict()
        next(batches)
    grow(folder, 40, 50)
    size: dict[str, Any] = {"batch_size": 4 // num_ranks, "world_size": num_ranks}
    loaders = [loader_of(folder, audit=audit, rank=rank, **size) for rank in range(num_ranks)]
    for one in loaders:
        one.load_state_dict(state)
    for _ in zip(*loaders, strict=True):
        pass
    report, _ = verify(read_folder(audit))
    assert (report.findings, len(report.loaders)) == ([], 1)
    (epoch,) = report.loaders[0].epochs
    assert (epoch.num_batches, epoch.num_samples, epoch.num_superseded) == (6 + 4 * num_ranks, 40, 1)
