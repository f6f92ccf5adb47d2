"""A packing killed with SIGKILL at any point loses nothing: run again, it ends with the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmload import faults
from shmload.storage.local_store import LocalStore
from tests.faults.points import PACKER_POINTS
from tests.remote.packing.kill_kit import finished, killed_after
from tests.remote.packing.kills import run
from tests.remote.packing.packing_kit import Noisy, packed

slow = pytest.mark.slow(reason="packings are killed in their own processes, and resumed")


@pytest.fixture
def charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Arms faults in processes forked from here on, and returns the folder of the armed faults."""
    folder = tmp_path / "charges"
    folder.mkdir()
    monkeypatch.setattr(faults, "_folder", str(folder))
    monkeypatch.setattr(faults, "armed", True)
    return folder


@slow
@pytest.mark.parametrize("point", PACKER_POINTS)
def test_packing_killed_at_a_named_point_is_resumed(point: str, charged: Path, tmp_path: Path) -> None:
    packed([(b"old", 1)] * 7, LocalStore(tmp_path / "out"))  # replaced by the new packing
    (charged / f"{point}.1").write_text("")
    assert killed_after(tmp_path / "out", None, num_samples=60) >= 0
    assert [f"spent-{point}.1"] == [name.rpartition("-")[0] for name in os.listdir(charged)]
    assert finished(tmp_path / "wanted", 60) == finished(tmp_path / "out", 60)


@slow
def test_packings_killed_at_random_moments_end_with_the_same_bytes(tmp_path: Path) -> None:
    kills, packings = run(8, 1, tmp_path)
    assert kills >= 8
    assert packings >= 2


@pytest.mark.slow(reason="packs 600 samples twice; workers are killed and replaced")
def test_worker_killed_while_encoding_changes_nothing(charged: Path, tmp_path: Path) -> None:
    for number, point in enumerate(("after_claim", "before_finish")):
        (charged / f"{point}.{number}").write_text("")
    packed(Noisy(600), LocalStore(tmp_path / "a"), workers=2, multiprocessing_context="fork")
    assert len([name for name in os.listdir(charged) if name.startswith("spent-")]) == 2
    packed(Noisy(600), LocalStore(tmp_path / "b"))
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(names) > 100
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
