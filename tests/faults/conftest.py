"""Charges for the fault points, beside what tests/conftest.py holds every test to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shmload import faults

sys.path.insert(0, os.path.dirname(__file__))  # for faults_kit, in workers of every start method too


class Charges:
    """A folder of charges, as `shmload.faults` describes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0

    def arm(self, point: str, number: int) -> None:
        """Lays a charge: the next process to come to the point dies of that signal."""
        self._num += 1
        path = self.folder / f"new-{self._num}"
        path.write_text(str(int(number)))
        path.rename(self.folder / f"{point}.{self._num}")

    @property
    def num_waiting(self) -> int:
        """Charges that nobody has come to."""
        return sum(not name.startswith("spent-") for name in os.listdir(self.folder))

    @property
    def num_spent(self) -> int:
        """Charges that have killed."""
        return len(os.listdir(self.folder)) - self.num_waiting


@pytest.fixture
def charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Charges:
    """Arms the fault points of workers forked from here on."""
    monkeypatch.setattr(faults, "_folder", str(tmp_path))
    monkeypatch.setattr(faults, "armed", True)
    return Charges(tmp_path)
