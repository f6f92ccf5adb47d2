"""`shmload verify`: verdict, exit status, and reading again."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler, SequentialSampler
from typer.testing import CliRunner

from shmload import ShmLoader
from shmload.cli import app
from shmload.tools.audit.verify import read_folder
from tests.audit.audit_kit import batches_of, changed, run, written
from tests.audit.commanded import Data, Other

slow = pytest.mark.slow(reason="records a run and reads it again with two workers")


def recorded(folder: Path, dataset: Any = None, **more: Any) -> Path:
    run([ShmLoader(dataset or Data(), 4, seed=5, audit=folder, **more)])
    return folder


def command(*arguments: Any) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def swapped_content(folder: Path) -> None:
    """Swaps the bytes of two recorded batches, but not their indices."""
    (log,) = read_folder(folder)
    (a, first), (b, second) = list(batches_of(log, 0))[1:3]
    log.records[a], log.records[b] = changed(first, digest=second.digest), changed(second, digest=first.digest)
    written(folder, log)


def test_proven_run_exits_with_0(tmp_path: Path) -> None:
    status, out, _ = command(recorded(tmp_path))
    assert status == 0
    assert "Data, 24 samples, seed 5, 1 rank, 1 file" in out
    assert "batches, all ranks" in out
    assert out.rstrip().endswith("proven: every sample exactly once")


@pytest.mark.parametrize("seed", [5, None])
def test_samples_that_are_left_out_are_counted(seed: int | None, tmp_path: Path) -> None:
    with ShmLoader(list(range(50)), 8, seed=seed, drop_last=True, audit=tmp_path) as loader:
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 48
    status, out, _ = command(tmp_path, "--json")
    assert status == 0
    report = json.loads(out)
    assert (
        report["verdict"] == 'proven: every sample exactly once, except 2 of an epoch, which drop_last or uneven="drop" leaves out'
    )
    assert [epoch["num_left_out"] for epoch in report["loaders"][0]["epochs"]] == [2, 2]


def test_defects_are_listed_and_exit_with_1(tmp_path: Path) -> None:
    (log,) = read_folder(recorded(tmp_path))
    del log.records[2]
    written(tmp_path, log)
    status, out, _ = command(tmp_path)
    assert status == 1
    assert "MISSING epoch 0: positions 4-7 never came: steps 1 of rank 0; step 1 holds samples 4, 5, 6, 7" in out
    assert out.rstrip().endswith("defects")


def test_json_has_everything(tmp_path: Path) -> None:
    (log,) = read_folder(recorded(tmp_path))
    log.records.insert(3, log.records[3])
    written(tmp_path, log)
    status, out, _ = command(tmp_path, "--json")
    found = json.loads(out)
    assert (status, found["status"], found["num_found"]) == (1, 1, {"doubled": 1})
    assert found["findings"][0]["kind"] == "doubled"
    assert found["loaders"][0]["epochs"][0]["state"] == "defect"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "FOLDER is empty: give the folder that ShmLoader(audit=...) was given"),
        (["nowhere"], "nowhere: No such file or directory"),
        ([".", "--dataset", "nothing"], "--dataset: needs package.module:name, given 'nothing'"),
        ([".", "--dataset", "math:pi"], "--dataset math:pi: needs a dataset or a function that returns one, given float"),
        ([".", "--dataset", "tests.audit.commanded:Broken"], "calling it without arguments raised KeyError: 'no data'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, error = command(*arguments)
    assert (status, out) == (2, "")
    assert error.startswith("shmload verify: ")
    assert words in error
    assert len(error.splitlines()) == 1


def test_empty_folder_exits_with_3(tmp_path: Path) -> None:
    status, out, _ = command(tmp_path)
    assert status == 3
    assert "the folder holds no records" in " ".join(out.split())


@pytest.mark.parametrize("made", ["tests.audit.commanded:Data", "tests.audit.commanded:loader"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
def test_reading_delivered_batches_again_gives_the_same(tmp_path: Path, made: str, num_workers: int) -> None:
    status, out, _ = command(recorded(tmp_path, num_workers=num_workers), "--dataset", made)
    assert status == 0
    assert "6 batches read again" in out


def test_swapped_content_is_detected_by_reading_again(tmp_path: Path) -> None:
    swapped_content(recorded(tmp_path))
    assert command(tmp_path)[0] == 0  # indices and positions are correct, and only the data differ
    status, out, _ = command(tmp_path, "--dataset", "tests.audit.commanded:Data")
    assert status == 1
    assert out.count("CONTENT rank 0, epoch 0, step") == 2
    assert "its samples give bytes other than those delivered" in out.replace("\n", " ")


def test_different_data_are_detected_by_reading_again(tmp_path: Path) -> None:
    status, out, _ = command(recorded(tmp_path), "--dataset", "tests.audit.commanded:other", "--samples", 2)
    assert (status, out.count("CONTENT")) == (1, 2)


def test_batches_of_a_loader_with_another_seed_are_not_read_again(tmp_path: Path) -> None:
    status, out, _ = command(recorded(tmp_path), "--dataset", "tests.audit.commanded:loader_of_other_seed")
    assert status == 3  # nothing was compared
    assert "Data, 24 samples, seed 5: --dataset gave a loader with seed=6: not read again" in out.replace("\n", " ")


def test_dataset_of_another_length_is_not_read_again(tmp_path: Path) -> None:
    status, out, _ = command(recorded(tmp_path, [1, 2, 3]), "--dataset", "tests.audit.commanded:Data")
    assert status == 3  # nothing was compared
    assert "list, 3 samples, seed 5: --dataset has 24 samples: not read again" in out.replace("\n", " ")


@pytest.mark.parametrize("made", ["tests.audit.commanded:Data", "tests.audit.commanded:loader"])
def test_only_batches_of_its_own_loader_are_read_again(made: str, tmp_path: Path) -> None:
    run([ShmLoader(Data(), 4, seed=5, audit=tmp_path), ShmLoader(Other(), 4, seed=5, audit=tmp_path)])
    run([ShmLoader(Data(), 4, seed=7, audit=tmp_path)] if made.endswith("loader") else [])
    status, out, _ = command(tmp_path, "--dataset", made)
    assert status == 0
    assert "6 batches read again" in out
    assert "Other, 24 samples, seed 5: --dataset is of type Data: not read again" in out.replace("\n", " ")


def test_samples_that_cannot_be_read_again_are_reported_with_the_rest(tmp_path: Path) -> None:
    status, out, _ = command(recorded(tmp_path), "--dataset", "tests.audit.commanded:Unreadable")
    assert status == 3
    assert "1 of 6 batches could not be read again, the first of rank 0, epoch 0, step" in out.replace("\n", " ")
    assert "KeyError: 'gone'" in out
    assert "5 batches read again" in out


def test_augmentations_in_torch_mode_cannot_be_compared(tmp_path: Path) -> None:
    run([ShmLoader(Data(), 4, audit=tmp_path)])
    status, out, _ = command(tmp_path, "--dataset", "tests.audit.commanded:Data")
    assert status == 3
    assert "torch mode's augmentations cannot be repeated" in out.replace("\n", " ")


def test_augmentations_without_seed_samples_cannot_be_compared(tmp_path: Path) -> None:
    run([ShmLoader(Data(), 4, seed=5, seed_samples=False, audit=tmp_path)])
    status, out, _ = command(tmp_path, "--dataset", "tests.audit.commanded:Data")
    assert status == 3
    assert "augmentations with seed_samples=False cannot be repeated" in out.replace("\n", " ")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", [3, None])
def test_loop_that_ends_with_the_last_batch_has_left_nothing_out(seed: int | None, num_ranks: int, tmp_path: Path) -> None:
    for rank in range(num_ranks):
        sampler = DistributedSampler(range(24), num_ranks, rank) if num_ranks > 1 else SequentialSampler(range(24))
        with ShmLoader(Data(), 5, seed=seed, sampler=sampler, drop_last=True, audit=tmp_path) as loader:
            for _ in range(2):
                for _ in islice(loader, len(loader)):
                    pass
    status, out, _ = command(tmp_path)
    assert (status, "proven: every sample exactly once, except 4 of an epoch" in out) == (0, True), out


@pytest.mark.parametrize("seed", [3, None])
def test_run_without_a_batch_is_not_proven(seed: int | None, tmp_path: Path) -> None:
    with ShmLoader(Data(), 240, seed=seed, drop_last=True, audit=tmp_path) as loader:
        assert list(loader) == []
    status, out, _ = command(tmp_path)
    assert status == 3
    text = 'nothing was delivered, because drop_last or uneven="drop" leaves out all 24 samples: use smaller batches'
    assert f"epoch 0: {text}" in " ".join(out.split())


@pytest.mark.parametrize(("num_steps", "status"), [(6, 0), (2, 4)])
def test_ranks_that_each_read_all_samples_in_seed_mode(num_steps: int, status: int, tmp_path: Path) -> None:
    run(
        [
            ShmLoader(Data(), 4, seed=3, sampler=SequentialSampler(range(24)), audit=tmp_path, rank=rank, world_size=2)
            for rank in range(2)
        ],
        num_steps,
    )
    found, out, _ = command(tmp_path)
    assert found == status, out
    assert "each of the 2 ranks is delivered the whole dataset" in " ".join(out.split())
    assert ("of 48 samples" in out) == (status == 4)


class Thousand(Data):
    def __len__(self) -> int:
        return 1000


@pytest.mark.slow(reason="records a thousand samples")
@pytest.mark.parametrize("seed", [5, None], ids=["seed mode", "torch mode"])
def test_unfinished_epoch_is_reported_and_exits_with_4(tmp_path: Path, seed: int | None) -> None:
    def start(num_batches: int | None) -> dict[str, Any]:
        with ShmLoader(Thousand(), 8, seed=seed, shuffle=True, audit=tmp_path) as loader:
            for number, _ in enumerate(loader, 1):
                if number == num_batches:
                    break
            return loader.state_dict()

    start(62)
    status, out, _ = command(tmp_path)
    assert status == 4
    assert out.rstrip().endswith("epoch 0 so far: 496 of 1,000 samples, each once")
    assert "proven" not in out
    start(None)
    status, out, _ = command(tmp_path)
    assert status == 1
    assert out.count("DOUBLED") == 1
    assert "after 62 batches (496 samples) had been delivered. Load the state" in " ".join(out.split())
    assert not {"MISSING", "SWAPPED", "REPLAY"} & set(out.split())
    status, out, _ = command(tmp_path, "--allow-restarts")
    assert (status, "DOUBLED" in out) == (0, False)


def test_repeated_sample_in_an_unfinished_pass_is_detected(tmp_path: Path) -> None:
    with ShmLoader(Data(), 4, shuffle=True, audit=tmp_path) as loader:
        for number, _ in enumerate(loader, 1):
            if number == 3:
                break
    assert command(tmp_path)[0] == 4
    (log,) = read_folder(tmp_path)
    (_, first), (at, second) = list(batches_of(log, 0))[:2]
    log.records[at] = changed(second, keys=first.keys)
    written(tmp_path, log)
    status, out, _ = command(tmp_path)
    assert (status, "DOUBLED" in out) == (1, True)


@pytest.mark.parametrize("seed", [5, None], ids=["seed mode", "torch mode"])
def test_epoch_stopped_right_after_its_last_batch_is_complete(tmp_path: Path, seed: int | None) -> None:
    with ShmLoader(Data(), 4, seed=seed, shuffle=True, audit=tmp_path) as loader:
        for number, _ in enumerate(loader, 1):
            if number == 6:
                break
    assert command(tmp_path)[0] == 0
