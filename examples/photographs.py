"""Train a classifier of real images: from which of eight photos does a crop of 32 x 32 pixels come?

Shows: worker processes that decode JPEG files directly into the rows of the batch, and of each file only what the crop needs; a
crop that the program defines; random numbers keyed by (seed, epoch, index); and a checkpoint in the middle of an epoch, from which
another process continues with another number of workers and bit-identical losses.

    pip install 'shmload[images]'
    python examples/photographs.py [--quick] [--workers 2]

prints a line for each epoch, then how long the trainer waited for data, and whether the losses after the resume equal those of the
uninterrupted run. The accuracy is that of crops that were not used for training; by chance it would be 12.5 %. Two of the photos
show parts of the same sky:

    epoch 0: loss 1.461, accuracy of new crops 44.8%
    ...
    epoch 5: loss 0.670, accuracy of new crops 66.9%
    waited 1% of 7.3 s: 9216 samples, 2 workers, busy 96% of it
    resumed in the middle of epoch 2 with 1 worker: 83 losses, bit-identical
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import shmload
from shmload import ShmLoader
from shmload.formats import ImageDecoder, ImageFolder
from shmload.formats.images.decoder import Window

SIDE = 32
BATCH_SIZE = 64


@dataclass(frozen=True)
class RandomCrop:
    """A crop of `side` x `side` pixels at a random position. A class with these two members can be given to a decoder."""

    side: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.side, self.side

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        top, left = int(rng.integers(height - self.side + 1)), int(rng.integers(width - self.side + 1))
        box = float(top), float(left), float(self.side), float(self.side)
        return Window(self.shape, box, (top, left, top + self.side, left + self.side))


def crops_of_photographs(crops_per_photo: int) -> ImageFolder:
    """Return a dataset of {"image": float32 (3, 32, 32), "label": number of the photo}. Each epoch draws other crops."""
    photos = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
    decoder = ImageDecoder(RandomCrop(SIDE), normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    return ImageFolder(photos * crops_per_photo, decoder, labels=[*range(len(photos))] * crops_per_photo)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4 * 4, 8)),
    )
    return model, torch.optim.AdamW(model.parameters(), 2e-3)


def make_loader(dataset: ImageFolder, num_workers: int, *, seed: int = 7) -> ShmLoader[Any]:
    return ShmLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers, seed=seed)


def losses_of_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: ShmLoader[Any]) -> Iterator[float]:
    """Train on each remaining batch of the loader's epoch. Yield each loss."""
    for batch in loader:
        loss = functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, loader: ShmLoader[Any]) -> float:
    right = [(model(batch["image"]).argmax(1) == batch["label"]).float() for batch in loader]
    return torch.cat(right).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier that finds the photo from which a crop comes.")
    parser.add_argument("--quick", action="store_true", help="use few crops and epochs, only to see that it works")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # leaves a core to the workers
    with tempfile.TemporaryDirectory() as folder:
        train(options, Path(folder) / "checkpoint.pt")


def train(options: argparse.Namespace, checkpoint: Path) -> None:
    """Train for all epochs. Then load the checkpoint and repeat the steps after it."""
    num_epochs, crops_per_photo = (3, 64) if options.quick else (6, 192)
    dataset = crops_of_photographs(crops_per_photo)
    new_crops = make_loader(crops_of_photographs(crops_per_photo // 4), options.workers, seed=1_000_003)
    saved_epoch, saved_step = num_epochs // 3, len(dataset) // BATCH_SIZE // 2
    expected: list[float] = []  # the losses after the checkpoint
    train_s = 0.0

    model, optimizer = make_model()
    with make_loader(dataset, options.workers) as loader, new_crops:
        for epoch in range(num_epochs):
            begin, losses = perf_counter(), []
            for step, loss in enumerate(losses_of_epoch(model, optimizer, loader)):
                losses.append(loss)
                if (epoch, step) > (saved_epoch, saved_step):
                    expected.append(loss)
                elif (epoch, step) == (saved_epoch, saved_step):
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**states, "loader": loader.state_dict()}, checkpoint)
            train_s += perf_counter() - begin
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}, accuracy of new crops {accuracy(model, new_crops):.1%}")
        stats = loader.stats()
        busy = sum(worker["busy_s"] for worker in stats["workers"]) / options.workers / train_s
        waited = f"waited {stats['wait_s'] / train_s:.0%} of {train_s:.1f} s"
        print(f"{waited}: {stats['samples']} samples, {options.workers} workers, busy {busy:.0%} of it")

    # what another process would do: make new objects, load the checkpoint, and train for the remaining epochs
    state = torch.load(checkpoint)
    model, optimizer = make_model()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with make_loader(dataset, 1) as loader:
        loader.load_state_dict(state["loader"])
        resumed = [loss for _ in range(saved_epoch, num_epochs) for loss in losses_of_epoch(model, optimizer, loader)]
    same = "bit-identical" if resumed == expected else "NOT the same"
    print(f"resumed in the middle of epoch {saved_epoch} with 1 worker: {len(resumed)} losses, {same}")


if __name__ == "__main__":
    main()
