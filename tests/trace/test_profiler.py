"""Ranges in torch's profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from shmload import ShmLoader
from tests.trace.trace_kit import Broken, Rows, run


def ranges(path: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X" and event["name"].startswith("shmload: ")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, None])
def test_a_profile_shows_each_wait_and_each_delivery(seed: int | None, tmp_path: Path) -> None:
    with ShmLoader(Rows(), 8, num_workers=1, seed=seed, persistent_workers=True) as loader:
        run(loader)
        with profile(activities=[ProfilerActivity.CPU]) as taken:
            assert run(loader) == 8
        run(loader)
    taken.export_chrome_trace(str(tmp_path / "profile.json"))
    found = ranges(tmp_path / "profile.json")
    assert found.count("shmload: deliver") == 8
    assert found.count("shmload: wait") == 8
    assert {event.key: event.count for event in taken.key_averages()}["shmload: wait"] == 8


@pytest.mark.slow
def test_a_profile_shows_reading_without_workers(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        run(ShmLoader(Rows(), 8, seed=1))
    taken.export_chrome_trace(str(tmp_path / "profile.json"))
    assert ranges(tmp_path / "profile.json") == ["shmload: read"] * 8


@pytest.mark.slow
def test_a_profile_changes_no_batch() -> None:
    def batches() -> list[list[float]]:
        with ShmLoader(Broken(), 10, num_workers=2, seed=1, on_error="skip") as loader:
            return [batch["y"].tolist() for batch in loader]

    plain = batches()
    with profile(activities=[ProfilerActivity.CPU]):
        assert plain == batches()


def test_no_range_is_made_where_nobody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(profiler, "record_function", refuse)
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader:
        assert run(loader) == 8
