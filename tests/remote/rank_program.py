"""Reads two epochs as one rank of `torchrun rank_program.py BUCKET FOLDER PLACE` and writes their labels to PLACE/RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from shmload import ShmLoader
from shmload.remote import RemoteDataset, make_client

if __name__ == "__main__":
    bucket, folder, place = sys.argv[1:]
    dist.init_process_group("gloo")
    dataset = RemoteDataset(make_client(), bucket, folder, seed=3).decode().to_tuple("npy", "cls").batched(4)
    loader = ShmLoader(dataset, batch_size=None, num_workers=1)
    epochs = [[number for _, cls in loader for number in np.asarray(cls).tolist()] for _ in range(2)]
    length = len(RemoteDataset(make_client(), bucket, folder))
    Path(place, f"{dist.get_rank()}.json").write_text(json.dumps({"epochs": epochs, "length": length}))
    del loader, dataset
    dist.barrier()
    dist.destroy_process_group()
