"""The growing cache's requirements, S1 to S13 of the specification, with one test each; the other files test the details."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ShmLoader
from shmload._core.crc32c import crc32c, masked
from shmload.errors import CacheFull, StateMismatch
from shmload.growing import SampleCache
from shmload.worker.read_plan import plan_of
from tests.growing.growing_kit import (
    RECORD_NBYTES,
    SCHEMA,
    dataset_of,
    endless,
    epoch_of,
    flip,
    loader_of,
    put,
    put_foreign,
    sample,
    ten,
    values_of,
    wait_until,
)

slow = pytest.mark.slow(reason="waits for samplers in processes of their own to write enough")
TENSORFLOWS = Path(__file__).parent.parent / "formats" / "tfrecord" / "written_by_tensorflow"

MakeCache = Callable[..., SampleCache]


@slow
def test_s1_sampler_processes_write_while_training_runs(cache: SampleCache) -> None:
    put(cache, [-1])
    with loader_of(dataset_of(cache), num_workers=1) as loader:
        first = iter(loader)  # of one sample, because the samplers may fill the cache before the next line
        cache.start(endless, 2, publish_s=0.0)
        lengths = [len(epoch_of(first))]
        while lengths[-1] <= lengths[0]:
            values = epoch_of(loader)
            assert len(values) == len(set(values))
            lengths.append(len(values))
    assert lengths[0] == 1


def test_s2_an_epoch_may_start_with_few_samples(cache: SampleCache) -> None:
    put(cache, range(2))
    with loader_of(dataset_of(cache)) as loader:
        assert sorted(epoch_of(loader)) == [0, 1]
        put(cache, range(2, 50))
        assert list(range(50)) == sorted(epoch_of(loader))


def test_s3_an_epoch_is_a_settled_snapshot(cache: SampleCache) -> None:
    put(cache, range(8))
    with loader_of(dataset_of(cache)) as loader:
        batches = iter(loader)
        seen = values_of(next(batches))
        put(cache, range(8, 16))
        seen += [value for batch in batches for value in values_of(batch)]
        assert list(range(8)) == sorted(seen)
        assert list(range(16)) == sorted(epoch_of(loader))


def test_s4_oldest_files_outside_running_epochs_are_evicted_within_the_budget(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(8 * 1024)
    first = put(cache, range(10))
    with loader_of(dataset_of(cache)) as loader:
        running = iter(loader)
        next(running)
        for number in range(1, 15):  # as many as fit
            put(cache, range(10 * number, 10 * number + 10))
        with pytest.raises(CacheFull):
            put(cache, range(150, 160), timeout_s=0.0)
        names = [file.name for file in cache.files()]
        assert first == names[0]  # it is being read
        assert len(names) == 15  # no epoch has read the others yet
    for number in range(100, 140):
        put(cache, range(10 * number, 10 * number + 10))
        assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*tfrecord*")) <= 8 * 1024
    names = [file.name for file in cache.files()]
    assert sorted(names) == names  # generations
    assert first not in names


def test_s5_files_appear_whole_and_bad_ones_are_skipped_and_reported(cache: SampleCache, tmp_path: Path) -> None:
    good = put(cache, range(4))
    torn, damaged = put(cache, range(4, 8)), put_foreign(tmp_path / "cache" / "by_hand.tfrecord", range(8, 12))
    with (tmp_path / "cache" / torn).open("r+b") as file:
        file.truncate(3 * RECORD_NBYTES)
    flip(damaged, 20)
    with cache.writer(publish_s=1e9) as writer:
        writer.write(sample(12))
        assert [good] == [file.name for file in cache.files()]  # nothing of the file that is being written
        writer.abandon()
    with loader_of(dataset_of(cache)) as loader:
        assert list(range(4)) == sorted(epoch_of(loader))
    bad = cache.stats().bad
    assert f"{tmp_path / 'cache' / torn}: has 144 bytes, and was published with 192" == bad[torn]
    assert "record 0, which starts at byte 0: corrupted: the checksum of the record's 32 bytes differs" in bad[damaged.name]


def test_s6_records_reach_the_batch_without_python_in_the_trainer(cache: SampleCache) -> None:
    """Checks native reading and tensors over the slot's memory; benchmarks/growing.py measures the rates."""
    put(cache, range(8))
    dataset = dataset_of(cache)
    with loader_of(dataset, num_workers=1) as loader:
        plan = plan_of(dataset, collate_fn=None, auto_collation=True, ragged="list", is_torch=False)
        assert plan.path == "read_batch_into"
        batches = list(loader)
        assert list(range(8)) == [value for batch in batches for value in values_of(batch)]
        with pytest.raises(RuntimeError, match="not resizable"):
            batches[0]["x"].untyped_storage().resize_(1 << 20)  # the memory does not belong to torch


def test_s7_files_are_true_tfrecords_both_ways(cache: SampleCache, tmp_path: Path) -> None:
    name = put(cache, range(3))
    data = (tmp_path / "cache" / name).read_bytes()
    for value in range(3):  # written by hand from the format's documentation
        (length,) = struct.unpack_from("<Q", data)
        assert masked(crc32c(data[:8])) == struct.unpack_from("<I", data, 8)[0]
        assert sample(value).tobytes() == data[12 : 12 + length]
        assert masked(crc32c(data[12 : 12 + length])) == struct.unpack_from("<I", data, 12 + length)[0]
        data = data[16 + length :]
    assert data == b""
    (tmp_path / "cache" / name).unlink()
    by_tensorflow = TENSORFLOWS / "plain.tfrecord"
    (tmp_path / "cache" / "from_tf.tfrecord").write_bytes(by_tensorflow.read_bytes())
    with ShmLoader(cache.dataset(None, records="raw"), batch_size=1, seed=0) as loader:
        assert len(loader) == cache.stats().num_samples > 0
        assert all(len(text) for batch in loader for text in batch["bytes"])


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_s8_compressed_files_are_read(cache: SampleCache, tmp_path: Path, compression: str) -> None:
    put_foreign(tmp_path / "cache" / f"theirs.tfrecord.{compression}", range(4), compression)
    put(cache, range(4, 8), compression=compression)
    with loader_of(dataset_of(cache)) as loader:
        assert list(range(8)) == sorted(epoch_of(loader))


