"""Processes are killed while they download, publish and evict; the others continue, and the folder is always consistent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.points import STORAGE_POINTS
from tests.storage.cache import hammer

NUM_KILLS = 8 * 50


@pytest.mark.slow(reason="400 processes are killed, one after the other")
def test_fifty_kills_at_every_point_leave_the_folder_consistent_and_others_running(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, hammer.__file__, "--kills", str(NUM_KILLS), "--seed", "5", "--folder", str(tmp_path), "--pause", "60"],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(STORAGE_POINTS) < set(hammer.POINTS)
    assert dict.fromkeys(hammer.POINTS, 50) == found["kills_by_point"]
    assert found["operations"] > NUM_KILLS
    assert os.listdir(tmp_path) == []
