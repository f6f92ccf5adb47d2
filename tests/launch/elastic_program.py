"""The program of each rank in a training whose machines leave and join: `python elastic_program.py FOLDER`

All ranks proceed step by step, and rank 0 saves the loader's state of the last step that all have finished; a new rank continues
there. In step LOSE the machine that is marked as lost is killed, launcher first; the others wait in step WAIT for another machine
to join.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import distributed

from shmload import ShmLoader

NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS = 120, 12, 2
LOSE, WAIT = 4, 13  # steps of the run, whose epochs have ten steps


def saved_step(state_file: Path) -> int:
    return int(json.loads(state_file.read_text())["step"]) if state_file.exists() else 0


def main() -> None:
    folder = Path(sys.argv[1])
    state_file = folder / "state.json"
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    numbers = torch.arange(NUM_SAMPLES)
    loader = ShmLoader(numbers, GLOBAL_BATCH // world_size, shuffle=True, seed=7, audit=str(folder / "audit"))
    step = 0
    if state_file.exists():
        step = saved_step(state_file)
        loader.load_state_dict(json.loads(state_file.read_text())["loader"])
    if rank == 0:
        (folder / f"world {world_size} from {step}").touch()
    while step < NUM_EPOCHS * (NUM_SAMPLES // GLOBAL_BATCH):
        for batch in loader:
            if world_size < 3 or (world_size == 3 and step < LOSE):
                signal.pause()  # until more machines have joined; some may start seconds later
            if world_size == 4 and step == LOSE and "LOST" in os.environ:
                while saved_step(state_file) < LOSE:
                    threading.Event().wait(0.01)
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            if world_size == 3 and step == WAIT:
                (folder / f"waits {rank}").touch()
                signal.pause()
            distributed.all_reduce(batch.sum())  # fails if a rank is gone
            step += 1
            if rank == 0:
                state_file.with_suffix(".new").write_text(json.dumps({"step": step, "loader": loader.state_dict()}))
                state_file.with_suffix(".new").rename(state_file)
    loader.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