@pytest.mark.slow(reason="reads three epochs with two workers")
def test_s9_workers_persist_and_the_next_epoch_is_ordered_before_this_one_ends(cache: SampleCache) -> None:
    put(cache, range(40))
    with loader_of(dataset_of(cache), num_workers=2, prefetch_factor=2) as loader:
        pids = set()
        for epoch in range(3):
            num_left = 0
            for _ in loader:
                assert loader._builder.last is not None
                pids.update(loader._builder.last.pool.pids)
                num_left = loader._builder.last.num_queued
            assert num_left > 0  # of the next epoch, because all batches of this one are delivered
            assert loader._builder.last.front.epoch == epoch + 1
            put(cache, range(40 * (epoch + 1), 40 * (epoch + 2)))
        assert len(pids) == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_s10_all_ranks_take_the_same_snapshot_and_equal_counts(make_cache: MakeCache, world_size: int) -> None:
    caches = [make_cache() for _ in range(world_size)]
    put(caches[0], range(13))
    loaders = [
        loader_of(dataset_of(cache, run="job"), rank=rank, world_size=world_size, batch_size=2, uneven="pad")
        for rank, cache in enumerate(caches)
    ]
    for _ in range(2):
        delivered = []
        for loader in loaders:
            batches = [values_of(batch)[: loader.valid] for batch in loader]
            put(caches[0], range(100, 103))  # before the other ranks begin
            delivered.append(batches)
        assert len({len(batches) for batches in delivered}) == 1
        values = [value for batches in delivered for batch in batches for value in batch]
        assert 13 == len([value for value in values if value < 100]) == len({value for value in values if value < 100})
    for loader in loaders:
        loader.close()


def test_s11_state_names_its_snapshot_and_a_resume_reports_missing_files(cache: SampleCache, tmp_path: Path) -> None:
    gone = put(cache, range(6))
    put(cache, range(6, 12))
    with loader_of(dataset_of(cache)) as loader:
        seen = values_of(next(iter(loader)))
        state = loader.state_dict()
        run = state["children"]["snapshot"]["run"]
        assert {"run": run, "n": 12, "digest": state["children"]["snapshot"]["digest"]} == state["children"]["snapshot"]
    with loader_of(dataset_of(cache)) as loader:
        loader.load_state_dict(state)
        assert list(range(12)) == sorted(seen + epoch_of(loader))
    (tmp_path / "cache" / gone).unlink()
    with (
        loader_of(dataset_of(cache)) as loader,
        pytest.raises(StateMismatch, match=rf"6 of its 12 samples are gone, evicted or replaced since: {gone} \(6\)"),
    ):
        loader.load_state_dict(state)


@slow
def test_s12_samplers_are_supervised_and_feel_backpressure(make_cache: MakeCache) -> None:
    cache = make_cache(16 * 1024)
    samplers = cache.start(endless, 2, publish_s=1e9)
    with loader_of(dataset_of(cache, timeout_s=30.0)) as loader:
        running = iter(loader)
        next(running)
        killed = wait_until(lambda: samplers.states[0]["pid"], "the supervisor's first report")
        os.kill(killed, signal.SIGKILL)
        states = wait_until(lambda: (s := samplers.states[0])["restarts"] == 1 and s["state"] == "running" and s, "a new one")
        assert states["pid"] != killed
        assert states["error"] == "sampler 0 was killed by SIGKILL"

        def waiting() -> Any:
            writers = cache.stats().writers
            return len(writers) == 2 and all(one.is_waiting for one in writers) and writers

        writers = wait_until(waiting, "both samplers to wait until an epoch has read their samples")
        assert sorted(one.role for one in writers) == ["sampler 0 of 2", "sampler 1 of 2"]
        before = cache.stats()
        for _ in running:
            pass
        following = iter(loader)  # its files take the place of those of the first epoch
        next(following)
        wait_until(lambda: cache.stats().generation > before.generation, "them to go on")
        wait_until(lambda: cache.stats().num_evicted > before.num_evicted, "the oldest files to go")


def test_s13_dicts_of_numpy_and_torch_arrays_are_written(cache: SampleCache) -> None:
    """Checks the values; benchmarks/growing.py measures the rate."""
    with cache.writer(raw=["raw"]) as writer:
        writer.write({"a": np.arange(3.0, dtype=np.float32), "b": torch.arange(2), "raw": torch.ones(2, 2), "name": "n"})
    schema = {"a": ("float32", (3,)), "b": ("int64", (2,)), "raw": ("float32", (2, 2)), "name": str}
    with ShmLoader(cache.dataset(schema), seed=0) as loader:
        (batch,) = loader
    assert batch["a"].tolist() == [[0.0, 1.0, 2.0]]
    assert batch["b"].tolist() == [[0, 1]]
    assert batch["raw"].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert batch["name"] == ["n"]


def test_sampler_that_ends_has_published_everything(cache: SampleCache) -> None:
    samplers = cache.start(ten, 2)
    wait_until(lambda: samplers.are_done, "both samplers to end")
    with loader_of(dataset_of(cache)) as loader:
        assert list(range(20)) == sorted(epoch_of(loader))
    assert SCHEMA.keys() == loader.dataset.schema.keys()
