"""A growing dataset read by ShmLoader: lengths, indices, workers, refusals."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from shmload import CacheFull, ShmLoader
from shmload.growing import SampleCache, growing_dataset
from shmload.growing.epoch_snapshot import EPOCH_SHIFT, MAX_EPOCH, read_snapshot
from tests.formats.test_per_process import BlockedCall, exit_status_of_child_forked_while_blocked
from tests.growing.growing_kit import SCHEMA, dataset_of, epoch_of, loader_of, put, sample, values_of


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_has_its_own_length_and_order(cache: SampleCache, num_workers: int) -> None:
    put(cache, range(10))
    with loader_of(dataset_of(cache), shuffle=True, num_workers=num_workers) as loader:
        assert len(loader) == 3
        first = epoch_of(loader)
        put(cache, range(10, 20))
        later = [epoch_of(loader) for _ in range(3)]
    assert list(range(10)) == sorted(first) != first
    assert list(range(20)) == sorted(later[-1])
    assert later[-1] != later[-2]


def test_index_identifies_its_epoch_and_record(cache: SampleCache) -> None:
    names = [put(cache, range(3)), put(cache, range(3, 8))]
    dataset = dataset_of(cache)
    with loader_of(dataset, shuffle=True) as loader:
        for _ in range(2):
            for batch in loader:
                for index, value in zip(loader.last_indices.tolist(), values_of(batch), strict=True):
                    file, record = dataset.where(index)
                    assert value == (record if file == names[0] else record + 3)
                    assert [value] * 8 == dataset[index]["x"].tolist()


def test_epoch_waits_for_its_first_samples(cache: SampleCache) -> None:
    put(cache, range(3))
    with loader_of(dataset_of(cache, min_samples=4)) as loader:
        with pytest.raises(TimeoutError, match=r"holds 3 samples after 0.0 s, an epoch needs 4\. Wait longer"):
            epoch_of(loader)
        put(cache, range(3, 5))
        assert list(range(5)) == sorted(epoch_of(loader))


def test_epoch_with_drop_last_waits_for_a_whole_step(cache: SampleCache) -> None:
    put(cache, range(3))
    with loader_of(dataset_of(cache), drop_last=True) as loader, pytest.raises(TimeoutError, match="an epoch needs 4"):
        iter(loader)


def test_epoch_of_a_full_cache_leaves_out_the_oldest_files(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(16 * 1024, headroom=0.25)
    for number in range(17):
        put(cache, range(20 * number, 20 * number + 20))
    there = cache.files()
    with loader_of(dataset_of(cache), batch_size=64) as loader:
        batches = iter(loader)
        values = values_of(next(batches))
        assert 16 * 1024 - sum(file.nbytes for file in there) < 1024
        assert min(values) == 20 * (17 - 12)  # 12 files fit into three quarters
        for number in range(100, 104):
            put(cache, range(20 * number, 20 * number + 20))  # fits where the oldest quarter was
        values += [value for batch in batches for value in values_of(batch)]
        assert list(range(100, 340)) == sorted(values)


def test_new_samples_are_not_evicted_before_an_epoch_has_read_them(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache(16 * 1024, headroom=0.25)
    written = 0
    for _ in range(17):
        put(cache, range(written, written := written + 20))
    with loader_of(dataset_of(cache), batch_size=64) as loader:
        for _ in range(3):
            batches = iter(loader)
            next(batches)
            begun = written
            with suppress(CacheFull):
                for _ in range(20):
                    put(cache, range(written, written + 20), timeout_s=0.0)
                    written += 20
            assert written - begun >= 80  # where the oldest quarter was
            for _ in batches:
                pass
            following = epoch_of(loader)
            assert set(range(begun, written)) <= set(following)


def test_small_epochs_are_settled_at_most_one_ahead(cache: SampleCache) -> None:
    put(cache, range(2))
    dataset = dataset_of(cache)
    with loader_of(dataset, num_workers=1, prefetch_factor=8) as loader:
        assert len(epoch_of(loader)) == 2
        put(cache, range(2, 4))
        assert [len(epoch_of(loader)) for _ in range(2)] == [2, 4]  # only one epoch was settled before these samples arrived


def test_randomness_within_samples_is_new_in_each_epoch(cache: SampleCache) -> None:
    put(cache, range(4))
    schema = {"x": ("float32", (1,))}
    draws: list[float] = []

    def draw(data: bytes) -> Any:
        draws.append(np.random.random())
        return np.zeros(1, np.float32)

    with cache.writer() as writer:
        writer.write({"x": b"1"})
    for name in [file.name for file in cache.files()][:1]:
        (cache.path / name).unlink()
    with loader_of(cache.dataset(schema, decode={"x": draw})) as loader:
        assert [len(list(loader)) for _ in range(2)] == [1, 1]
    assert len(draws) == len(set(draws)) == 2


def test_child_forked_while_a_thread_opens_a_snapshot_opens_its_own(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(cache, range(4))
    dataset = dataset_of(cache)
    with loader_of(dataset) as loader:
        epoch_of(loader)
        copy, blocked = pickle.loads(pickle.dumps(dataset)), BlockedCall()

        def read(path: Path) -> Any:
            return blocked() if threading.current_thread() is not threading.main_thread() else read_snapshot(path)

        monkeypatch.setattr(growing_dataset, "read_snapshot", read)

        def open_in_thread() -> None:
            with suppress(AttributeError):  # of the snapshot that the blocked call returns
                copy.where(0)

        assert exit_status_of_child_forked_while_blocked(blocked, open_in_thread, lambda: copy.where(0) == (name, 0)) == 0


def test_growing_dataset_has_no_len(cache: SampleCache) -> None:
    with pytest.raises(TypeError, match="a growing dataset has another length in each epoch: read it with ShmLoader"):
        len(dataset_of(cache))  # type: ignore[arg-type]  # must be refused
    with pytest.raises(ValueError, match="defines its own order, which only seed mode uses: give ShmLoader a seed"):
        ShmLoader(dataset_of(cache))


def test_user_sampler_is_refused_with_the_remedy(cache: SampleCache) -> None:
    put(cache, range(4))
    with (
        loader_of(dataset_of(cache), sampler=SequentialSampler(range(4))) as loader,
        pytest.raises(IndexError, match=r"epoch 0 has no snapshot at .*, without a sampler of your own"),
    ):
        next(iter(loader))


def test_copy_in_another_process_cannot_begin_an_epoch(cache: SampleCache) -> None:
    put(cache, range(4))
    dataset = dataset_of(cache)
    with loader_of(dataset) as loader:
        epoch_of(loader)
    copy = pickle.loads(pickle.dumps(dataset))
    assert sample(2).tolist() == copy[2]["x"].tolist()
    with pytest.raises(RuntimeError, match="this is a copy of a growing dataset from another process: make one here"):
        loader_of(copy)
    assert f"GrowingDataset({str(cache.path)!r}, x)" == repr(copy)


def test_epoch_beyond_the_largest_is_refused(cache: SampleCache) -> None:
    put(cache, range(4))
    with loader_of(dataset_of(cache)) as loader:
        loader.set_epoch(MAX_EPOCH)
        assert list(range(4)) == epoch_of(loader)
        assert MAX_EPOCH << EPOCH_SHIFT < 1 << 63
        with pytest.raises(ValueError, match=f"epoch is at most {MAX_EPOCH}; got {MAX_EPOCH + 1}"):
            epoch_of(loader)


def test_set_epoch_uses_the_epochs_own_snapshot(cache: SampleCache) -> None:
    put(cache, range(4))
    with loader_of(dataset_of(cache)) as loader:
        epoch_of(loader)
        put(cache, range(4, 8))
        loader.set_epoch(5)
        assert list(range(8)) == epoch_of(loader)
        loader.set_epoch(0)
        assert list(range(4)) == epoch_of(loader)  # unchanged


def test_numbers_of_bytes_may_be_floats_and_are_checked(tmp_path: Path) -> None:
    with SampleCache(tmp_path / "cache", 1e6, file_nbytes=1e3) as cache:
        put(cache, range(60))
        assert (cache.capacity_bytes, cache.file_nbytes, len(cache.files())) == (1_000_000, 1000, 3)
    for wrong in (3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"capacity_bytes is a number of bytes, at least 4; got {wrong}"):
            SampleCache(tmp_path / "other", wrong)


def test_repr_of_a_cache_has_its_figures(cache: SampleCache) -> None:
    put(cache, range(4))
    assert f"<SampleCache {cache.path}: 1 files, 192 of 65536 bytes>" == repr(cache)
    assert pickle.loads(pickle.dumps(cache)).capacity_bytes == 65536
    with cache.writer() as writer:
        assert f"<CacheWriter into {cache.path}: 0 samples in 0 files>" == repr(writer)


def test_each_process_that_uses_a_cache_gives_the_same_budget(cache: SampleCache) -> None:
    with pytest.raises(ValueError, match="give all users of a folder the same"):
        SampleCache(cache.path, 1 << 20)
    assert {"x": SCHEMA["x"]} == dict(dataset_of(cache).schema)
