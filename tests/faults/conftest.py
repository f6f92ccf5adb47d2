"""A fixture that arms fault points."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmload import faults
from tests.faults.faults_kit import FaultFolder


@pytest.fixture
def fault_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultFolder:
    """Arms the fault points of workers forked afterwards."""
    monkeypatch.setattr(faults, "_folder", str(tmp_path))
    monkeypatch.setattr(faults, "armed", True)
    return FaultFolder(tmp_path)
