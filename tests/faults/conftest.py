"""Charges for the fault points, beside what tests/conftest.py holds every test to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shmload import faults

sys.path.insert(0, os.path.dirname(__file__))  # for faults_kit, in workers of every start method too

from faults_kit import Charges  # the path comes first


@pytest.fixture
def charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Charges:
    """Arms the fault points of workers forked from here on."""
    monkeypatch.setattr(faults, "_folder", str(tmp_path))
    monkeypatch.setattr(faults, "armed", True)
    return Charges(tmp_path)
