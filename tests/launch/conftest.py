"""Programs that launch ranks, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launch_kit import Run


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a rank, because tests are not ranks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "SHMLOAD_RANK_CPUS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Run]:
    """Returns a function that starts a command in its own session, like a shell's job, and kills it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str | Path, **options: Any) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        popen_options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], text=True, start_new_session=True, env=env, cwd=tmp_path, **popen_options
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
