"""Every defect planted in the record of a real run is detected and named, and the unchanged record is proven."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import ShmLoader
from shmload._core.trainer import Order
from shmload.audit.audit_file import AuditLog
from shmload.tools.audit.findings import AuditReport
from shmload.tools.audit.verify import read_folder, reread, verify
from tests.audit.audit_kit import N, Samples, batches_of, changed, kinds, make, run, run_with_resumes, verdict_after, verdict_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_with_resumes(tmp_path)
    return tmp_path


def two_ranks(logs: list[AuditLog]) -> tuple[AuditLog, AuditLog]:
    first, second = (log for log in logs if log.header["world_size"] == 2)
    return (first, second) if first.header["rank"] == 0 else (second, first)


def texts(report: AuditReport, kind: str) -> str:
    return "\n".join(finding.text for finding in report.findings if finding.kind == kind)


def test_clean_run_over_ranks_resumes_and_world_sizes_is_proven(folder: Path) -> None:
    report = verdict_of(folder)
    assert (report.findings, report.unjudged, report.status) == ([], [], 0)
    (loader,) = report.loaders
    assert [(e.epoch, e.state) for e in loader.epochs] == [(0, "proven"), (1, "proven"), (2, "proven")]
    assert [e.num_samples for e in loader.epochs] == [N, N, N]
    assert [e.num_superseded for e in loader.epochs] == [0, 8, 0]
    assert report.verdict == "proven: every sample exactly once"


def test_lost_batch_is_missing(folder: Path) -> None:
    def lose(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[1]
        number, batch = list(batches_of(log, 0))[3]
        assert isinstance(batch.keys, np.ndarray)
        names.append(", ".join(map(str, batch.keys.tolist())))
        del log.records[number]

    names: list[str] = []
    report = verdict_after(folder, lose)
    assert (1, {"missing"}) == (report.status, kinds(report))
    assert f"epoch 0: positions 28-31 never came: steps 3 of rank 1; step 3 holds samples {names[0]}" in texts(report, "missing")


@pytest.mark.parametrize("n", [4 * 4, 4 * 4 + 3])
def test_lost_last_batch_is_missing_although_drop_last_leaves_some_out(n: int, tmp_path: Path) -> None:
    """In torch mode, only the number of samples that came says how many batches there were."""
    with ShmLoader(range(n), batch_size=4, shuffle=True, drop_last=True, audit=tmp_path) as loader:
        assert len(list(loader)) == 4
    assert verdict_of(tmp_path).verdict.startswith("proven")

    def lose_the_last(logs: list[AuditLog]) -> None:
        (log,) = logs
        del log.records[max(number for number, _ in batches_of(log, 0))]

    assert kinds(verdict_after(tmp_path, lose_the_last)) == {"missing"}


def test_repeated_batch_is_reported_with_both_positions(folder: Path) -> None:
    def double(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        number, batch = list(batches_of(log, 0))[2]
        log.records.insert(number + 1, batch)

    report = verdict_after(folder, double)
    assert "positions 16-19 were delivered before: rank 0, epoch 0, step 2 (rank-0000-" in texts(report, "doubled")
    assert report.status == 1


def test_two_swapped_batches_are_reported_with_their_right_positions(folder: Path) -> None:
    def swap(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        (a, first), (b, second) = list(batches_of(log, 0))[1:3]
        log.records[a] = changed(first, keys=second.keys, digest=second.digest)
        log.records[b] = changed(second, keys=first.keys, digest=first.digest)

    report = verdict_after(folder, swap)
    assert {"swapped"} == kinds(report)  # each sample was delivered once, in the wrong step
    assert "step 1 (" in texts(report, "swapped")
    assert "it is the batch of step 2, rank 0" in texts(report, "swapped")


def test_batches_delivered_in_the_wrong_order_are_swapped(folder: Path) -> None:
    def swap(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        (a, first), (b, second) = list(batches_of(log, 0))[1:3]
        log.records[a], log.records[b] = second, first

    report = verdict_after(folder, swap)
    assert {"swapped"} == kinds(report)
    assert "step 1 (" in texts(report, "swapped")
    assert "delivered after step 2" in texts(report, "swapped")


def test_batches_swapped_between_ranks_are_reported(folder: Path) -> None:
    def swap(logs: list[AuditLog]) -> None:
        mine, others = two_ranks(logs)
        (a, first), (b, second) = next(batches_of(mine, 0)), next(batches_of(others, 0))
        mine.records[a] = changed(first, keys=second.keys, digest=second.digest)
        others.records[b] = changed(second, keys=first.keys, digest=first.digest)

    assert "it is the batch of step 0, rank 1" in texts(verdict_after(folder, swap), "swapped")


def test_silently_substituted_sample_is_missing_and_the_other_doubled(folder: Path) -> None:
    def substitute(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        number, batch = list(batches_of(log, 0))[1]
        assert isinstance(batch.keys, np.ndarray)
        other = next(batches_of(log, 0))[1].keys
        assert isinstance(other, np.ndarray)
        keys = batch.keys.copy()
        was.append((int(keys[2]), int(other[0])))
        keys[2] = other[0]
        log.records[number] = changed(batch, keys=keys)

    was: list[tuple[int, int]] = []
    report = verdict_after(folder, substitute)
    assert "rows 2 hold other samples than the schedule says, the first is" in texts(report, "swapped")
    assert f"samples {was[0][0]} never came" in texts(report, "missing")
    assert f"samples {was[0][1]} came once too often" in texts(report, "doubled")


def test_reused_memory_of_the_last_batch_is_detected_by_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [(i, i * i) for i in range(40)]
    loader = make(tmp_path, dataset=data)
    kept: list[Any] = []
    recorded = loader._recorder.delivered

    def delivered(order: Order, batch: Any, **more: Any) -> None:
        kept.append(batch)
        recorded(order, kept[4] if order.step == 5 else batch, **more)

    monkeypatch.setattr(loader._recorder, "delivered", delivered)
    run([loader])
    report, loaders = verify(read_folder(tmp_path))
    assert report.status == 0  # indices and positions are correct, and only the data differ
    reread(loaders, data, 10, report)
    assert (1, {"content"}, 1) == (report.status, kinds(report), report.num_found.total())
    assert "epoch 0, step 5 (rank-0000" in texts(report, "content")


def test_repeated_batch_with_other_bytes_is_reported(folder: Path) -> None:
    def spoil(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        number, batch = list(batches_of(log, 1))[-1]
        log.records[number] = changed(batch, digest=batch.digest ^ 1)

    report = verdict_after(folder, spoil)
    assert {"replay"} == kinds(report)
    assert "epoch 1, step 3" in texts(report, "replay")
    assert "delivered again with the same samples and other bytes" in texts(report, "replay")


def test_replay_of_other_samples_is_reported(folder: Path) -> None:
    def spoil(logs: list[AuditLog]) -> None:
        log = two_ranks(logs)[0]
        number, batch = next(batches_of(log, 1))
        assert isinstance(batch.keys, np.ndarray)
        log.records.insert(number, changed(batch, keys=batch.keys[::-1].copy()))

    assert "delivered again with other samples" in texts(verdict_after(folder, spoil), "replay")


def test_missing_file_of_a_rank_is_reported(folder: Path) -> None:
    gone = next(path for path in folder.iterdir() if path.name.startswith("rank-0001"))
    gone.unlink()
    report = verdict_of(folder)
    assert (1, {"missing"}) == (report.status, kinds(report))
    assert "never came: steps 0-5 of rank 1" in texts(report, "missing")
    assert "epoch 1: positions 4-7, 12-15 never came: steps 0-1 of rank 1" in texts(report, "missing")
    assert "there is no file of rank 1: is it missing?" in texts(report, "missing")


def test_missing_file_of_a_finished_run_of_one_epoch_is_reported(tmp_path: Path) -> None:
    run([make(tmp_path, rank, 2) for rank in range(2)], 3)
    next(path for path in tmp_path.iterdir() if path.name.startswith("rank-0000")).unlink()
    assert "never came: steps 0-2 of rank 0" in texts(verdict_of(tmp_path), "missing")


def test_torn_end_of_a_file_is_not_damage_and_its_batches_are_missing(folder: Path) -> None:
    path = next(path for path in folder.iterdir() if path.name.startswith("rank-0001"))
    cut = list(batches_of(two_ranks(read_folder(folder))[1], 0))[-1][1].offset + 20
    path.write_bytes(path.read_bytes()[:cut])
    report = verdict_of(folder)
    assert {"missing"} == kinds(report)
    assert "never came: steps 5 of rank 1" in texts(report, "missing")
    assert any("the last record is cut off" in note for note in report.notes)


def test_flipped_byte_is_reported_with_file_and_offset(folder: Path) -> None:
    path = next(path for path in folder.iterdir() if path.name.startswith("rank-0001"))
    batch = list(batches_of(two_ranks(read_folder(folder))[1], 0))[2][1]
    content = bytearray(path.read_bytes())
    content[batch.offset + 30] ^= 4
    path.write_bytes(content)
    report = verdict_of(folder)
    assert f"{path.name}, offset {batch.offset}: a record is damaged: its checksum differs" in texts(report, "damaged")
    assert "never came: steps 2 of rank 1" in texts(report, "missing")


def test_rest_of_an_abandoned_epoch_is_missing(tmp_path: Path) -> None:
    loader = make(tmp_path)
    run([loader], 3)
    run([loader])
    report = verdict_of(tmp_path)
    assert "epoch 0: nothing came from position 12 to 44: it was left early" in texts(report, "missing")
    assert [epoch.state for epoch in report.loaders[0].epochs] == ["defect", "proven"]


def test_run_stopped_within_an_epoch_is_correct_so_far_but_not_proven(tmp_path: Path) -> None:
    loaders = [make(tmp_path, rank, 2) for rank in range(2)]
    run(loaders)
    passes = [iter(loader) for loader in loaders]
    for one in (*passes, passes[0]):
        next(one)
    report = verdict_of(tmp_path)
    assert (report.status, report.findings) == (4, [])
    last = report.loaders[0].epochs[-1]
    assert (last.state, last.remaining) == ("unfinished", "positions after 11")
    assert report.verdict == f"epoch 1 so far: {last.num_samples} of 45 samples, each once"


def test_rank_whose_record_ends_early_cannot_be_judged(tmp_path: Path) -> None:
    loaders = [make(tmp_path, rank, 2, dataset=Samples(400)) for rank in range(2)]
    run(loaders, 1)
    for loader in loaders:
        loader.set_epoch(0)
    passes = [iter(loader) for loader in loaders]
    for _ in range(30):
        next(passes[0])
    report = verdict_of(tmp_path)
    assert any("the record of rank 1 ends" in text for text in report.unjudged)


def test_restart_without_a_state_is_doubled_unless_allowed(tmp_path: Path) -> None:
    run([make(tmp_path)], 3)
    run([make(tmp_path)])
    report = verdict_of(tmp_path)
    assert {"doubled"} == kinds(report)
    (text,) = [finding.text for finding in report.findings]
    assert "started from the beginning without a state" in text
    assert "after 3 batches (12 samples) had been delivered. Load the state of the earlier start (load_state_dict); or" in text
    allowed = verdict_of(tmp_path, allow_restarts=True)
    assert (allowed.status, allowed.loaders[0].epochs[0].num_superseded) == (0, 3)


def test_set_epoch_with_the_same_epoch_twice_is_doubled(tmp_path: Path) -> None:
    loader = make(tmp_path)
    for _ in range(2):
        loader.set_epoch(0)
        run([loader])
    assert {"doubled"} == kinds(verdict_of(tmp_path))


def test_set_epoch_at_the_start_of_a_process_is_a_resume(tmp_path: Path) -> None:
    run([make(tmp_path)])
    crashed = make(tmp_path)
    crashed.set_epoch(1)
    run([crashed], 5)
    again = make(tmp_path)
    again.set_epoch(1)
    run([again])
    report = verdict_of(tmp_path)
    assert (report.status, [e.num_superseded for e in report.loaders[0].epochs]) == (0, [0, 5])


def test_empty_folder_proves_nothing(tmp_path: Path) -> None:
    report = verdict_of(tmp_path)
    assert report.status == 3
    assert report.notes == ["the folder holds no records, which ShmLoader(audit=FOLDER) writes: see docs/resume.md"]


def verified(folder: Path, num_epochs: int) -> tuple[AuditReport, float]:
    """Verifies epochs in which one rank's file is missing. Returns the report and the peak memory in bytes per recorded sample."""
    run([make(folder, shuffle=False)], 1)
    (log,) = read_folder(folder)
    batch, num_steps, size = next(batches_of(log, 0))[1], 20, 10_000
    log.header.update(n=2 * num_steps * size, batch_size=size, world_size=2)
    log.records = [
        changed(batch, epoch=epoch, step=step, valid=size, keys=np.arange(2 * step * size, (2 * step + 1) * size))
        for epoch in range(num_epochs)
        for step in range(num_steps)
    ]
    tracemalloc.start()
    try:
        return verify([log])[0], tracemalloc.get_traced_memory()[1] / (num_steps * size)
    finally:
        tracemalloc.stop()


def test_missing_rank_takes_little_memory(tmp_path: Path) -> None:
    report, peak = verified(tmp_path, 1)
    assert "positions 10000-19999, 30000-39999" in texts(report, "missing")
    assert peak < 80


def test_memory_does_not_grow_with_the_number_of_epochs(tmp_path: Path) -> None:
    assert verified(tmp_path, 10)[1] < 80
