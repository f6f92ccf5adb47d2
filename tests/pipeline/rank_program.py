"""The program of one rank, `python rank_program.py NAME FOLDER` under torchrun. It writes its answer to FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Join, Partition, Permutation, reconcile
from tests.pipeline.worker_items import as_dict

N, BATCH = 50, 3


def make(folder: str) -> Conveyer:
    """Returns the first example of the specification, at small size."""
    return Conveyer(
        [
            Permutation(N, seed=5),
            Partition(dist.get_rank(), dist.get_world_size()),
            DistributedBatchedMap(as_dict, n_workers=1),
            Collate(batch_size=BATCH),
        ],
        audit=os.path.join(folder, "audit"),
    )


def start(folder: str) -> Any:
    """Reads three batches, of which the last rank saves the state, and three more, which are lost when the job ends."""
    with make(folder) as pipeline:
        before = [batch["x"].tolist() for batch in islice(pipeline, 3)]
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.save(pipeline.state(), os.path.join(folder, "state.pt"))
        lost = [batch["x"].tolist() for batch in islice(pipeline, 3)]
    return {"before": before, "lost": lost}


def resume(folder: str) -> Any:
    """Reads the rest of two or more epochs from the saved state."""
    with make(folder) as pipeline:
        pipeline.load_state(torch.load(os.path.join(folder, "state.pt"), weights_only=True))
        rest = -(-2 * N // (BATCH * dist.get_world_size()))
        return {"after": [batch["x"].tolist() for batch in islice(pipeline, rest)]}


def save_at_different_steps(folder: str) -> Any:
    """Saves the states of ranks at different steps of a Join, and lets the ranks agree on one."""

    def member(n: int) -> Conveyer:
        return Conveyer([Permutation(n), Partition(dist.get_rank(), dist.get_world_size()), Collate(2)])

    with Join([(member(20), 2), (member(12), 1)]) as pipeline:
        stream = [pipeline().tolist() for _ in range(3 + dist.get_rank())]
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, pipeline.state())
        pipeline.load_state(reconcile(states))
        return {"stream": stream, "again": [pipeline().tolist() for _ in range(3)], "state": pipeline.state()}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    answer = globals()[name](folder)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
