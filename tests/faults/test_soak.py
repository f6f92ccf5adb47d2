"""A short soak, and tests that its checks find defects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shmload import ShmLoader
from tests.faults import soak
from tests.faults.faults_kit import digest, program_env
from tests.faults.soak import KINDS, SEED, Soak, Stream

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(reason="runs a soak in another process, which imports torch")
def test_short_soak_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--minutes", "0.02", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=220,
        cwd=ROOT,
        env=program_env(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "seed 1"
    result = json.loads(lines[-1])
    assert (result["seed"], result["differences"], result["found"]) == (1, 0, [])
    assert result["kills"] > 0
    assert result["batches"] >= 50


@pytest.mark.slow(reason="makes the soak's dataset again for every batch")
@pytest.mark.parametrize("kind", KINDS)
def test_pure_schedule_predicts_the_batches_of_a_loader(kind: str) -> None:
    stream = Stream()
    dataset = soak.DATASETS[kind](soak.NUM_SAMPLES)
    with ShmLoader(dataset, soak.BATCH, shuffle=True, seed=SEED, collate_fn=soak.COLLATE.get(kind)) as loader:
        for _ in range(2):
            batches = iter(loader)
            for stream.step in range(3):
                assert stream.expected(kind) == digest(next(batches))
            stream.next_epoch()


def test_soak_reports_growing_memory_and_descriptors_and_differences() -> None:
    one = Soak(seed=0)
    tally = one.tally
    tally.minutes = 10.0
    tally.memory_mib = [(float(at), 100 + 2.0 * at) for at in range(11)]
    tally.descriptors = [5, 8, 8, 9]
    one._differs("batch 3")
    assert one.problems() == ["batch 3", "descriptors are not flat: [5, 8, 8, 9]", "memory grows by 2.00 MiB a minute"]
    assert tally.result()["memory_slope_mib_a_minute"] == 2.0
    assert tally.result()["differences"] == 1


def test_soak_accepts_flat_memory_after_growth_at_the_start() -> None:
    one = Soak(seed=0)
    tally = one.tally
    tally.minutes = 10.0
    tally.memory_mib = [(0.0, 50.0), *((float(at), 100.0 + at % 2) for at in range(1, 11))]
    tally.descriptors = [5, 8, 8]
    assert one.problems() == []
