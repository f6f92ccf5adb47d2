"""One rank of the soak: `python soak_trainer.py FOLDER RANK WORLD_SIZE`. It trains until FOLDER/stop is there, and can be killed anywhere.

What it was delivered goes to FOLDER/rank-R.log, a line a batch by one write; its state to FOLDER/rank-R.json, whole or not at all.
An epoch is begun when all ranks have ended the one before, as ranks that train together do.
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
from shmload.formats.paths import write_whole
from shmload.growing import SampleCache

CAPACITY_BYTES, FILE_NBYTES = 4 << 20, 64 << 10
WIDTH = 256  # int64 of a sample; the first says which it is
SCHEMA = {"x": ("int64", (WIDTH,))}
BATCH, STATE_EVERY, NUM_SAMPLERS = 16, 3, 2


def sampler(worker_id: int, num_workers: int) -> Iterator[Any]:
    """Samples that nobody has drawn before."""
    first = int.from_bytes(os.urandom(5), "little") << 22
    for number in count(first):
        yield np.full(WIDTH, number)


def ended(folder: Path, rank: int) -> int:
    """The last epoch that a rank has ended; -1: none."""
    try:
        return int((folder / f"ended-{rank}").read_text())
    except FileNotFoundError:
        return -1


def wait_for(folder: Path, world_size: int, epoch: int) -> None:
    """Until every rank has ended that epoch, or has left for good."""
    while not all(ended(folder, rank) >= epoch or (folder / f"left-{rank}").exists() for rank in range(world_size)):
        threading.Event().wait(0.005)


def main(folder: Path, rank: int, world_size: int) -> None:
    faulthandler.register(signal.SIGUSR1)  # the soak asks where it is if nothing happens
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state_file = folder / f"rank-{rank}.json"

    def say(**said: Any) -> None:
        os.write(log, json.dumps(said).encode() + b"\n")

    cache = SampleCache(folder / "cache", CAPACITY_BYTES, file_nbytes=FILE_NBYTES)
    dataset = cache.dataset(SCHEMA, records="raw", min_samples=50, run="soak")
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 2, "uneven": "pad"}
    loader: ShmLoader[Any] = ShmLoader(dataset, BATCH, rank=rank, world_size=world_size, **options)
    epoch = 0
    if state_file.exists():
        state = json.loads(state_file.read_text())
        loader.load_state_dict(state)
        epoch = state["epoch"]
        if epoch:  # it may have been killed between its state and this
            write_whole(folder / f"ended-{rank}", str(epoch - 1).encode())
        say(resumed=[epoch, state["position"]])
    samplers = cache.start(sampler, NUM_SAMPLERS) if rank == 0 else None  # now that what the state names is held
    while True:
        wait_for(folder, world_size, epoch - 1)  # holding what the last one read, for a rank that is resumed in it
        position = loader.state_dict()["position"]
        if epoch and position == 0 and (folder / "stop").exists():
            break
        for number, batch in enumerate(loader):
            named = loader._passes.epochs.state_dict(epoch, position, is_begun=True)["children"]["snapshot"]  # type: ignore[union-attr]  # of seed mode
            assert loader.valid is not None
            ids = batch["x"][: loader.valid]
            assert bool((ids == ids[:, :1]).all()), "a sample is of two"
            say(at=[epoch, position], n=named["n"], ids=ids[:, 0].tolist())
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
