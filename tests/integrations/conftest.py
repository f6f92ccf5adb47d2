"""Runs programs of several ranks, and restores each framework's process-wide state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmload

FOLDER = Path(__file__).parent
DEADLINE_S = 200.0  # for a whole program: three interpreters that import torch and a framework on two busy cores


def _run(command: list[str], deadline_s: float) -> str:
    """Runs a program in its own session, ends all of its processes, and returns its stderr."""
    paths = [str(Path(shmload.__file__).parent.parent), *sys.path]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # torchrun's message about OMP_NUM_THREADS; and two ranks on two cores
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        _, stderr = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
        pytest.fail(f"not finished after {deadline_s} s: {' '.join(command)}\n{stderr[-8000:]}")
    assert process.returncode == 0, stderr[-8000:]
    return stderr


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Returns a function that runs a function of rank_program.py in two ranks and returns each rank's result."""

    def run(name: str, launch: str = "torch.distributed.run --standalone --nproc-per-node=2") -> list[Any]:
        _run([sys.executable, "-m", *launch.split(), str(FOLDER / "rank_program.py"), name, str(tmp_path)], DEADLINE_S)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.fixture
def run_program() -> Callable[..., str]:
    """Returns a function that runs a program given as text and returns its stderr."""

    def run(text: str, deadline_s: float = DEADLINE_S) -> str:
        return _run([sys.executable, "-c", text], deadline_s)

    return run


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Lets frameworks write into tmp_path, and resets Accelerate's singletons and environment variables after the test."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
