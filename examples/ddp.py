"""Train with DistributedDataParallel on two ranks, stop, and continue in one process; then verify that no sample was lost.

Shows: seed mode divides each global batch over the ranks of torch.distributed, without a DistributedSampler. The state of one rank
can be loaded by any number of ranks. `shmload verify` proves from both runs' audit files that each epoch contained each sample
exactly once. The model learns a photo: the color of a pixel from its coordinates.

    pip install 'shmload[images]'
    python examples/ddp.py [--quick]                                                 # starts its two ranks itself
    shmload launch --nprocs 2 examples/ddp.py [--quick]                              # or under the launcher
    torchrun --standalone --nproc-per-node=2 examples/ddp.py [--quick]               # or under torchrun

prints (with `[rank 0] ` before each line, if shmload started the ranks):

    2 ranks, epoch 0: loss 0.0197 of 100 steps
    2 ranks, epoch 1: loss 0.0065 of 100 steps
    2 ranks, epoch 2: loss 0.0044 of 50 steps
    rank 0 waited 0.9% of 0.7 s: 32000 samples
    1 rank, epoch 2: loss 0.0042 of 50 steps
    1 rank, epoch 3: loss 0.0036 of 100 steps
    (the table of `shmload verify`)
    proven: every sample exactly once
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import shmload
from shmload import ShmLoader
from shmload.formats import ImageDecoder, Resize

GLOBAL_BATCH = 256  # samples of all ranks in one step; must be the same when the number of ranks changes
NUM_EPOCHS, STOPPED_EPOCH = 4, 2


def pixels(side: int) -> TensorDataset:
    """Return the pixels of a photo: 64 sines and cosines of the coordinates, and 3 color values from 0 to 1."""
    photo = Path(shmload.__file__).parent / "data" / "coffee.jpg"
    image = torch.from_numpy(ImageDecoder(Resize((side, side)), dtype="float32")(photo.read_bytes()))
    steps = torch.linspace(-1, 1, side)
    coordinates = torch.cartesian_prod(steps, steps)  # (side * side, 2)
    waves = coordinates @ torch.randn(2, 32, generator=torch.Generator().manual_seed(0)) * 6
    return TensorDataset(torch.cat([waves.sin(), waves.cos()], 1), image.permute(1, 2, 0).reshape(-1, 3).contiguous())


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    return model, torch.optim.AdamW(model.parameters(), 3e-3)


def make_loader(side: int, folder: str, **options: Any) -> ShmLoader[Any]:
    """Return a loader. Without `rank` and `world_size` in the options, it uses those of torch.distributed."""
    options |= {"shuffle": True, "seed": 7, "audit": f"{folder}/audit", "num_workers": 1}
    # fork, because a spawned worker would first import torch
    return ShmLoader(pixels(side), multiprocessing_context="fork", **options)


def train_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> float:
    """Train on one batch. Return the loss."""
    loss = mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train_together(side: int, folder: str) -> None:
    """Train for two epochs and a half on all ranks. Rank 0 saves a checkpoint, with the state of its loader."""
    is_first, num_ranks = distributed.get_rank() == 0, distributed.get_world_size()
    model, optimizer = make_model()
    parallel = DistributedDataParallel(model)
    begin = perf_counter()
    with make_loader(side, folder, batch_size=GLOBAL_BATCH // num_ranks) as loader:
        for epoch in range(STOPPED_EPOCH + 1):
            losses = []
            for batch in loader:
                losses.append(train_step(parallel, batch, optimizer))
                if epoch == STOPPED_EPOCH and len(losses) == len(loader) // 2:
                    break
            if is_first:
                print(f"{num_ranks} ranks, epoch {epoch}: loss {np.mean(losses):.4f} of {len(losses)} steps", flush=True)
        stats, train_s = loader.stats(), perf_counter() - begin
        if is_first:
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/checkpoint.pt")
            print(f"rank 0 waited {stats['wait_s'] / train_s:.1%} of {train_s:.1f} s: {stats['samples']} samples", flush=True)
    distributed.barrier()  # now the audit files of the other ranks are complete, too


def train_alone(side: int, folder: str) -> None:
    """Train for the remaining epoch and a half in one process."""
    model, optimizer = make_model()
    # given as arguments, because the launcher's RANK and WORLD_SIZE are still in the environment
    with make_loader(side, folder, batch_size=GLOBAL_BATCH, rank=0, world_size=1) as loader:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        for name, state in torch.load(f"{folder}/checkpoint.pt").items():
            parts[name].load_state_dict(state)
        for epoch in range(STOPPED_EPOCH, NUM_EPOCHS):
            losses = [train_step(model, batch, optimizer) for batch in loader]
            print(f"1 rank, epoch {epoch}: loss {np.mean(losses):.4f} of {len(losses)} steps", flush=True)


def run_rank(rank: int, side: int) -> None:
    """Train in one of two processes. Rank 0 then continues alone, and verifies both runs."""
    torch.set_num_threads(1)  # two ranks and their workers share the cores
    distributed.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    distributed.broadcast_object_list(folders)
    train_together(side, folders[0])
    distributed.destroy_process_group()
    if rank == 0:
        train_alone(side, folders[0])
        subprocess.run([sys.executable, "-m", "shmload", "verify", f"{folders[0]}/audit"], check=True)
        shutil.rmtree(folders[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a photo on two ranks, then on one.")
    parser.add_argument("--quick", action="store_true", help="use few pixels, only to see that it works")
    side = 64 if parser.parse_args().quick else 160
    if distributed.is_torchelastic_launched():
        run_rank(int(os.environ["LOCAL_RANK"]), side)
    else:
        shmload.spawn(run_rank, (side,), nprocs=2)


if __name__ == "__main__":
    main()
