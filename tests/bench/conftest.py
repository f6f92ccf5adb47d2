"""Fixtures of the bench: small data for every built-in workload, and the command in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmload.tools.bench.contestants import WORKLOADS
from shmload.tools.named import make_dataset

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=sorted(WORKLOADS))
def small_dataset(request, tmp_path):
    """The small form of each built-in workload's dataset."""
    workload = WORKLOADS[request.param]
    absent = workload.missing()
    if absent:
        pytest.skip(absent)
    return make_dataset(workload.dataset, workload.prepare(tmp_path, True))


@pytest.fixture
def bench() -> Run:
    """`shmload bench ...` in a fresh process, from this folder, so that `planted:...` can be imported."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path.append(sys.argv.pop(1)); from shmload.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, str(ROOT), "bench", *arguments],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # where benchmarks/ is
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )

    return run
