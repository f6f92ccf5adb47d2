"""A disk smaller than the budget: a real tmpfs in a mount namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.storage.cache import disk_program

MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.slow(reason="each runs a program on a disk in a mount namespace of its own"),
    pytest.mark.skipif(not MOUNTS, reason="mount namespaces are not permitted here"),
]


def run_on_small_disk(size: str, place: Path, case: str) -> dict[str, Any]:
    """Runs a case of the program on a disk of this size."""
    script = f'mount -t tmpfs -o size={size} disk "$2" && exec "$0" "$1" "$2" "$3"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, disk_program.__file__, str(place), case],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_eviction_respects_a_disk_smaller_than_the_budget(tmp_path: Path) -> None:
    found = run_on_small_disk("4m", tmp_path, "evicts")
    assert found["names"][-1] == "29"
    assert 9 <= len(found["names"]) <= 10
    assert found["whole"]


def test_disk_full_of_leased_files_is_an_error_with_figures_or_is_waited_for(tmp_path: Path) -> None:
    found = run_on_small_disk("4m", tmp_path, "is_full_of_leases")
    for text in found["told"]:
        assert text.startswith(f"the disk of {tmp_path} has no room for 3072000 more bytes: ")
        assert text.endswith(
            "bytes are free, and no more of the cache's budget of 104857600 bytes may be evicted, because it is leased or mapped: "
            "free some space, or make the budget smaller"
        )
    assert (len(found["told"]), found["before"]) == (2, [{}, 5 * 400 * 1024])
    assert found["names"] == ["01", "02", "03", "04", "waited"]


def test_folder_without_room_for_the_ledger_is_listed_each_time(tmp_path: Path) -> None:
    found = run_on_small_disk("700k", tmp_path, "leaves_no_room_for_a_ledger")
    assert all(found["seen"])
    assert found["names"][-1] == "7"
    assert 3 <= len(found["names"]) <= 6
    assert found["bytes"] == len(found["names"]) * 100 * 1024


def test_full_disk_evicts_no_file_that_a_reader_has_mapped(tmp_path: Path) -> None:
    found = run_on_small_disk("3m", tmp_path, "is_mapped")
    assert {"0", "1"} < set(found["some"])
    assert "2" not in found["some"]
    assert found["some"] == found["every"]
    assert "may be evicted, because it is leased or mapped" in found["told"]
    assert found["then"] == ["9", "a"]


def test_file_that_waits_for_room_on_the_disk_blocks_no_other_request_for_it(tmp_path: Path) -> None:
    found = run_on_small_disk("4m", tmp_path, "is_waited_for")
    assert found["told"] == "no room"
    assert found["names"] == []
