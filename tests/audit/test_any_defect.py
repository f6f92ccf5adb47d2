"""Any record of any run that is dropped, repeated or moved is detected."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shmload.audit.audit_file import AuditLog, Batch
from shmload.tools.audit.verify import read_folder, verify
from tests.audit.audit_kit import make, run

slow = pytest.mark.slow(reason="hypothesis records and checks many runs")
RUNS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "batch_size": st.sampled_from([1, 2, 4]),
        "worlds": st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1), (4, 2)]),
        "uneven": st.sampled_from(["pad", "drop", "exact"]),
        "shuffle": st.booleans(),
        "stop": st.integers(0, 6),
        "rolled_back": st.integers(0, 3),
    }
)


def recorded(scenario: dict[str, Any]) -> list[AuditLog]:
    """Records an epoch that is stopped, rolled back and finished by other ranks, and another epoch."""
    folder = Path(tempfile.mkdtemp())
    try:
        before, after = scenario["worlds"]
        total = scenario["batch_size"] * max(before, after)
        more = {"uneven": scenario["uneven"], "shuffle": scenario["shuffle"]}
        dataset = [(i, i * i + 1) for i in range(scenario["n"])]
        ranks = [make(folder, r, before, total // before, dataset=dataset, **more) for r in range(before)]
        state = ranks[0].state_dict()
        passes = [iter(rank) for rank in ranks]
        for step in range(scenario["stop"]):
            if step == scenario["stop"] - scenario["rolled_back"]:
                state = ranks[0].state_dict()
            for one in passes:
                next(one, None)
        if scenario["rolled_back"] == 0:
            state = ranks[0].state_dict()
        ranks = [make(folder, r, after, total // after, dataset=dataset, **more) for r in range(after)]
        for rank in ranks:
            rank.load_state_dict(state)
        run(ranks)
        run(ranks)
        return read_folder(folder)
    finally:
        shutil.rmtree(folder)


@slow
@given(RUNS)
@settings(max_examples=60, deadline=None)
def test_any_unchanged_record_is_proven(scenario: dict[str, Any]) -> None:
    logs = recorded(scenario)
    assume(any(log.records for log in logs))
    report, _ = verify(logs)
    num_kept = scenario["n"]
    if scenario["uneven"] == "drop":
        total = scenario["batch_size"] * max(scenario["worlds"])
        num_kept = num_kept // total * total
    assert report.findings == []
    num_empty = 0 if num_kept else len(report.loaders[0].epochs)
    assert ["nothing was delivered" in text for text in report.unjudged] == [True] * num_empty
    assert report.status == (0 if num_kept else 3)
    assert {num_kept} == {epoch.num_samples for epoch in report.loaders[0].epochs}


@slow
@given(RUNS, st.sampled_from(["drop", "double", "exchange"]), st.data())
@settings(max_examples=150, deadline=None)
def test_any_single_defect_is_detected(scenario: dict[str, Any], defect: str, data: st.DataObject) -> None:
    logs = recorded(scenario)
    report, loaders = verify(logs)
    counted = [one for loader in loaders for one in loader.batches if not one.is_superseded]
    assume(counted)
    victim = data.draw(st.sampled_from(counted))
    records = victim.part.log.records
    place = records.index(victim.batch)
    if defect == "drop":
        del records[place]
    elif defect == "double":
        records.insert(place, records[place])
    else:
        others = [i for i, each in enumerate(records) if isinstance(each, Batch) and each is not victim.batch]
        assume(others)
        other = data.draw(st.sampled_from(others))
        records[place], records[other] = records[other], records[place]
    report, _ = verify(logs)
    assert report.status == 1, (defect, victim.where)
