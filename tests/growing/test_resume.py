"""Resuming an epoch of a growing cache: nothing is repeated or lost; and what happens when samples are gone."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.errors import StateMismatch
from shmload.growing import SampleCache
from shmload.growing.cache_file import CacheFile
from shmload.growing.epoch_snapshot import Snapshot, read_snapshot
from shmload.growing.gone_files import Gone
from tests.growing.growing_kit import dataset_of, epoch_of, loader_of, put, put_foreign, values_of


def taken(loader: Any, num_batches: int) -> list[int]:
    batches = iter(loader)
    return [value for _ in range(num_batches) for value in values_of(next(batches))]


def halved(loader: Any) -> tuple[Any, list[int]]:
    """Returns the state after two batches, and the samples of the remaining ones."""
    batches = iter(loader)
    next(batches)
    next(batches)
    return loader.state_dict(), epoch_of(batches)


@pytest.mark.parametrize("num_batches", [0, 1, 4, 5])
def test_resume_at_any_step_repeats_and_loses_nothing(cache: SampleCache, num_batches: int) -> None:
    put(cache, range(18))
    with loader_of(dataset_of(cache), shuffle=True) as loader:
        whole = epoch_of(loader)
        loader.set_epoch(0)
        seen = taken(loader, num_batches)
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) <= 1024
    put(cache, range(18, 20))  # later samples are not part of that epoch
    with loader_of(dataset_of(cache), shuffle=True) as loader:
        loader.load_state_dict(state)
        rest = epoch_of(loader)
    if num_batches < 5:
        assert whole == seen + rest
    else:
        assert list(range(20)) == sorted(rest)  # the next epoch, which was not settled yet


def test_resume_on_other_ranks_needs_the_same_global_batch(make_cache: Callable[..., SampleCache]) -> None:
    first, second = make_cache(), make_cache()
    put(first, range(19))
    with loader_of(dataset_of(first)) as loader:
        seen = taken(loader, 2)
        state = loader.state_dict()
    loaders = [loader_of(dataset_of(cache), rank=rank, world_size=2, batch_size=2) for rank, cache in enumerate((first, second))]
    for loader in loaders:
        loader.load_state_dict(state)
        seen += epoch_of(loader)
        loader.close()
    assert list(range(19)) == sorted(seen)
    with loader_of(dataset_of(first), batch_size=3) as loader, pytest.raises(StateMismatch, match="global_batch: saved 4, now 3"):
        loader.load_state_dict(state)


def test_unread_files_of_an_interrupted_epoch_are_kept_until_it_is_abandoned(cache: SampleCache) -> None:
    first = put(cache, range(8))
    with loader_of(dataset_of(cache)) as loader:
        next(iter(loader))
        assert cache.stats().num_leased == 1
        epoch_of(loader)
    assert cache.stats().num_leased == 0
    for number in range(1, 80):
        put(cache, range(20 * number, 20 * number + 20))
    assert first not in [file.name for file in cache.files()]


@pytest.mark.parametrize("is_copied", [False, True])
def test_resume_does_not_read_another_file_under_the_same_name(cache: SampleCache, is_copied: bool) -> None:
    path = put_foreign(cache.path / "again.tfrecord", range(12))
    with loader_of(dataset_of(cache)) as loader:
        state, rest = halved(loader)
    if is_copied:
        put_foreign(cache.path / ".hidden", range(12))
        (cache.path / ".hidden").rename(path)
        os.utime(path, ns=(0, read_snapshot(next(cache.path.glob(".growing/runs/*/epoch-0.json"))).files[0].mtime_ns))  # type: ignore[union-attr]  # the snapshot exists
    else:
        before = path.stat().st_mtime_ns
        path.write_bytes(put_foreign(cache.path / ".hidden", range(20, 32)).read_bytes())  # in place and with the same size
        os.utime(path, ns=(before, before + 1_000_000))  # the kernel's time may not have changed since
    with loader_of(dataset_of(cache)) as loader:
        if is_copied:
            loader.load_state_dict(state)
            assert rest == epoch_of(loader)
        else:
            with pytest.raises(StateMismatch, match=r"12 of its 12 samples are gone, evicted or replaced since: again.tfrecord"):
                loader.load_state_dict(state)


def test_two_loaders_of_a_dataset_have_their_own_epochs(cache: SampleCache) -> None:
    put(cache, range(18))
    dataset = dataset_of(cache)
    with loader_of(dataset, shuffle=True) as one, loader_of(dataset, shuffle=True) as other:
        epoch_of(one)
        batches = iter(one)
        next(batches)
        before = one.state_dict()
        assert before["children"]
        put(cache, range(18, 22))
        assert len(epoch_of(other)) == 18
        for _ in range(2):
            epoch_of(other)
        assert one.state_dict() == before
        other.close()
        assert cache.stats().num_leased == 1
        assert len(epoch_of(batches)) == 14


def resumed(cache: SampleCache, state: Any, missing: str) -> Any:
    loader = loader_of(dataset_of(cache, missing=missing), shuffle=True)
    loader.load_state_dict(state)
    return loader


@pytest.fixture
def interrupted(cache: SampleCache, tmp_path: Path) -> tuple[Any, list[int], list[int]]:
    """Returns the state after two of six batches, and the samples of these and of the others. Samples 0 to 5 of 24 are gone now."""
    gone = put(cache, range(6))
    put(cache, range(6, 12))
    put(cache, range(12, 24))
    with loader_of(dataset_of(cache), shuffle=True) as loader:
        batches = iter(loader)
        seen = values_of(next(batches)) + values_of(next(batches))
        state = loader.state_dict()
        rest = [value for batch in batches for value in values_of(batch)]
    (tmp_path / "cache" / gone).unlink()
    return state, seen, rest


def test_missing_samples_are_an_error_by_default(cache: SampleCache, interrupted: Any) -> None:
    with pytest.raises(StateMismatch) as caught:
        resumed(cache, interrupted[0], "error")
    text = str(caught.value)
    assert "epoch 0: 6 of its 24 samples are gone, evicted or replaced since: g000000000001-6-288.tfrecord (6). Remedy:" in text
    assert 'missing="skip"' in text


def test_skip_leaves_out_missing_samples(cache: SampleCache, interrupted: Any, caplog: pytest.LogCaptureFixture) -> None:
    state, _, rest = interrupted
    with caplog.at_level(logging.WARNING, "shmload"), resumed(cache, state, "skip") as loader:
        batches = list(map(values_of, loader))
    assert "6 of its 24 samples are gone" in caplog.text
    assert "they are left out" in caplog.text
    kept = [value for value in rest if value >= 6]
    assert kept == [value for batch in batches for value in batch if value in kept]
    assert len(batches) == 4  # as many as other ranks have


def test_sample_that_keeps_ranks_in_step_does_not_count_as_valid(cache: SampleCache, interrupted: Any) -> None:
    state, _, rest = interrupted
    found = []
    for rank in range(4):
        with loader_of(dataset_of(cache, missing="skip"), shuffle=True, batch_size=1, rank=rank, world_size=4) as loader:
            loader.load_state_dict(state)
            batches = [(values_of(batch), loader.valid) for batch in loader]
            assert [len(values) for values, _ in batches] == [1] * 4
            found += [value for values, valid in batches for value in values[:valid]]
    assert sorted(found) == sorted(value for value in rest if value >= 6)


def test_substitute_replaces_missing_samples_with_others_of_the_epoch(cache: SampleCache, interrupted: Any) -> None:
    state, _, rest = interrupted
    with resumed(cache, state, "substitute") as loader:
        values = epoch_of(loader)
        again = resumed(cache, loader.state_dict() | state, "substitute")
    assert len(rest) == len(values)
    for was, now in zip(rest, values, strict=True):
        assert now == was if was >= 6 else now in range(6, 24)
    assert values == epoch_of(again)
    again.close()


def test_epoch_without_any_sample_left_cannot_be_resumed(cache: SampleCache, interrupted: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "cache").glob("*tfrecord*"):
        path.unlink()
    with pytest.raises(StateMismatch, match="begin the next epoch with set_epoch: nothing of this one is left to read"):
        resumed(cache, interrupted[0], "skip")


def test_state_of_another_folder_is_refused(make_cache: Callable[..., SampleCache], tmp_path: Path) -> None:
    cache = make_cache()
    put(cache, range(8))
    with loader_of(dataset_of(cache)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        SampleCache(tmp_path / "other", 1 << 16) as other,
        loader_of(dataset_of(other)) as loader,
        pytest.raises(StateMismatch, match="of epoch 0, which is not there in"),
    ):
        loader.load_state_dict(state)


FILES = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(FILES)
def test_substitutes_exist_and_are_used_evenly(drawn: list[tuple[int, bool]]) -> None:
    files = tuple(CacheFile(f"{number}", n, 1, number) for number, (n, _) in enumerate(drawn))
    snapshot = Snapshot(3, files)
    gone = Gone(snapshot, tuple(is_gone for _, is_gone in drawn))
    there = {number for number, (_, is_gone) in enumerate(drawn) if not is_gone}
    records = np.arange(snapshot.n)
    owner = np.repeat(np.arange(len(files)), [n for n, _ in drawn])
    assert [owner[record] not in there for record in records] == gone.mask(records).tolist()
    assert sum(gone.mask(records)) == gone.num_samples
    if there:
        substituted = gone.substituted(records)
        assert (substituted[~gone.mask(records)] == records[~gone.mask(records)]).all()
        assert set(owner[substituted].tolist()) <= there
        uses = np.bincount(substituted[gone.mask(records)], minlength=snapshot.n)[~gone.mask(records)]
        assert uses.max() - uses.min() <= 1


@settings(max_examples=40, deadline=None)
@given(FILES)
def test_snapshot_round_trips_and_locates_every_record(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, bool]]
) -> None:
    snapshot = Snapshot(5, tuple(CacheFile(f"f{number}", n, 10 * n, number) for number, (n, _) in enumerate(drawn)))
    path = tmp_path_factory.mktemp("run") / "epoch-5.json"
    path.write_bytes(snapshot.dumps())
    assert snapshot == read_snapshot(path)
    places = [snapshot.place(record) for record in range(snapshot.n)]
    assert [(file.name, local) for file in snapshot.files for local in range(file.num_records)] == places


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow(reason="starts workers five times"))])
def test_running_loader_can_load_a_state_of_another_run(cache: SampleCache, tmp_path: Path, num_workers: int) -> None:
    put(cache, range(18))
    with loader_of(dataset_of(cache, run="first"), shuffle=True) as loader:
        state, rest = halved(loader)
    os.utime(put_foreign(tmp_path / "cache" / "older.tfrecord", range(18, 36)), (1, 1))  # is the first file of the next snapshot
    with loader_of(dataset_of(cache, run="second"), shuffle=True, num_workers=num_workers) as loader:
        own, own_rest = halved(loader)
        for asked, expected in ((state, rest), (own, own_rest)):
            loader.load_state_dict(own)
            taken(loader, 1)
            loader.load_state_dict(asked)
            assert epoch_of(loader) == expected


def test_missing_samples_of_another_run_are_forgotten(cache: SampleCache, interrupted: Any) -> None:
    with loader_of(dataset_of(cache), shuffle=True) as loader:
        whole, rest = halved(loader)
    with resumed(cache, interrupted[0], "skip") as loader:
        loader.load_state_dict(whole)
        assert epoch_of(loader) == rest
