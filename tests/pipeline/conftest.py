"""Makes the helpers of this folder importable for the tests and their workers, and runs programs of several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmload

FOLDER = Path(__file__).parent
DEADLINE_S = 220.0  # for four interpreters that import torch on two busy cores


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Returns a function that runs a function of rank_program.py under torchrun and returns each rank's answer."""

    def run(name: str, world: int) -> list[Any]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        paths = [str(Path(shmload.__file__).parent.parent), *sys.path]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [*launch, str(FOLDER / "rank_program.py"), name, str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, stderr = process.communicate()
            pytest.fail(f"{name} did not finish in {DEADLINE_S} s:\n{stderr[-8000:]}")
        assert process.returncode == 0, stderr[-8000:]
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]

    return run
