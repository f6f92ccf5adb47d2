"""A run's snapshots: one for all ranks, whichever rank is first; kept for resumes, but not forever."""

from __future__ import annotations

import fcntl
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmload.errors import ShardCorrupt, StateMismatch
from shmload.growing import SampleCache
from shmload.growing.cache_file import CacheFile, next_generation
from shmload.growing.epoch_snapshot import Snapshot, read_snapshot, snapshot_path
from shmload.growing.growing_run import KEPT_SNAPSHOTS, GrowingRun, forget_runs, run_name
from tests.growing.growing_kit import dataset_of, epoch_of, loader_of, put


def snapshot(epoch: int, name: str = "a") -> Snapshot:
    return Snapshot(epoch, (CacheFile(name, 1, 1, 1),))


def _write(folder: Path, rank: int, start: Any, answers: Any) -> None:
    run = GrowingRun(folder, "job", None)
    start.wait()  # all have joined
    is_ours = run.write(snapshot(0, f"rank {rank}"))
    answers.put((is_ours, run.read(0).files[0].name))  # type: ignore[union-attr]  # it exists
    start.wait()  # no rank leaves before all are here


@pytest.mark.slow(reason="starts six ranks")
def test_one_of_several_settling_ranks_wins_and_all_read_its_snapshot(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(6), context.Queue()
    ranks = [context.Process(target=_write, args=(tmp_path, rank, start, answers)) for rank in range(6)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    answers.close()
    answers.join_thread()
    assert sum(is_ours for is_ours, _ in found) == 1
    assert len({name for _, name in found}) == 1


def test_new_run_of_an_old_name_discards_snapshots_and_a_resumed_one_keeps_them(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, "job", None)
    for epoch in range(4):
        assert run.write(snapshot(epoch))
    joined = GrowingRun(tmp_path, "job", None)  # another rank, so the run has a member
    assert joined.read(3) is not None
    joined.leave()
    run.leave()
    resumed = GrowingRun(tmp_path, "job", 2)
    assert [resumed.read(epoch) is not None for epoch in range(4)] == [True, True, True, False]
    resumed.leave()
    new_run = GrowingRun(tmp_path, "job", None)
    assert [new_run.read(epoch) for epoch in range(4)] == [None] * 4


def test_settled_snapshot_does_not_change(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, "job", None)
    assert run.write(snapshot(0, "a"))
    assert not run.write(snapshot(0, "b"))
    assert snapshot(0, "a") == run.read(0)
    assert [snapshot_path(run.path, 0)] == [path for path in run.path.iterdir() if "epoch" in path.name]  # no partial file is left


def test_number_of_kept_snapshots_is_limited(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, "job", None)
    for epoch in range(KEPT_SNAPSHOTS + 3):
        run.write(snapshot(epoch))
    kept = [epoch for epoch in range(KEPT_SNAPSHOTS + 3) if run.read(epoch) is not None]
    assert list(range(3, KEPT_SNAPSHOTS + 3)) == kept


def test_run_without_any_sample_left_is_deleted(tmp_path: Path) -> None:
    for name, file in (("gone", "a"), ("there", "b"), ("attended", "a")):
        run = GrowingRun(tmp_path, name, None)
        run.write(snapshot(0, file))
        if name != "attended":
            run.leave()
    forget_runs(tmp_path, lambda file: file == "b")
    assert {"there", "attended"} == {path.name for path in (tmp_path / ".growing" / "runs").iterdir()}
    run.leave()


def test_run_deleted_while_a_rank_joins_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, num_forgotten = fcntl.flock, 0

    def flocked(fd: int, kind: int) -> None:
        nonlocal num_forgotten
        if kind == fcntl.LOCK_SH and num_forgotten < 2:  # changing a lock releases it for a moment
            num_forgotten += 1
            flock(fd, fcntl.LOCK_UN)
            forget_runs(tmp_path, lambda name: True)
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flocked)
    run = GrowingRun(tmp_path, "0123456789ab", None)
    assert num_forgotten == 2
    assert run.write(snapshot(0))
    forget_runs(tmp_path, lambda name: False)
    assert run.read(0) is not None
    run.leave()


def test_damaged_snapshot_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "epoch-0.json"
    path.write_bytes(b'{"version": 1')
    with pytest.raises(ShardCorrupt, match=f"{path}: is not a snapshot of a growing cache: "):
        read_snapshot(path)
    path.write_bytes(b'{"version": 9}')
    with pytest.raises(ShardCorrupt, match="it has version 9, this shmload reads 1"):
        read_snapshot(path)


def test_run_name_is_shared_by_the_ranks_of_a_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_name(None, 1) != run_name(None, 1)
    assert run_name("mine", 1) == run_name("mine", 8) != run_name("yours", 8)
    assert run_name(None, 2) == run_name(None, 2)  # the parent is the same
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    of_a = run_name(None, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert of_a != run_name(None, 2)


def test_generation_numbers_are_never_reused(tmp_path: Path) -> None:
    assert [next_generation(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_two_datasets_share_a_run_only_by_name(make_cache: Callable[..., SampleCache]) -> None:
    cache = make_cache()
    put(cache, range(4))
    with loader_of(dataset_of(cache)) as one, loader_of(dataset_of(cache, run="r")) as two:
        assert epoch_of(one) == epoch_of(two) == list(range(4))
        put(cache, range(4, 8))
        with loader_of(dataset_of(cache)) as other, loader_of(dataset_of(cache, run="r")) as joined:
            assert list(range(8)) == sorted(epoch_of(other))
            assert list(range(4)) == epoch_of(joined)  # the epoch 0 of the run


def test_snapshot_that_no_rank_began_or_holds_is_settled_again(make_cache: Callable[..., SampleCache]) -> None:
    first, second = make_cache(), make_cache()
    put(first, range(8))
    one = loader_of(dataset_of(first, run="r"), rank=0, world_size=2)
    two = loader_of(dataset_of(second, run="r"), rank=1, world_size=2)
    assert epoch_of(one) == [0, 1, 2, 3]
    assert epoch_of(two) == [4, 5, 6, 7]
    assert len(one) == 1  # the first rank settles epoch 1 ahead of the second, and is killed
    first.close()
    (file,) = second.files()
    (second.path / file.name).unlink()
    put(second, range(10, 18))
    assert epoch_of(two) == [14, 15, 16, 17]
    with loader_of(dataset_of(make_cache(), run="r"), rank=0, world_size=2) as again:
        again.set_epoch(1)
        assert epoch_of(again) == [10, 11, 12, 13]
        (file,) = second.files()
        (second.path / file.name).unlink()  # now the second has read the file
        with loader_of(dataset_of(second, run="r"), rank=1, world_size=2) as third:
            third.set_epoch(1)
            with pytest.raises(StateMismatch, match="8 of its 8 samples are gone"):
                epoch_of(third)
    one.close()
    two.close()
