"""Charges for the fault points, beside what tests/conftest.py holds every test to."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmload import faults
from tests.faults.faults_kit import Charges


@pytest.fixture
def charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Charges:
    """Arms the fault points of workers forked from here on."""
    monkeypatch.setattr(faults, "_folder", str(tmp_path))
    monkeypatch.setattr(faults, "armed", True)
    return Charges(tmp_path)
