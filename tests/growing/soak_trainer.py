"""One rank of the soak test: `python soak_trainer.py FOLDER RANK WORLD_SIZE`. It trains until FOLDER/stop exists, and can be
killed anywhere.

It appends one line for each batch to FOLDER/rank-R.log with a single write, and replaces its state in FOLDER/rank-R.json
atomically. An epoch begins when all ranks have finished the previous one, as in ranks that train together.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from shmload import ShmLoader
from shmload.formats.atomic_write import write_whole
from shmload.growing import SampleCache

CAPACITY_BYTES, FILE_NBYTES = 4 << 20, 64 << 10
WIDTH = 256  # int64 values of a sample; the first is its number
SCHEMA = {"x": ("int64", (WIDTH,))}
BATCH, STATE_EVERY, NUM_SAMPLERS = 16, 3, 2


def sampler(worker_id: int, num_workers: int) -> Iterator[Any]:
    """Yields samples that were never drawn before."""
    first = int.from_bytes(os.urandom(5), "little") << 22
    for number in count(first):
        yield np.full(WIDTH, number)


def ended(folder: Path, rank: int) -> int:
    """Returns the last epoch that a rank has finished, or -1."""
    try:
        return int((folder / f"ended-{rank}").read_text())
    except FileNotFoundError:
        return -1


def wait_for(folder: Path, world_size: int, epoch: int) -> None:
    """Waits until every rank has finished the epoch or has left for good."""
    while not all(ended(folder, rank) >= epoch or (folder / f"left-{rank}").exists() for rank in range(world_size)):
        threading.Event().wait(0.005)


def main(folder: Path, rank: int, world_size: int) -> None:
    faulthandler.register(signal.SIGUSR1)  # the soak test requests the stacks when nothing happens
    log_fd = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state_file = folder / f"rank-{rank}.json"

    def log(**entry: Any) -> None:
        os.write(log_fd, json.dumps(entry).encode() + b"\n")

    cache = SampleCache(folder / "cache", CAPACITY_BYTES, file_nbytes=FILE_NBYTES)
    dataset = cache.dataset(SCHEMA, records="raw", min_samples=50, run="soak")
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 2, "uneven": "pad"}
    loader: ShmLoader[Any] = ShmLoader(dataset, BATCH, rank=rank, world_size=world_size, **options)
    epoch = 0
    if state_file.exists():
        state = json.loads(state_file.read_text())
        loader.load_state_dict(state)
        epoch = state["epoch"]
        if epoch:  # a kill may have come between the state and this line
            write_whole(folder / f"ended-{rank}", str(epoch - 1).encode())
    os.write(log_fd, b"\n")  # the kernel may end a write at a kill, so the last line may be incomplete
    log(resumed=[epoch, loader.state_dict()["position"]])  # also at 0: a kill may have come before the first state
    samplers = cache.start(sampler, NUM_SAMPLERS) if rank == 0 else None  # started after the files of the state are held
    while True:
        wait_for(folder, world_size, epoch - 1)  # while holding the last one's files, for a rank that resumes in it
        position = loader.state_dict()["position"]
        if epoch and position == 0 and (folder / "stop").exists():
            break
        for number, batch in enumerate(loader):
            named = loader._passes.epochs.state_dict(epoch, position, is_begun=True)["children"]["snapshot"]  # type: ignore[union-attr]  # of seed mode
            assert loader.valid is not None
            ids = batch["x"][: loader.valid]
            assert bool((ids == ids[:, :1]).all()), "a sample is mixed from two"
            log(at=[epoch, position], n=named["n"], ids=ids[:, 0].tolist())
            position += BATCH * world_size
            if number % STATE_EVERY == 0:
                write_whole(state_file, json.dumps(loader.state_dict()).encode())
            assert loader._builder.last is not None
            pids = {"workers": loader._builder.last.pool.pids}
            if samplers is not None:
                pids["samplers"] = [one["pid"] for one in samplers.states if one["pid"]]
            write_whole(folder / f"pids-{rank}", json.dumps(pids).encode())
        write_whole(state_file, json.dumps(loader.state_dict()).encode())
        write_whole(folder / f"ended-{rank}", str(epoch).encode())
        epoch += 1
    (folder / f"left-{rank}").touch()
    loader.close()
    cache.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
