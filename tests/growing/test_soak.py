"""A short soak test, and tests that its checks detect errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmload.growing import SampleCache
from tests.growing.growing_kit import RECORD_NBYTES, put
from tests.growing.soak import CAPACITY_BYTES, KINDS, Tally, Watcher, differences, entries

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(reason="a soak in processes of its own, which import torch and are killed")
def test_short_soak_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.growing.soak", "--minutes", "0", "--min-kills", str(len(KINDS)), "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=220,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["found"] == []
    assert {"sampler", "trainer", "worker"} == {kind for kind, number in result["kills"].items() if number}
    assert result["epochs"] >= 1
    assert 0 < result["most_nbytes"] <= CAPACITY_BYTES


def batch(epoch: int, position: int, *ids: int, n: int = 4) -> dict[str, Any]:
    return {"at": [epoch, position], "n": n, "ids": list(ids)}


def test_deliveries_repeated_by_a_resume_do_not_count() -> None:
    log = [batch(0, 0, 1, 2), batch(0, 2, 3, 4), {"resumed": [0, 2]}, batch(0, 2, 3, 4)]
    assert differences([log], 1) == []


def test_repeated_lost_and_mixed_deliveries_are_found() -> None:
    assert differences([[batch(0, 0, 1)] * 2], 1) == ["batch (0, 0) was delivered twice without a resume in between"]
    assert differences([[batch(0, 0, 1, 2)], [batch(0, 0, 2, 3)]], 1) == [
        "epoch 0: 1 samples were delivered twice",
        "epoch 0: 3 samples of 4 were delivered",
    ]
    assert differences([[batch(0, 0, 1)], [batch(0, 0, 2, n=5)]], 1) == ["epoch 0 promised 4 samples, then 5"]


def test_batch_whose_log_line_a_kill_truncated_does_not_count() -> None:
    log = b'{"at": [0, 0]}\n{"at": [0, 1], "ids\n{"resumed": [0, 0]}\n{"at": [0, 0]}\n\n{"resumed": [0, 0]}\n{"at"'
    assert entries(log) == [{"at": [0, 0]}, {"resumed": [0, 0]}, {"at": [0, 0]}, {"resumed": [0, 0]}]
    with pytest.raises(json.JSONDecodeError):
        entries(b'{"at": [0\n{"at": [0, 1]}\n')  # no kill explains it


def test_room_of_an_evicted_file_used_by_another_is_not_counted_twice(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [put(cache, range(4)) for _ in range(2)]
    stat = Path.stat

    def evicted_after(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        if path.name == names[0]:
            path.unlink()
            put(cache, range(4))
        return found

    tally = Tally(0)
    watcher = Watcher(cache.path, tally)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", evicted_after)
        watcher.look()
    assert 0 < tally.most_nbytes <= 8 * RECORD_NBYTES
    watcher.look()
    assert tally.most_nbytes == 8 * RECORD_NBYTES


def test_watcher_detects_excess_bytes_and_incomplete_files(cache: SampleCache) -> None:
    names = [put(cache, range(4)) for _ in range(3)]
    with (cache.path / names[0]).open("r+b") as file:
        file.truncate(3 * RECORD_NBYTES)
    with (cache.path / names[1]).open("r+b") as file:
        file.seek(20)
        file.write(b"!")
    tally = Tally(0)
    Watcher(cache.path, tally).look()
    assert tally.most_nbytes == 11 * RECORD_NBYTES
    assert f"{names[0]} has 144 bytes" in tally.found
    assert len(tally.found) == 3  # that one's records, too
    assert "corrupted" in tally.found[-1] or "corrupted" in tally.found[0]
