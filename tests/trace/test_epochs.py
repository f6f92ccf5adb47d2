"""Metrics of each epoch: the callback, the log line, TensorBoard."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmload.metrics
from shmload import ShmLoader
from shmload.batch.ragged_forms import Jagged, Padded
from shmload.metrics import EpochMetrics, summary_line, to_log, to_tensorboard
from shmload.modes.epoch_metrics import nbytes_of, rows_of
from tests.trace.trace_kit import Broken, Growing, Plain, Rows, Stream, run

MODES = pytest.mark.parametrize("seed", [1, None])
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])

EPOCH: EpochMetrics = {
    "epoch": 3,
    "rank": 0,
    "world_size": 1,
    "is_complete": True,
    "batches": 1200,
    "samples": 76_800,
    "nbytes": 250_000_000,
    "wall_s": 12.5,
    "samples_per_s": 6144.0,
    "nbytes_per_s": 2e7,
    "wait_share": 0.123,
    "wait_p50_s": 0.00123,
    "wait_p99_s": 0.0456,
    "workers_busy_share": 0.871,
    "num_bad_samples": 2,
    "num_restarts": 1,
}


def recorded_epochs(loader: ShmLoader[Any]) -> list[EpochMetrics]:
    """Returns the list to which the loader's epoch metrics are appended."""
    epochs: list[EpochMetrics] = []
    loader.on_epoch_end(epochs.append)
    return epochs


@MODES
@WORKERS
def test_each_epoch_is_reported_once_with_what_was_delivered(seed: int | None, num_workers: int) -> None:
    with ShmLoader(Rows(), 8, num_workers=num_workers, seed=seed) as loader:
        epochs = recorded_epochs(loader)
        for number in range(2):
            assert len(epochs) == number
            assert run(loader) == 8
    assert len(epochs) == 2
    for number, epoch in enumerate(epochs):
        assert (epoch["epoch"], epoch["is_complete"], epoch["batches"], epoch["samples"]) == (number, True, 8, 60)
        assert epoch["nbytes"] == (960 if num_workers == 0 else 1024)  # fields in a slot are aligned to 64 bytes
        assert 0 < epoch["wait_p50_s"] <= epoch["wait_p99_s"] <= epoch["wall_s"] * 1.04
        assert 0 < epoch["wait_share"] <= 1
        assert epoch["samples_per_s"] == pytest.approx(60 / epoch["wall_s"])
        assert epoch["nbytes_per_s"] == pytest.approx(epoch["nbytes"] / epoch["wall_s"])
        assert (epoch["num_bad_samples"], epoch["num_restarts"], epoch["rank"], epoch["world_size"]) == (0, 0, 0, 1)
        busy = epoch["workers_busy_share"]
        assert busy is None if num_workers == 0 else 0 <= busy <= 1  # type: ignore[operator]  # a number then


@MODES
@WORKERS
def test_abandoned_epoch_is_reported_when_its_loop_ends(seed: int | None, num_workers: int) -> None:
    with ShmLoader(Rows(), 8, num_workers=num_workers, seed=seed) as loader:
        epochs = recorded_epochs(loader)
        for i, _ in enumerate(loader):
            if i == 2:
                break
        assert [(e["epoch"], e["is_complete"], e["batches"], e["samples"]) for e in epochs] == [(0, False, 3, 24)]
        assert 0 < epochs[0]["wall_s"] < 60  # up to the newest batch
        run(loader)
    assert [(e["epoch"], e["is_complete"], e["batches"]) for e in epochs] == [(0, False, 3), (1, True, 8)]


@MODES
def test_epoch_of_a_kept_iterator_is_reported_at_the_next_pass_or_at_close(seed: int | None) -> None:
    with ShmLoader(Rows(), 8, seed=seed) as loader:
        epochs = recorded_epochs(loader)
        first = iter(loader)
        next(first)
        second = iter(loader)
        assert [e["batches"] for e in epochs] == [1]
        next(second)
        loader.close()
        assert [(e["batches"], e["is_complete"]) for e in epochs] == [(1, False), (1, False)]
    del first, second
    gc.collect()
    assert len(epochs) == 2


def test_abandoned_pass_of_persistent_workers_is_reported_at_the_next_pass() -> None:
    with ShmLoader(Rows(), 8, num_workers=1, persistent_workers=True) as loader:
        epochs = recorded_epochs(loader)
        next(iter(loader))
        assert epochs == []
        run(loader)
    assert [(e["batches"], e["is_complete"]) for e in epochs] == [(1, False), (8, True)]


def test_dropped_pass_without_batches_is_not_reported() -> None:
    loader = ShmLoader(Rows(), 8, seed=1)
    epochs = recorded_epochs(loader)
    iter(loader)
    assert epochs == []


