"""Real runs with every kind of order are proven, accounted for, or reported as impossible to check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler

from shmload import LengthBuckets, ShmLoader
from shmload.audit.audit_file import Event
from shmload.schedule.keyed_order import KeyedOrder
from shmload.tools.audit.verify import read_folder
from tests.audit.audit_kit import Samples, kinds, make, run, verdict_of, written

slow = pytest.mark.slow(reason="starts two workers for each loader, and checks the run")
BOTH_MODES = pytest.mark.parametrize("seed", [None, 7], ids=["torch mode", "seed mode"])
PAIRS = [(i, -i) for i in range(11)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


@BOTH_MODES
@pytest.mark.parametrize(
    ("on_error", "text", "counts"), [("skip", "sample 5 of row", (2, 0)), ("substitute", "came in place of 5, row", (0, 2))]
)
def test_bad_samples_are_accounted_for(tmp_path: Path, seed: int | None, on_error: Any, text: str, counts: tuple[int, int]) -> None:
    run([make(tmp_path, dataset=Samples(12, frozenset({1, 5})), seed=seed, on_error=on_error)])
    report = verdict_of(tmp_path)
    (epoch,) = report.loaders[0].epochs
    assert (0, *counts) == (report.status, epoch.num_skipped, epoch.num_substituted)
    assert text in "\n".join(report.accounted)


@BOTH_MODES
def test_completely_skipped_batch_is_accounted_for(tmp_path: Path, seed: int | None) -> None:
    data = Samples(9, frozenset({3, 4, 5}))
    run([make(tmp_path, dataset=data, batch_size=3, seed=seed, shuffle=False, on_error="skip")])
    report = verdict_of(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_skipped) == (0, 3)


class Failing(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no")
        return index


@BOTH_MODES
def test_batch_lost_by_an_error_is_missing(tmp_path: Path, seed: int | None) -> None:
    stream = iter(make(tmp_path, dataset=Failing(12), batch_size=3, seed=seed, shuffle=False))
    next(stream)
    with pytest.raises(ValueError, match="no"):
        next(stream)
    assert len(list(stream)) == 2
    report = verdict_of(tmp_path)
    assert {"missing"} == kinds(report)
    assert "steps 1 " in report.findings[0].text


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
def test_torch_mode_resumed_in_another_process_is_proven(tmp_path: Path, num_workers: int) -> None:
    def loader() -> ShmLoader[Any]:
        return make(tmp_path, seed=None, num_workers=num_workers)

    with loader() as first:
        run([first])
        stream = iter(first)
        next(stream)
        state = first.state_dict()
        next(stream)
    with loader() as second:
        second.load_state_dict(state)
        run([second])
        state = second.state_dict()
        run([second], 2)
    with loader() as third:  # from the end of a pass, so that a third pass begins
        third.load_state_dict(state)
        run([third])
    report = verdict_of(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert [(e.state, e.num_superseded) for e in report.loaders[0].epochs] == [("proven", 0), ("proven", 1), ("proven", 2)]


def test_distributed_sampler_is_checked_over_all_ranks(tmp_path: Path) -> None:
    loaders = [
        ShmLoader(PAIRS, 2, sampler=DistributedSampler(range(11), 2, rank), audit=tmp_path)  # type: ignore[arg-type]  # a range is a dataset
        for rank in range(2)
    ]
    run(loaders)
    report = verdict_of(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_samples) == (0, 12)  # one sample is repeated, because 11 is odd
    files(tmp_path)[0].unlink()
    assert "nothing is recorded; is its file missing?" in verdict_of(tmp_path).findings[0].text


def test_ranks_that_each_read_the_whole_dataset_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        run([ShmLoader(Samples(), 2, shuffle=True, audit=tmp_path)])
    report = verdict_of(tmp_path)
    assert report.status == 0
    assert any("each of the 2 ranks is delivered the whole dataset" in note for note in report.notes)


@BOTH_MODES
def test_end_of_a_pass_is_recognized_by_a_later_state(tmp_path: Path, seed: int | None) -> None:
    def loader() -> ShmLoader[Any]:
        return ShmLoader(PAIRS, 2, sampler=list(range(11)), seed=seed, audit=tmp_path)

    first = loader()
    run([first], 6)  # all batches, but not the StopIteration
    again = loader()
    again.load_state_dict(first.state_dict())
    run([again])
    report = verdict_of(tmp_path)
    assert report.status != 1, report.findings
    # in torch mode a pass whose StopIteration was not raised is continued, and is empty
    assert [epoch.num_batches for epoch in report.loaders[0].epochs] == ([6] if seed is None else [6, 6])


@BOTH_MODES
def test_weighted_sampler_is_consistent_but_not_proven(tmp_path: Path, seed: int | None) -> None:
    sampler = WeightedRandomSampler([1.0] * 10 + [5.0], 11)
    run([ShmLoader(PAIRS, 2, sampler=sampler, seed=seed, audit=tmp_path)])
    report = verdict_of(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].state) == (3, "consistent")
    assert "WeightedRandomSampler decides which samples come: only steps and replays were checked" in report.unjudged[0]


class Backwards(KeyedOrder):
    n = 11
    identity = "backwards"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> Any:
        return np.arange(10 - start, 10 - stop, -1)


def test_custom_order_is_checked_by_its_positions(tmp_path: Path) -> None:
    loaders = [ShmLoader(PAIRS, 2, sampler=Backwards(), seed=1, rank=rank, world_size=2, audit=tmp_path) for rank in range(2)]
    run(loaders)
    report = verdict_of(tmp_path)
    assert (report.status, report.findings, report.loaders[0].epochs[0].num_samples) == (3, [], 11)
    assert "backwards decides which samples come: only positions and replays were checked" in report.unjudged[0]
    log = read_folder(tmp_path)[0]
    del log.records[2]
    written(tmp_path, log)
    assert "positions 4-5 never came: steps 1 of rank 0" in verdict_of(tmp_path).findings[0].text


@slow
def test_batches_out_of_order_are_proven_if_in_order_is_false(tmp_path: Path) -> None:
    with make(tmp_path, seed=None, num_workers=2, in_order=False) as loader:
        run([loader])
    assert verdict_of(tmp_path).status == 0


@slow
def test_batches_delivered_early_are_not_rolled_back_by_a_state(tmp_path: Path) -> None:
    reads, goes_on = os.pipe()

    def held_up(worker: int) -> None:
        assert worker or os.read(reads, 1)

    def loader(worker_init_fn: Any = None) -> ShmLoader[Any]:
        options = {"in_order": False, "worker_init_fn": worker_init_fn, "multiprocessing_context": "fork"}
        return make(tmp_path, seed=None, num_workers=2, **options)

    with loader(held_up) as first:
        batches = iter(first)
        for _ in range(2):
            next(batches)  # of the other worker
        state = first.state_dict()
        os.write(goes_on, b"!")
    with loader() as second:
        second.load_state_dict(state)
        run([second])
    os.close(reads)
    os.close(goes_on)
    assert (verdict_of(tmp_path).status, verdict_of(tmp_path).findings) == (0, [])
    (resumed,) = [one for log in read_folder(tmp_path) for one in log.records if isinstance(one, Event) and one.kind == "resume"]
    assert (resumed.details["step"], resumed.details["beyond"]) == (0, [1, 3])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
def test_skipped_batches_of_an_iterable_dataset_are_counted_once(tmp_path: Path, num_workers: int) -> None:
    def loader() -> ShmLoader[Any]:
        return ShmLoader(Stream(), 2, num_workers=num_workers, audit=tmp_path)

    with loader() as first:
        run([first], 2)
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        run([second])
    report = verdict_of(tmp_path)
    assert report.findings == []
    assert report.loaders[0].epochs[0].num_batches == 3 * max(num_workers, 1)


def test_iterable_dataset_is_consistent_but_not_proven(tmp_path: Path) -> None:
    run([ShmLoader(Stream(), 2, audit=tmp_path)])
    report = verdict_of(tmp_path)
    assert report.status == 3
    assert "an iterable dataset has no indices" in report.unjudged[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_an_iterable_datasets_short_last_batch_are_counted(tmp_path: Path, num_workers: int) -> None:
    run([ShmLoader(Stream(), 3, num_workers=num_workers, audit=tmp_path)])
    (epoch,) = verdict_of(tmp_path).loaders[0].epochs
    assert (epoch.num_batches, epoch.num_samples, epoch.num_padding) == (2, 5, 0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pass_of_an_iterable_dataset_too_short_for_a_batch_is_not_missing(tmp_path: Path, num_workers: int) -> None:
    run([ShmLoader(Stream(), 6, drop_last=True, num_workers=num_workers, audit=tmp_path)])
    report = verdict_of(tmp_path)
    assert report.findings == []
    assert report.loaders[0].epochs[0].state == "consistent"


def test_rank_without_a_batch_does_not_count_as_a_missing_file(tmp_path: Path) -> None:
    def loader(rank: int) -> ShmLoader[Any]:
        batches = LengthBuckets([1, 2, 3], batch_size=4)
        return ShmLoader(PAIRS[:3], batch_sampler=batches, seed=7, uneven="exact", rank=rank, world_size=2, audit=tmp_path)

    run([loader(rank) for rank in range(2)])
    assert len(files(tmp_path)) == 2
    report = verdict_of(tmp_path)
    assert (report.findings, report.loaders[0].epochs[0].num_batches) == ([], 1)


def test_several_loaders_in_one_folder_are_checked_separately(tmp_path: Path) -> None:
    run([make(tmp_path, dataset=[torch.ones(2) * i for i in range(n)]) for n in (8, 12)])
    report = verdict_of(tmp_path)
    assert (report.status, len(report.loaders)) == (0, 2)
    assert any("2 loaders with different arguments" in note for note in report.notes)
