"""Small data for every built-in workload, and the bench command in a fork or in a new process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmload.tools.bench import bench_job
from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.object_reference import make_dataset
from tests.bench import forked_programs

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=sorted(WORKLOADS))
def small_dataset(request, tmp_path):
    """Returns the small dataset of each built-in workload."""
    workload = WORKLOADS[request.param]
    absent = workload.missing()
    if absent:
        pytest.skip(absent)
    return make_dataset(workload.dataset, workload.prepare(tmp_path, True))


@pytest.fixture
def forked_jobs(monkeypatch) -> None:
    """Makes measuring processes forks of this one."""
    monkeypatch.setattr(bench_job, "subprocess", forked_programs.PROCESSES)


@pytest.fixture
def bench(monkeypatch) -> Run:
    """Returns a function that runs `shmload bench ...` in a fork, where `planted:...` can be imported."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # contains benchmarks/

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return forked_programs.run_bench(HERE, *arguments)

    return run


@pytest.fixture
def new_bench() -> Run:
    """Returns a function that runs `shmload bench ...` in a new process, which starts new processes for measuring."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path.append(sys.argv.pop(1)); from shmload.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, str(ROOT), "bench", *arguments],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # contains benchmarks/
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )

    return run