@MODES
def test_empty_epoch_is_reported(seed: int | None) -> None:
    loader = ShmLoader(Rows(3), 8, drop_last=True, seed=seed)
    epochs = recorded_epochs(loader)
    run(loader)
    assert [(e["batches"], e["samples_per_s"], e["wait_share"], e["wait_p99_s"]) for e in epochs] == [(0, 0, 0, 0)]
    assert "0 batches, 0 samples in 0.00 s" in summary_line(epochs[0])


@MODES
def test_resumed_epoch_reports_only_its_own_batches(seed: int | None) -> None:
    loader = ShmLoader(Rows(), 8, seed=seed)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed = ShmLoader(Rows(), 8, seed=seed)
    resumed.load_state_dict(loader.state_dict())
    epochs = recorded_epochs(resumed)
    run(resumed)
    assert [(e["epoch"], e["batches"]) for e in epochs] == [(0, 3)]


@WORKERS
def test_bad_samples_are_counted_per_epoch(num_workers: int) -> None:
    with ShmLoader(Broken(), 10, seed=1, num_workers=num_workers, on_error="skip") as loader:
        epochs = recorded_epochs(loader)
        run(loader)
        run(loader)
    assert [(e["samples"], e["num_bad_samples"]) for e in epochs] == [(54, 6), (54, 6)]


def test_restarts_are_counted_per_epoch() -> None:
    with ShmLoader(Rows(), 8, seed=1, num_workers=1) as loader:
        epochs = recorded_epochs(loader)
        run(loader)
        iterator = iter(loader)
        next(iterator)
        os.kill(loader.stats()["workers"][0]["pid"], 9)
        for _ in iterator:
            pass
        run(loader)
    assert [e["num_restarts"] for e in epochs] in ([0, 1, 0], [0, 0, 1])  # it may die after its last batch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_an_iterable_dataset_are_counted(num_workers: int) -> None:
    with ShmLoader(Stream(), 4, num_workers=num_workers) as loader:
        epochs = recorded_epochs(loader)
        run(loader)
    assert [(e["batches"], e["samples"]) for e in epochs] == [(3, 10)]


def test_persistent_workers_in_torch_mode_are_measured_per_epoch() -> None:
    with ShmLoader(Rows(), 8, num_workers=1, persistent_workers=True) as loader:
        epochs = recorded_epochs(loader)
        run(loader)
        run(loader)
    assert epochs[0]["nbytes"] == epochs[1]["nbytes"]


def test_callback_is_called_from_the_next_pass_on_and_may_be_a_decorator() -> None:
    loader = ShmLoader(Rows(), 8, seed=1)
    seen: list[int] = []
    iterator = iter(loader)

    @loader.on_epoch_end
    def note(metrics: EpochMetrics) -> None:
        seen.append(metrics["epoch"])

    for _ in iterator:
        pass
    assert (seen, note.__name__) == ([], "note")
    run(loader)
    assert seen == [1]


def test_failing_callback_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    loader = ShmLoader(Rows(), 8, seed=1)
    loader.on_epoch_end(lambda metrics: 1 / 0)
    epochs = recorded_epochs(loader)
    run(loader)
    assert len(epochs) == 1
    assert "a callback of on_epoch_end failed; training continues" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_copy_of_a_loader_has_no_callbacks() -> None:
    loader = ShmLoader(Rows(), 8, seed=1)
    epochs = recorded_epochs(loader)
    copied = pickle.loads(pickle.dumps(loader))
    run(copied)
    assert epochs == []


def test_nothing_is_measured_without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.modes.epoch_metrics.EpochWatch", None)
    run(ShmLoader(Rows(), 8, seed=1))
    run(ShmLoader(Rows(), 8))


# ---------------------------------------------------------------- the line


def test_log_line_contains_all_metrics() -> None:
    assert summary_line(EPOCH) == (
        "epoch 3: 1,200 batches, 76,800 samples in 12.50 s: 6,144 samples/s, 20.0 MB/s; waited 12% (p50 1.23 ms, p99 45.6 ms); "
        "workers busy 87%; 2 bad samples, 1 restarts"
    )
    other = EpochMetrics(**{**EPOCH, "rank": 1, "world_size": 8, "is_complete": False, "workers_busy_share": None})  # type: ignore[typeddict-item]  # mypy does not follow **
    assert summary_line(other).startswith("rank 1, epoch 3, left early: 1,200 batches")
    assert "; no workers; " in summary_line(other)


def test_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loader = ShmLoader(Rows(), 8, seed=1)
    loader.on_epoch_end(to_log)
    with caplog.at_level(logging.INFO, "shmload"):
        run(loader)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("shmload", "INFO")
    assert record.getMessage().startswith("epoch 0: 8 batches, 60 samples in ")


