"""Read random windows of tokens on two ranks as nanoGPT does, then with shmload, and compare the batches.

Shows: in nanoGPT's train.py each rank draws windows with replacement and reads them in the trainer, and a stopped run cannot
continue. With a `batch_sampler`, shmload's workers read exactly the same windows. With a seed and without a sampler, an epoch has
each window once, ranks divide each batch, and any number of ranks continues from a checkpoint.

    shmload launch --nproc-per-node 2 examples/nanogpt.py [--quick]
    torchrun --standalone --nproc-per-node=2 examples/nanogpt.py [--quick]

prints (with `[rank 0] ` before each line, if shmload started the ranks):

    2 ranks, get_batch: loss 2.707
    2 ranks, its windows from a worker: loss 2.707; batches identical
    2 ranks, each window once: loss 2.603; one rank's batches identical
    one rank continues after step 400: batches identical
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shmload import ShmLoader
from shmload.formats import TokenDataset

BLOCK_SIZE, BATCH_SIZE = 64, 8  # tokens of a window that the model reads; windows of a rank in one step
Batch = tuple[torch.Tensor, torch.Tensor]  # x and y, each of shape (batch, BLOCK_SIZE); y begins one token later


def write_tokens(path: Path) -> None:
    """Write this repository's pages as nanoGPT's prepare.py writes a text: as little-endian uint16, here one for each byte."""
    text = b"".join(page.read_bytes() for page in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    np.frombuffer(text, np.uint8).astype("<u2").tofile(path)


def get_batch(path: Path, generator: torch.Generator) -> Batch:
    """Return a batch as nanoGPT's function of this name does. There, `generator` is torch's own, seeded with 1337 + rank."""
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - BLOCK_SIZE, (BATCH_SIZE,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK_SIZE].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK_SIZE].astype(np.int64)) for i in ix])
    return x, y


def random_windows(num_windows: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield the indices of batches, drawn as in `get_batch`: a batch_sampler."""
    while True:
        yield torch.randint(num_windows, (BATCH_SIZE,), generator=generator).tolist()


def pairs(loader: ShmLoader[Any]) -> Iterator[Batch]:
    """Yield batches, epoch after epoch, in the form of `get_batch`. They are views of the slot."""
    while True:
        for batch in loader:
            yield batch["tokens"][:, :-1], batch["tokens"][:, 1:]


def copies(batches: Iterable[Batch]) -> list[Batch]:
    """Return copies, because a view keeps its slot in use."""
    return [(x.clone(), y.clone()) for x, y in batches]


def train(batches: Iterable[Batch], num_steps: int) -> tuple[str, list[Batch]]:
    """Train a new model. Return this rank's mean loss of the last eight steps, and copies of its batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, seen = [], []
    for x, y in islice(batches, num_steps):
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen += copies([(x, y)])
    return f"{np.mean(losses[-8:]):.3f}", seen


def of_all_ranks(seen: list[Batch]) -> list[Batch]:
    """Return the global batches: in each step the rows of rank 0, then those of rank 1, and so on."""
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, seen)
    return [(torch.cat(xs), torch.cat(ys)) for xs, ys in (zip(*step, strict=True) for step in zip(*parts, strict=True))]


def comparison(found: list[Batch], expected: Iterable[Batch]) -> str:
    both = zip(found, islice(expected, len(found)), strict=True)
    return "identical" if all(all(map(torch.equal, mine, other)) for mine, other in both) else "NOT the same"


def compare(path: Path, num_steps: int) -> Iterator[str]:
    """Train with each way of loading. Yield a line for each."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(1337 + rank)
    loss, drawn = train((get_batch(path, generator) for _ in count()), num_steps)
    yield f"{num_ranks} ranks, get_batch: loss {loss}"

    # a window begins at every token, so the dataset has as many windows as there are numbers that get_batch can draw
    dataset = TokenDataset(path, BLOCK_SIZE + 1, stride=1, dtype="uint16")
    sampler = random_windows(len(dataset), torch.Generator().manual_seed(1337 + rank))
    with ShmLoader(dataset, batch_sampler=sampler, num_workers=1) as loader:
        loss, seen = train(pairs(loader), num_steps)
    same = comparison(of_all_ranks(seen), of_all_ranks(drawn))
    yield f"{num_ranks} ranks, its windows from a worker: loss {loss}; batches {same}"

    options: dict[str, Any] = {"shuffle": True, "seed": 1337, "num_workers": 1}
    with ShmLoader(dataset, BATCH_SIZE, **options) as loader:
        batches = pairs(loader)
        loss, seen = train(batches, num_steps)
        state = loader.state_dict()  # the same on all ranks
        rest = of_all_ranks(copies(islice(batches, 10)))
    one_rank = {"batch_size": num_ranks * BATCH_SIZE, "rank": 0, "world_size": 1}
    with ShmLoader(dataset, **one_rank, **options) as loader:
        same = comparison(of_all_ranks(seen), pairs(loader))
    yield f"{num_ranks} ranks, each window once: loss {loss}; one rank's batches {same}"

    with ShmLoader(dataset, **one_rank, **options) as loader:
        loader.load_state_dict(state)
        yield f"one rank continues after step {num_steps}: batches {comparison(rest, pairs(loader))}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Read windows of tokens as nanoGPT does, and with shmload.")
    parser.add_argument("--quick", action="store_true", help="train for few steps, only to see that it works")
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder, "train.bin"))
        for line in compare(Path(folder, "train.bin"), 24 if options.quick else 400):
            if distributed.get_rank() == 0:
                print(line, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
