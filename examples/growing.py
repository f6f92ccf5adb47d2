"""Train on data that is too large for the disk: sampler processes read a slow store, and each epoch has what they have collected.

Shows: a cache that grows while a model is trained on it. Samplers run in processes of their own and are restarted if they die.
Epochs become longer without new workers. When the cache reaches its limit, the oldest samples are evicted. A checkpoint names the
samples of its epoch.

    pip install 'shmload[plot]'
    python examples/growing.py [--quick] [--plot growing.png]

prints a line for each epoch. The loss is that of 2,000 samples that are not used for training; it falls as the cache grows:

    epoch 0:    190 samples, loss 1.508
    ...
    epoch 19:   5928 samples, loss 0.059
    collected 6,726 samples, 665 files evicted, by 2 samplers; resumed in the middle of epoch 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shmload import ShmLoader
from shmload.growing import SampleCache

WIDTH, BATCH = 32, 32
SCHEMA = {"x": ("float32", (WIDTH,)), "y": ("float32", ())}
RECORD_NBYTES = 200


def draw_samples(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    """Return `n` samples of the function of 32 numbers that the model learns."""
    weights = np.random.default_rng(0).normal(size=(WIDTH, 2)).astype(np.float32) / 4
    x = rng.normal(size=(n, WIDTH)).astype(np.float32)
    hidden = x @ weights
    return x, np.sin(hidden[:, 0]) + np.abs(hidden[:, 1]).astype(np.float32)


def remote(pause_s: float, worker_id: int, num_workers: int) -> Iterator[dict[str, Any]]:
    """Yield samples of a slow store: each request takes `pause_s` seconds and returns 16 samples."""
    rng = np.random.default_rng()
    while True:
        time.sleep(pause_s)
        for x, y in zip(*draw_samples(rng, 16), strict=True):
            yield {"x": x, "y": y}


def train_epoch(loader: ShmLoader[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Train for one epoch. Return its number of samples."""
    count = 0
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += len(batch["x"])
    return count


def plot(path: str, samples: list[int], losses: list[float]) -> None:
    """Draw the number of samples of each epoch, and the loss after it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(7, 3.5))
    left.bar(range(len(samples)), samples, color="#9ecae1")
    left.set(xlabel="epoch", ylabel="samples")
    right = left.twinx()
    right.plot(losses, color="#d62728", marker="o", markersize=3)
    right.set(ylabel="loss on new samples", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the samples and the loss of each epoch")
    options = parser.parse_args()
    num_epochs, pause_s = (6, 0.005) if options.quick else (20, 0.02)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    new_x, new_y = map(torch.from_numpy, draw_samples(np.random.default_rng(1), 2000))
    samples: list[int] = []
    losses: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        SampleCache(folder, 6000 * RECORD_NBYTES, file_nbytes=16 * RECORD_NBYTES) as cache,
    ):
        dataset = cache.dataset(SCHEMA, min_samples=4 * BATCH)
        with ShmLoader(dataset, BATCH, shuffle=True, seed=7, uneven="exact", num_workers=1) as loader:
            cache.start(partial(remote, pause_s), 2)
            for epoch in range(num_epochs):
                samples.append(train_epoch(loader, model, optimizer))
                with torch.no_grad():
                    losses.append(float(nn.functional.mse_loss(model(new_x).squeeze(1), new_y)))
                print(f"epoch {epoch}: {samples[-1]:6} samples, loss {losses[-1]:.3f}")
            next(iter(loader))
            state = loader.state_dict()  # a few hundred bytes: the name of the epoch's snapshot, and the position in it
        with ShmLoader(dataset, BATCH, shuffle=True, seed=7, uneven="exact") as resumed:
            resumed.load_state_dict(state)
            train_epoch(resumed, model, optimizer)
        stats = cache.stats()
        print(
            f"collected {stats.num_samples:,} samples, {stats.num_evicted} files evicted, by {len(stats.samplers)} samplers; "
            f"resumed in the middle of epoch {state['epoch']}"
        )
    if options.plot:
        plot(options.plot, samples, losses)


if __name__ == "__main__":
    main()