def test_line_is_enabled_by_the_environment(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_SUMMARY", "1")
    loader = ShmLoader(Rows(), 8, seed=1)
    copied = pickle.loads(pickle.dumps(loader))
    with caplog.at_level(logging.INFO, "shmload"):
        run(loader)
        run(copied)
    assert [record.getMessage()[:17] for record in caplog.records] == ["epoch 0: 8 batche"] * 2


@pytest.mark.parametrize("value", ["", "0"])
def test_line_is_not_enabled_by_other_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOAD_SUMMARY", value)
    assert ShmLoader(Rows(), 8, seed=1)._watches.callbacks == []


def test_line_goes_to_stderr_if_the_logger_has_no_handler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHMLOAD_SUMMARY", "1")
    monkeypatch.setattr(shmload.metrics.log, "propagate", False)
    run(ShmLoader(Rows(), 8, seed=1))
    assert capsys.readouterr().err.startswith("shmload: epoch 0: 8 batches")


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_program_that_exits_within_an_epoch_prints_no_errors(tmp_path: Path) -> None:
    code = (
        "from tests.trace.trace_kit import Rows\n"
        "from shmload import ShmLoader\n"
        "loader = ShmLoader(Rows(), 8, num_workers=1, seed=1)\n"
        "iterator = iter(loader); next(iterator)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SHMLOAD_SUMMARY": "1"},
    )
    assert done.returncode == 0
    assert done.stderr == ""


# ---------------------------------------------------------------- TensorBoard


class StubWriter:
    """Replaces a SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_every_number_becomes_a_scalar() -> None:
    writer = StubWriter()
    to_tensorboard(writer)(EPOCH)
    assert {step for _, _, step in writer.scalars} == {3}
    expected = {f"shmload/{name}": value for name, value in EPOCH.items() if name not in ("epoch", "rank", "world_size")}
    assert {tag: value for tag, value, _ in writer.scalars} == expected


def test_worker_share_is_omitted_without_workers_and_the_prefix_can_be_chosen() -> None:
    writer = StubWriter()
    loader = ShmLoader(Rows(), 8, seed=1)
    loader.on_epoch_end(to_tensorboard(writer, "data/train"))
    run(loader)
    tags = {tag for tag, _, _ in writer.scalars}
    assert "data/train/samples_per_s" in tags
    assert "data/train/workers_busy_share" not in tags


@pytest.mark.slow(reason="imports TensorBoard, which writes and reads a file")
def test_tensorboard_accepts_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer)(EPOCH)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert "shmload/samples_per_s" in read.Tags()["scalars"]
    assert [(e.step, e.value) for e in read.Scalars("shmload/samples_per_s")] == [(3, 6144.0)]


# ---------------------------------------------------------------- batches by their bytes and rows


def test_size_of_a_batch_is_that_of_its_content() -> None:
    batch = {"a": torch.zeros(4, 2), "b": [np.zeros(3, np.int16), b"xy", "é"], "c": (1, None)}
    assert nbytes_of(batch) == 32 + 6 + 2 + 2
    nested = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert nbytes_of(nested) == 20


@pytest.mark.parametrize("dataset", [Plain(), Growing()])
def test_sizes_of_batches_of_any_kind_are_measured(dataset: Any) -> None:
    loader = ShmLoader(dataset, 8, seed=1)
    epochs = recorded_epochs(loader)
    run(loader)
    assert epochs[0]["nbytes"] > 0


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(12), 12),
        (torch.zeros(()), None),
        ("text", None),
        ({"x": [torch.zeros(3)]}, 3),
        ([torch.zeros(3, 2), torch.zeros(3), ("a", "b", "c")], 3),
        (["a", "b"], 2),
        ({"x": [torch.zeros(0), torch.zeros(2)]}, 2),
        (Padded(torch.zeros(2, 5), torch.tensor([1, 5])), 2),
        (Jagged(torch.zeros(6), torch.tensor([0, 1, 6])), 2),
        (torch.nested.nested_tensor_from_jagged(torch.zeros(6), torch.tensor([0, 1, 6])), 2),
        ({"a": {}, "b": torch.zeros(4)}, 4),
    ],
    ids=str,
)
def test_rows_of_a_batch_are_counted(batch: Any, rows: int | None) -> None:
    assert rows_of(batch) == rows


class Filtering:
    """Numbers. A batch contains the even ones, each converted by `form`."""

    def __init__(self, form: Callable[[int], Any]) -> None:
        self.form = form

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.form(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 10 in indices:
            raise ValueError("a bad sample")
        return [self.form(index) for index in indices if index % 2 == 0]


@WORKERS
@pytest.mark.parametrize("form", [int, str, np.arange, lambda i: (i, str(i))], ids=["number", "text", "ragged", "tuple"])
@pytest.mark.parametrize("ragged", ["list", "pad", "jagged"])
def test_samples_that_a_dataset_filters_are_not_counted(num_workers: int, form: Callable[[int], Any], ragged: Any) -> None:
    with ShmLoader(Filtering(form), 4, seed=1, num_workers=num_workers, on_error="skip", ragged=ragged) as loader:
        epochs = recorded_epochs(loader)
        run(loader)
    assert [(e["samples"], e["num_bad_samples"]) for e in epochs] == [(5, 1)]  # 0 to 8; 10 raises
