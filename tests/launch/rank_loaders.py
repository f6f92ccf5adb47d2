"""Loaders in ranks. Nothing here needs torch, so that workers start fast."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

import shmload
from shmload.engine.tuning import tuning_limits

NUM_SAMPLES = 12


class WorkerCpus:
    """Samples that contain their worker's CPUs; the sample `deadly` kills the first worker that reads it."""

    def __init__(self, token: str | Path = "") -> None:
        self._token = token

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5 and self._token:
            try:
                os.unlink(self._token)
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"index": index, "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0))))}


def write_samples(local_rank: int, folder: str, context: str) -> None:
    """Writes what a rank's loader reads, and on which CPUs."""
    token = Path(folder, f"token {local_rank}")
    token.touch()
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    with shmload.ShmLoader(WorkerCpus(token), batch_size=2, seed=1, num_workers=1, multiprocessing_context=context) as loader:
        batches = list(loader)
    answer = {
        "index": [index for batch in batches for index in batch["index"].tolist()],
        "workers": sorted({cpus for batch in batches for cpus in batch["cpus"]}),
        "own": own,
        "auto": tuning_limits.num_cpus(),
        "threads": sys.modules["torch"].get_num_threads(),
    }
    Path(folder, str(local_rank)).write_text(repr(answer))


def batches_of(local_rank: int, folder: str, global_batch: int) -> None:
    """Writes the indices of each step."""
    world = int(os.environ["WORLD_SIZE"])
    with shmload.ShmLoader(WorkerCpus(), batch_size=global_batch // world, seed=4, shuffle=True, num_workers=0) as loader:
        found = [batch["index"].tolist() for _ in range(2) for batch in loader]
    Path(folder, f"{world} {local_rank}").write_text(repr(found))


def read_on(local_rank: int, barrier: Any, folder: str) -> None:
    """Fails in rank 1 while rank 0 is in the middle of an epoch."""
    with shmload.ShmLoader(WorkerCpus(), batch_size=2, num_workers=1, seed=1, multiprocessing_context="fork") as loader:
        next(iter(loader))
        Path(folder, f"below {local_rank}").write_text(repr([child.pid for child in psutil.Process().children()]))
        barrier.wait()
        if local_rank == 1:
            raise ValueError("broken")
        signal.pause()
