"""What a loader records: the samples of the newest batch always, every batch where there is an audit."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_kit import Samples, judged, kinds, make, run, written
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler

from shmload import ShmLoader
from shmload.observe.audit.file import Batch
from shmload.observe.audit.verify import read_folder
from shmload.schedule.keyed import KeyedOrder

BOTH_MODES = pytest.mark.parametrize("seed", [None, 7], ids=["torch mode", "seed mode"])
PAIRS = [(i, -i) for i in range(11)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def batches(folder: Path) -> list[Batch]:
    return [record for log in read_folder(folder) for record in log.records if isinstance(record, Batch)]


# ------------------------------------------------------------ last_indices


@BOTH_MODES
@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}], ids=str)
def test_last_indices_are_those_of_the_batch_just_yielded(seed: int | None, more: dict[str, Any]) -> None:
    with ShmLoader(PAIRS, 3, shuffle=True, seed=seed, **more) as loader:
        assert loader.last_indices is None
        for numbers, _ in loader:
            assert isinstance(loader.last_indices, np.ndarray)
            assert np.int64 == loader.last_indices.dtype
            assert numbers.tolist() == loader.last_indices.tolist()


@BOTH_MODES
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_last_indices_know_what_was_skipped_and_substituted(seed: int | None, on_error: Any) -> None:
    loader = ShmLoader(Samples(12, frozenset({1, 5})), 3, seed=seed, on_error=on_error)
    for batch in loader:
        assert loader.last_indices is not None
        assert batch["index"].tolist() == list(loader.last_indices)


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 2])
def test_keys_of_a_sampler_are_given_as_they_are(seed: int | None, num_workers: int) -> None:
    data = {"a": 1, "b": 2, ("c", 3): 4}
    with ShmLoader(data, batch_sampler=[["a", ("c", 3)], ["b"]], seed=seed, num_workers=num_workers) as loader:
        assert [loader.last_indices for _ in loader] == [["a", ("c", 3)], ["b"]]


@BOTH_MODES
def test_a_sample_without_a_batch_is_a_list_of_one_key(seed: int | None) -> None:
    loader = ShmLoader(PAIRS[:2], None, seed=seed)
    assert [list(loader.last_indices) for _ in loader] == [[0], [1]]  # type: ignore[arg-type]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_has_no_indices(num_workers: int) -> None:
    with ShmLoader(Stream(), 2, num_workers=num_workers) as loader:
        assert [loader.last_indices for _ in loader] == [None] * 3


def test_batches_read_again_unseen_are_neither_told_nor_recorded(tmp_path: Path) -> None:
    options = {"snapshot_every_n_steps": 0, "shuffle": True}
    first = ShmLoader(PAIRS, 2, audit=tmp_path, **options)
    stream = iter(first)
    for _ in range(3):
        next(stream)
    second = ShmLoader(PAIRS, 2, audit=tmp_path, **options)
    second.load_state_dict(first.state_dict())
    resumed = iter(second)
    assert second.last_indices is None
    list(resumed)
    report = judged(tmp_path)
    assert (
        report.status,
        report.loaders[0].epochs[0].num_batches,
        report.loaders[0].epochs[0].num_superseded,
    ) == (0, 6, 0)


# ------------------------------------------------------------ files


def test_a_file_is_made_at_the_first_delivery_with_the_users_modes(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "audit"
    loader = make(folder)
    stream = iter(loader)
    assert files(folder) == []
    mask = os.umask(0o027)
    try:
        next(stream)
    finally:
        os.umask(mask)
    (path,) = files(folder)
    assert path.name.startswith("rank-0000-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_was_delivered_is_in_the_file_before_the_next_batch(tmp_path: Path) -> None:
    loader = make(tmp_path)
    for number, _ in enumerate(loader, 1):
        assert number == len(batches(tmp_path))


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.slow
def test_a_run_with_and_without_workers_is_proven(tmp_path: Path, seed: int | None, num_workers: int) -> None:
    with make(tmp_path, seed=seed, num_workers=num_workers, persistent_workers=num_workers > 0) as loader:
        run([loader])
        run([loader])
    report = judged(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert [epoch.num_samples for epoch in report.loaders[0].epochs] == [45, 45]


def test_workers_and_the_trainer_itself_deliver_the_same_digests(tmp_path: Path) -> None:
    for num_workers in (0, 2):
        with make(tmp_path / str(num_workers), num_workers=num_workers) as loader:
            run([loader])
    assert [b.digest for b in batches(tmp_path / "0")] == [b.digest for b in batches(tmp_path / "2")]


def test_a_copy_records_in_a_file_of_its_own(tmp_path: Path) -> None:
    loader = make(tmp_path)
    stream = iter(loader)
    next(stream)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.last_indices is None
        next(iter(other))
    next(stream)
    assert sorted(len(log.records) - 1 - ("resume" in str(log.records[0])) for log in read_folder(tmp_path)) == [
        1,
        1,
        2,
    ]


def test_a_forked_child_records_in_a_file_of_its_own(tmp_path: Path) -> None:
    stream = iter(make(tmp_path))
    next(stream)
    child = os.fork()
    if child == 0:
        next(stream)
        os._exit(0)
    assert (child, 0) == os.waitpid(child, 0)
    next(stream)
    assert sorted(sum(isinstance(r, Batch) for r in log.records) for log in read_folder(tmp_path)) == [1, 2]


def test_another_world_size_between_passes_begins_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShmLoader(PAIRS, 2, seed=1, audit=tmp_path)
    run([loader], 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run([loader], 1)
    assert sorted((log.header["rank"], log.header["world_size"]) for log in read_folder(tmp_path)) == [(0, 1), (1, 2)]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        PermissionError, match="needs a folder that this process can write to; give another, or leave audit"
    ):
        ShmLoader(PAIRS, audit=tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError, match="taken"):
        ShmLoader(PAIRS, audit=tmp_path / "taken")


@pytest.mark.parametrize("how", ["error", "short"])
def test_a_full_disk_ends_no_run_and_what_it_swallowed_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    loader = make(tmp_path)
    stream, write = iter(loader), os.write
    next(stream)

    def full(file: int, content: bytes) -> int:
        if how == "short":
            return write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(
        RuntimeWarning, match=r"rank-0000-.* cannot be written: .*No space left on device. Training goes on"
    ):
        next(stream)
    next(stream)  # said once
    monkeypatch.setattr(os, "write", write)
    run_rest = list(stream)
    assert len(run_rest) == 9
    report = judged(tmp_path)
    assert {"missing"} == kinds(report)
    assert "steps 1-2 are not recorded" in report.findings[0].text
    assert any("2 batches could not be recorded" in note for note in report.notes)


def test_a_file_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, really = iter(make(tmp_path)), os.open

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="batches from epoch 0, step 0 on are not recorded"):
        next(stream)
    monkeypatch.setattr(os, "open", really)
    list(stream)
    assert "steps 0 are not recorded" in judged(tmp_path).findings[0].text


class Touchy(dict):
    def items(self) -> Any:
        raise RuntimeError("no")


def touchy(samples: list[Any]) -> Any:
    return Touchy()


def test_an_object_that_resists_being_looked_at_ends_no_run(tmp_path: Path) -> None:
    run([make(tmp_path, collate_fn=touchy)])
    report = judged(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert any("12 batches hold objects that a digest leaves out" in note for note in report.notes)


# ------------------------------------------------------------ accounts and other orders


@BOTH_MODES
@pytest.mark.parametrize(
    ("on_error", "text", "counts"),
    [("skip", "sample 5 of row", (2, 0)), ("substitute", "came in place of 5, row", (0, 2))],
)
def test_bad_samples_are_accounted_for(
    tmp_path: Path, seed: int | None, on_error: Any, text: str, counts: tuple[int, int]
) -> None:
    run([make(tmp_path, dataset=Samples(12, frozenset({1, 5})), seed=seed, on_error=on_error)])
    report = judged(tmp_path)
    (epoch,) = report.loaders[0].epochs
    assert (0, *counts) == (report.status, epoch.num_skipped, epoch.num_substituted)
    assert text in "\n".join(report.accounted)


@BOTH_MODES
def test_a_batch_that_was_skipped_altogether_is_accounted_for(tmp_path: Path, seed: int | None) -> None:
    data = Samples(9, frozenset({3, 4, 5}))
    run([make(tmp_path, dataset=data, batch_size=3, seed=seed, shuffle=False, on_error="skip")])
    report = judged(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_skipped) == (0, 3)


class Failing(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no")
        return index


@BOTH_MODES
def test_a_batch_that_was_lost_to_an_error_is_missing(tmp_path: Path, seed: int | None) -> None:
    stream = iter(make(tmp_path, dataset=Failing(12), batch_size=3, seed=seed, shuffle=False))
    next(stream)
    with pytest.raises(ValueError, match="no"):
        next(stream)
    assert len(list(stream)) == 2
    report = judged(tmp_path)
    assert {"missing"} == kinds(report)
    assert "steps 1 are not recorded" in report.findings[0].text


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
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
    with loader() as third:  # from the end of a pass: the third pass is begun anew
        third.load_state_dict(state)
        run([third])
    report = judged(tmp_path)
    assert (report.status, report.findings) == (0, [])
    assert [(e.state, e.num_superseded) for e in report.loaders[0].epochs] == [
        ("proven", 0),
        ("proven", 1),
        ("proven", 2),
    ]


def test_a_distributed_sampler_is_judged_over_all_ranks(tmp_path: Path) -> None:
    loaders = [
        ShmLoader(PAIRS, 2, sampler=DistributedSampler(range(11), 2, rank), audit=tmp_path)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    run(loaders)
    report = judged(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_samples) == (0, 12)  # one is repeated: 11 are uneven
    files(tmp_path)[0].unlink()
    assert "nothing is recorded; is its file missing?" in judged(tmp_path).findings[0].text


def test_ranks_that_each_read_the_whole_dataset_are_noted(tmp_path: Path) -> None:
    run([make(tmp_path, rank, 2, seed=None) for rank in range(2)])
    report = judged(tmp_path)
    assert report.status == 0
    assert any("each of the 2 ranks is delivered the whole dataset" in note for note in report.notes)


@BOTH_MODES
def test_a_weighted_sampler_is_consistent_and_not_proven(tmp_path: Path, seed: int | None) -> None:
    sampler = WeightedRandomSampler([1.0] * 10 + [5.0], 11)
    run([ShmLoader(PAIRS, 2, sampler=sampler, seed=seed, audit=tmp_path)])
    report = judged(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].state) == (2, "consistent")
    assert "WeightedRandomSampler decides which samples come: only steps and replays were checked" in report.unjudged[0]


class Backwards(KeyedOrder):
    n = 11
    identity = "backwards"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> Any:
        return np.arange(10 - start, 10 - stop, -1)


def test_an_order_of_its_own_is_judged_by_its_positions(tmp_path: Path) -> None:
    loaders = [
        ShmLoader(PAIRS, 2, sampler=Backwards(), seed=1, rank=rank, world_size=2, audit=tmp_path) for rank in range(2)
    ]
    run(loaders)
    report = judged(tmp_path)
    assert (report.status, report.findings, report.loaders[0].epochs[0].num_samples) == (2, [], 11)
    assert "the order backwards decides which samples come: positions and replays were checked" in report.unjudged[0]
    log = read_folder(tmp_path)[0]
    del log.records[2]
    written(tmp_path, log)
    assert "steps 1 are not recorded; step 1 stands at position 4" in judged(tmp_path).findings[0].text


@pytest.mark.slow
def test_batches_in_any_order_are_proven_where_that_was_asked_for(tmp_path: Path) -> None:
    with make(tmp_path, seed=None, num_workers=2, in_order=False) as loader:
        run([loader])
    assert judged(tmp_path).status == 0


def test_an_iterable_dataset_is_consistent_and_not_proven(tmp_path: Path) -> None:
    run([ShmLoader(Stream(), 2, audit=tmp_path)])
    report = judged(tmp_path)
    assert report.status == 2
    assert "an iterable dataset has no indices" in report.unjudged[0]


def test_several_loaders_in_one_folder_are_judged_by_themselves(tmp_path: Path) -> None:
    run([make(tmp_path, dataset=[torch.ones(2) * i for i in range(n)]) for n in (8, 12)])
    report = judged(tmp_path)
    assert (report.status, len(report.loaders)) == (0, 2)
    assert any("which differ in n (" in note for note in report.notes)


def test_data_that_are_all_alike_cannot_be_judged_and_are_not_called_stale(tmp_path: Path) -> None:
    run([make(tmp_path, dataset=[torch.ones(2)] * 100)])
    report = judged(tmp_path)
    assert (report.status, report.findings) == (2, [])
    assert "24 batches have the bytes of others although their samples differ" in report.unjudged[0]
