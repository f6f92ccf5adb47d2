"""Shards keep their limits and the seeded order, and have the same bytes for any number of workers."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import Permutation, sample_rng
from shmload._core.crc32c import crc32c
from shmload.formats.tar.shard_index import ShardIndex, pack_index
from shmload.remote import upload_cv_dataset
from shmload.remote.packing import shard_packing
from shmload.remote.packing.shard_sender import NUM_THREADS
from shmload.remote.packing.spool import Spool
from shmload.storage.local_store import LocalStore
from tests.remote.packing.packing_kit import Blobs, Grey, Noisy, bytes_in, names_in, names_of, packed, samples_in


def test_every_sample_is_packed_once_in_the_seeded_order(tmp_path: Path) -> None:
    manifest = packed(Grey(50), LocalStore(tmp_path), seed=9)
    found = [sample["cls"] for sample in samples_in(tmp_path, manifest)]
    assert Permutation(50, seed=9).take(0, 50).tolist() == found
    assert [f"{number:08d}" for number in found] == [sample["__key__"] for sample in samples_in(tmp_path, manifest)]


def test_manifest_lists_exactly_the_files_of_the_folder(tmp_path: Path) -> None:
    manifest = packed(Grey(50), LocalStore(tmp_path), maxcount=20, seed=3)
    assert names_of(manifest) == names_in(tmp_path)
    assert [shard.num_samples for shard in manifest.shards] == [20, 20, 10]
    assert (manifest.seed, manifest.num_samples, manifest.extensions) == (3, 50, ("cls", "png"))
    assert manifest.dump() == (tmp_path / "manifest.json").read_bytes()
    for shard in manifest.shards:
        data, index = (tmp_path / shard.name).read_bytes(), (tmp_path / shard.index.name).read_bytes()
        assert (len(data), f"{crc32c(data):08x}") == (shard.nbytes, shard.crc32c)
        assert (len(index), f"{crc32c(index):08x}") == (shard.index.nbytes, shard.index.crc32c)
        assert pack_index("", data) == index
        assert shard.num_samples == ShardIndex("", index).num_samples


@pytest.mark.slow(reason="packs 600 samples four times, with workers, by spawn, too")
def test_bytes_are_the_same_for_every_number_of_workers_and_start_method(tmp_path: Path) -> None:
    pools: list[tuple[int, str | None]] = [(0, None), (1, "fork"), (2, "fork"), (1, "spawn")]
    found = []
    for number, (workers, method) in enumerate(pools):
        folder = tmp_path / str(number)
        packed(Noisy(600), LocalStore(folder), workers=workers, multiprocessing_context=method, seed=4)
        found.append(bytes_in(folder))
    assert len(found[0]) > 10
    for each in found[1:]:
        assert found[0] == each


def test_programs_random_generators_are_not_changed(tmp_path: Path) -> None:
    before = random.getstate(), str(np.random.get_state())
    packed(Noisy(30), LocalStore(tmp_path))
    assert before == (random.getstate(), str(np.random.get_state()))


def test_no_sample_is_being_read_after_packing(tmp_path: Path) -> None:
    packed(Noisy(30), LocalStore(tmp_path))
    with pytest.raises(RuntimeError, match="only while a ShmLoader reads a sample"):
        sample_rng()


def test_different_seed_gives_a_different_order_and_noise(tmp_path: Path) -> None:
    found = [bytes_in(tmp_path / str(seed)) for seed in (0, 1) if packed(Noisy(30), LocalStore(tmp_path / str(seed)), seed=seed)]
    assert found[0] != found[1]


@pytest.mark.slow(reason="hypothesis packs many datasets")
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=40), st.integers(10_240, 50_000), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_no_shard_exceeds_a_limit_and_none_could_have_taken_the_next_sample(sizes: list[int], maxsize: int, maxcount: int) -> None:
    with TemporaryDirectory() as folder:
        manifest = packed(Blobs(sizes), LocalStore(Path(folder)), maxsize=maxsize, maxcount=maxcount)
        found = samples_in(Path(folder), manifest)
        assert sorted(f"{number:08d}" for number in range(len(sizes))) == sorted(sample["__key__"] for sample in found)
        assert all(len(sample["bin"]) == sizes[int(sample["__key__"])] for sample in found)
        at = 0
        for shard in manifest.shards:
            assert shard.num_samples <= maxcount
            assert shard.nbytes <= maxsize or shard.num_samples == 1
            assert shard.nbytes == (Path(folder) / shard.name).stat().st_size
            at += shard.num_samples
            if at < len(found):
                following = 512 + -(-len(found[at]["bin"]) // 512) * 512
                members = sum(512 + -(-len(sample["bin"]) // 512) * 512 for sample in found[at - shard.num_samples : at])
                whole = -(-(members + following + 1024) // 10_240) * 10_240
                assert shard.num_samples == maxcount or whole > maxsize


def test_sample_larger_than_a_shard_gets_its_own_shard(tmp_path: Path) -> None:
    manifest = packed(Blobs([100, 90_000, 100]), LocalStore(tmp_path), maxsize=20_480)
    assert [shard.num_samples for shard in manifest.shards if shard.nbytes > 20_480] == [1]


def test_number_of_workers_is_limited_and_the_limit_is_logged(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    caplog.set_level(logging.INFO, "shmload")
    packed(Grey(10), LocalStore(tmp_path), workers=30)
    said = [message for message in caplog.messages if message.startswith("packing")]
    assert said == ["packing uses 1 of 30 workers, because there are no more processors or batches of samples"]


@pytest.mark.slow(reason="packs 200 samples into 40 shards")
@pytest.mark.parametrize("is_memory", [True, False])
def test_few_shards_wait_for_upload_in_unnamed_files(tmp_path: Path, is_memory: bool, monkeypatch: Any) -> None:
    most, spools = [0], []

    class Watched(Spool):
        def __init__(self, nbytes: int, folder: str | None) -> None:
            super().__init__(nbytes, folder)
            self.num_out = 0
            spools.append(self)

        def take(self) -> Any:
            self.num_out += 1
            most[0] = max(most[0], self.num_out)
            assert names_in(spool) == []
            return super().take()

        def give(self, file: Any) -> None:
            super().give(file)
            self.num_out -= 1

    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr(shard_packing, "Spool", Watched)
    packed(Grey(200), LocalStore(tmp_path / "out"), maxcount=5, spool_folder=None if is_memory else str(spool))
    assert [is_memory] == [each.is_memory for each in spools]
    assert 0 < most[0] <= NUM_THREADS + 1
    assert [each.num_out for each in spools] == [0]


def test_progress_is_reported_until_the_end(tmp_path: Path) -> None:
    told: list[Any] = []
    manifest = packed(Grey(50), LocalStore(tmp_path), maxcount=20, on_progress=told.append)
    assert (told[0].total, told[0].num_samples, told[0].nbytes, told[0].num_shards, told[0].num_found) == (50, 0, 0, 0, 0)
    assert (50, manifest.nbytes, 3) == (told[-1].num_samples, told[-1].nbytes, told[-1].num_shards)


class Broken(Grey):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise LookupError("no such photo")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_an_unreadable_sample_and_nothing_is_committed(tmp_path: Path, workers: int) -> None:
    with pytest.raises(LookupError, match=r"no such photo[\s\S]*sample 17 of the dataset"):
        packed(Broken(20), LocalStore(tmp_path), workers=workers)
    assert "manifest.json" not in names_in(tmp_path)


def test_documented_call_packs_into_a_folder(tmp_path: Path) -> None:
    manifest = upload_cv_dataset(
        Grey(9), client=None, bucket=str(tmp_path), base_folder="grey", maxsize=1e8, maxcount=100000, workers=0
    )
    assert names_of(manifest) == names_in(tmp_path / "grey")


REFUSED = [
    ({"maxsize": 1}, "maxsize is at least 10240 bytes, maxcount 1 and workers 0; got 1, 100000 and 30"),
    ({"maxcount": 0}, "maxsize is at least 10240 bytes, maxcount 1 and workers 0; got 100000000, 0 and 30"),
    ({"quality": 101}, "quality must be from 1 to 100, or None for lossless, got 101"),
    ({"bucket": ""}, "bucket is needed: its name, or without a client a folder or a URL"),
    ({"ds": []}, "a dataset of at least 1 sample is needed; this one is empty: check the path it reads"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_invalid_arguments_are_refused(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        upload_cv_dataset(**{"ds": Grey(3), "bucket": str(tmp_path), **given})
    assert text == str(caught.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("of", [dict, pandas.DataFrame])
def test_columns_in_place_of_samples_are_refused_with_the_remedy(of: Any, tmp_path: Path) -> None:
    columns = of({"text": ["a", "b"], "label": [1, 2]})
    with pytest.raises(TypeError, match=rf"this {of.__name__} gives its columns by name: give its rows, such as frame.to_dict"):
        upload_cv_dataset(columns, bucket=str(tmp_path))
    rows = pandas.DataFrame(columns).to_dict("records")
    assert upload_cv_dataset(rows, bucket=str(tmp_path), workers=0).num_samples == 2


def test_nothing_is_left_open(tmp_path: Path) -> None:
    packed(Grey(9), LocalStore(tmp_path / "a"))
    before = len(os.listdir("/proc/self/fd"))
    packed(Grey(200), LocalStore(tmp_path / "b"), maxcount=7)
    with pytest.raises(LookupError):
        packed(Broken(200), LocalStore(tmp_path / "c"), maxcount=7)
    assert before == len(os.listdir("/proc/self/fd"))
