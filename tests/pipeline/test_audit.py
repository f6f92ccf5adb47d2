"""Audits of pipelines with `shmload verify`: whole runs, resumes on other numbers of ranks, and defects planted in records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shmload.audit.audit_file import AuditLog, Batch, Record, batch_record, event_record, header_line
from shmload.pipeline import Collate, Conveyer, Join, Map, Partition, Permutation, Range
from shmload.tools.audit.findings import UNFINISHED, UNJUDGED, AuditReport
from shmload.tools.audit.verify import read_folder, reread, verify
from tests.pipeline.pipeline_kit import Joined, Leaf, Spec, pulled, specs

JOINED = Joined(
    (Leaf(6, True, False, 1), Joined((Leaf(3, False, False, 1), Leaf(5, True, False, 2)), (3, 5), "first")), (6, 8), "first"
)


def verified(folder: Path) -> AuditReport:
    return verify(read_folder(folder))[0]


def run(spec: Spec, folder: Path, num_steps: int, state: Any = None) -> Any:
    """Runs `num_steps` steps of all ranks and returns the state of the first one."""
    with ExitStack() as stack:
        spec = dataclasses.replace(spec, options={"audit": folder})
        pipelines = [stack.enter_context(spec.make(rank)) for rank in range(spec.world)]
        for pipeline in pipelines:
            if state is not None:
                pipeline.load_state(state)
            left = num_steps
            for _ in range(3):  # epochs
                left -= len(pulled(pipeline, left)) if left else 0
        return pipelines[0].state()


def rewritten(folder: Path, change: Callable[[list[Record]], list[Record]], log: AuditLog | None = None) -> None:
    """Changes the records of rank 0, or of the given log, and gives them valid checksums."""
    log = log or next(log for log in read_folder(folder) if log.header["rank"] == 0)
    raw = header_line(log.header)
    for record in change(log.records):
        raw += batch_record(record) if isinstance(record, Batch) else event_record(record.kind, record.details)
    (folder / log.name).write_bytes(raw)


def batches_of(records: list[Record]) -> list[int]:
    return [at for at, record in enumerate(records) if isinstance(record, Batch)]


@pytest.mark.slow(reason="hypothesis records and judges many runs")
@settings(deadline=None, max_examples=200)
@given(specs(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=3))
def test_runs_and_resumes_on_any_number_of_ranks_verify(
    tmp_path_factory: pytest.TempPathFactory, spec: Spec, starts: list[tuple[int, int]]
) -> None:
    folder, state = tmp_path_factory.mktemp("audit"), None
    spec = dataclasses.replace(spec, uneven="pad")
    if spec.rule == "drop" and (spec.source.length or 100) < 3 * (spec.batch_size or 1):
        return  # an epoch without a full step has no record
    for world, num_steps in starts:
        state = run(spec.on(world), folder, num_steps, state)
    report = verified(folder)
    assert (report.findings, report.unjudged) == ([], [])


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("source", [Leaf(7, True, True, 1), JOINED, Leaf(9, False, False, 0)], ids=["endless", "join", "range"])
def test_resume_in_mid_epoch_on_other_ranks_verifies(tmp_path: Path, source: Any, batch_size: Any) -> None:
    spec = Spec(source, batch_size=batch_size)
    state = run(spec.on(2), tmp_path, 2)
    run(spec.on(3), tmp_path, 1, state)  # discarded: no state was saved after it
    state = run(spec.on(3), tmp_path, 1, state)
    run(spec, tmp_path, 3, state)
    report = verified(tmp_path)
    assert (report.status, report.findings) == (UNFINISHED, [])
    assert "so far" in report.verdict
    assert report.loaders[0].epochs[0].num_superseded == 3


def test_resume_inside_a_group_of_fetched_items_verifies(tmp_path: Path) -> None:
    spec = Spec(Leaf(500, True, True, 1), num_workers=1)
    state = run(spec, tmp_path, 150)
    state = run(spec.on(2), tmp_path, 100, state)
    run(spec, tmp_path, 300, state)
    assert verified(tmp_path).status == UNFINISHED


@pytest.mark.slow(reason="pulls hundreds of items through a worker")
def test_resume_at_the_start_of_a_fetch_counts_the_whole_previous_fetch(tmp_path: Path) -> None:
    with dataclasses.replace(Spec(Leaf(2000, False, True, 3), num_workers=1), options={"audit": tmp_path}).make() as pipeline:
        pulled(pipeline, 200)
        while pipeline.engine.num_ready:
            pipeline()
        at = pipeline.state()["position"]
        pipeline.load_state(pipeline.state())
        assert pulled(pipeline, 300) == [[x] for x in range(at, at + 300)]
    assert verified(tmp_path).findings == []


def test_several_epochs_of_a_finite_pipeline_verify(tmp_path: Path) -> None:
    for rank in range(2):
        with Conveyer([Permutation(11, repeating=False), Partition(rank, 2), Collate(2)], audit=tmp_path) as pipeline:
            for _ in range(3):
                pulled(pipeline, 10)
    report = verified(tmp_path)
    assert [epoch.state for epoch in report.loaders[0].epochs] == ["proven"] * 3
    assert [epoch.num_samples for epoch in report.loaders[0].epochs] == [11] * 3


def test_rest_of_an_unfinished_epoch_is_reported(tmp_path: Path) -> None:
    run(Spec(Leaf(20, False, False, 0), batch_size=2, world=2), tmp_path, 2)
    (epoch,) = verified(tmp_path).loaders[0].epochs
    assert (epoch.state, epoch.remaining) == ("unfinished", "positions after 7")


def with_repeated_record(records: list[Record]) -> list[Record]:
    return [*records, records[-1]]


def without_one_record(records: list[Record]) -> list[Record]:
    at = batches_of(records)[1]
    return [*records[:at], *records[at + 1 :]]


def with_other_item(records: list[Record]) -> list[Record]:
    first, second = (records[at] for at in batches_of(records)[:2])
    keys = second.keys.copy()
    keys[0] = first.keys[0]
    return [dataclasses.replace(record, keys=keys) if record is second else record for record in records]


def with_row_missing(records: list[Record]) -> list[Record]:
    at = batches_of(records)[0]
    return [dataclasses.replace(r, keys=r.keys[1:], valid=1) if i == at else r for i, r in enumerate(records)]


@pytest.mark.parametrize("source", [Leaf(24, True, True, 1), Leaf(24, True, False, 1), JOINED], ids=["endless", "once", "join"])
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (with_repeated_record, "doubled", "were delivered before: rank 0"),
        (without_one_record, "missing", "epoch 0: positions 4-5 never came"),
        (with_other_item, "doubled", "came more than once"),
        (with_row_missing, "swapped", "1 rows were ordered, the schedule has 2"),
    ],
)
def test_planted_record_defect_is_found(tmp_path: Path, source: Any, change: Any, kind: str, text: str) -> None:
    run(Spec(source, batch_size=2, world=2), tmp_path, 3)
    assert verified(tmp_path).status == UNFINISHED
    rewritten(tmp_path, change)
    report = verified(tmp_path)
    assert report.status == 1
    assert kind in report.num_found
    assert text in "\n".join(finding.text for finding in report.findings)
    assert report.loaders[0].epochs[0].state == "defect"


def test_missing_file_is_reported(tmp_path: Path) -> None:
    run(Spec(Leaf(24, True, True, 1), batch_size=2, world=3), tmp_path, 3)
    (log,) = [log for log in read_folder(tmp_path) if log.header["rank"] == 1]
    (tmp_path / log.name).unlink()
    (finding,) = verified(tmp_path).findings
    assert finding.text == "epoch 0: positions 2-3, 8-9, 14-15 never came; there is no file of rank 1: is it missing?"


def test_start_without_its_state_is_reported(tmp_path: Path) -> None:
    spec = Spec(Leaf(24, True, True, 1), batch_size=2)
    run(spec, tmp_path, 3)
    run(spec, tmp_path, 3)
    report = verified(tmp_path)
    assert "doubled" in report.num_found
    (finding,) = report.findings
    assert "started from the beginning without a state" in finding.text


def test_missing_items_are_reported_by_epoch_and_member(tmp_path: Path) -> None:
    joined = Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(2)]), 1)])
    with Conveyer([joined, Collate(2)], audit=tmp_path) as pipeline:
        pulled(pipeline, 9)

    def without_item(records: list[Record]) -> list[Record]:  # key 8 is member 0's item 0 of epoch 1; 99 was never drawn
        return [
            dataclasses.replace(r, keys=[98 if key == 8 else key for key in r.keys]) if isinstance(r, Batch) else r for r in records
        ]

    rewritten(tmp_path, without_item)
    text = "\n".join(finding.text for finding in verified(tmp_path).findings)
    assert "1 items of epoch 1 of member 0 never came, such as item 0" in text


@pytest.mark.parametrize("stream", [None, {}, {"is_endless": 1, "members": 3}, {"is_endless": True, "members": [3, [0]]}])
def test_invalid_header_is_reported_as_damage(tmp_path: Path, stream: Any) -> None:
    run(Spec(Leaf(5, True, True, 1)), tmp_path, 3)
    (log,) = read_folder(tmp_path)
    log.header["stream"] = stream
    rewritten(tmp_path, lambda records: records, log)
    assert "the header cannot be used: stream is" in verified(tmp_path).findings[0].text


def test_skipped_items_are_accounted_for(tmp_path: Path) -> None:
    def broken(x: int) -> int:
        if x == 5:
            raise ValueError("no")
        return x

    with Conveyer([Range(8, repeating=False), Map(broken), Collate(2)], audit=tmp_path, on_error="skip") as pipeline:
        assert pulled(pipeline, 9) == [[0, 1], [2, 3], [4], [6, 7]]
    report = verified(tmp_path)
    assert (report.status, report.loaders[0].epochs[0].num_skipped) == (0, 1)


def test_ranks_with_different_fetch_sizes_verify(tmp_path: Path) -> None:
    for rank in range(2):
        with Conveyer([Permutation(400, repeating=False), Partition(rank, 2)], audit=tmp_path) as pipeline:
            pulled(pipeline, 192)
    for log, sizes in zip(sorted(read_folder(tmp_path), key=lambda log: log.header["rank"]), ([64] * 3, [16, 176]), strict=True):

        def together(records: list[Record], sizes: list[int] = sizes) -> list[Record]:
            batches = [record for record in records if isinstance(record, Batch)]
            keys = np.concatenate([batch.keys for batch in batches])
            ends = np.cumsum(sizes).tolist()
            made = [
                dataclasses.replace(batches[0], step=2 * (end - size), valid=size, keys=keys[end - size : end])
                for size, end in zip(sizes, ends, strict=True)
            ]
            return [*(record for record in records if not isinstance(record, Batch)), *made]

        rewritten(tmp_path, together, log)
    report = verified(tmp_path)
    assert (report.findings, report.unjudged, report.status) == ([], [], UNFINISHED)
    assert (report.loaders[0].epochs[0].state, report.loaders[0].epochs[0].num_samples) == ("unfinished", 384)
    assert report.verdict == "epoch 0 so far: 384 of 400 samples, each once"


def noisy(number: int) -> dict[str, Any]:
    return {"x": np.array([number, np.random.rand()])}


def quiet(number: int) -> dict[str, Any]:
    return {"x": np.array([number, 0.5])}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] * 2}


@pytest.mark.parametrize("tail", [[], [Collate(3)], [Collate(3), Map(doubled)]], ids=["items", "batches", "mapped batches"])
def test_batches_of_a_pipeline_are_read_again(tail: list[Any], tmp_path: Path) -> None:
    source, *rest = stages = [Permutation(10, seed=5), Map(noisy), *tail]
    for rank in range(2):
        with Conveyer([source, Partition(rank, 2), *rest], audit=tmp_path) as ran:
            pulled(ran, 1)
    report, loaders = verify(read_folder(tmp_path))
    reread(loaders, Conveyer(stages), 100, report)
    assert (report.status, report.num_reread) == (UNFINISHED, 2)
    reread(loaders, Conveyer([source, Map(quiet), *tail]), 100, report)
    assert report.num_found["content"] == 2


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Permutation(10, seed=6).map(noisy).batch(2), "--dataset is pipeline(Permutation(10, seed=6"),
        (Permutation(10, seed=5).map(noisy), "--dataset has no Collate, unlike the recorded pipeline"),
        (Permutation(10, seed=5).map(noisy).filter(bool).batch(2), "--dataset has stages that make more or fewer items"),
        ([1, 2], "--dataset is no pipeline"),
    ],
)
def test_other_pipelines_are_not_read_again(made: Any, text: str, tmp_path: Path) -> None:
    with Conveyer([Permutation(10, seed=5), Map(noisy), Collate(2)], audit=tmp_path) as ran:
        pulled(ran, 2)
    report, loaders = verify(read_folder(tmp_path))
    reread(loaders, made, 100, report)
    assert (report.num_reread, report.status) == (0, UNJUDGED)
    assert text in report.unjudged[-1]
