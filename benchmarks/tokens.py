"""Measure the CPU time per window of 1,025 uint16 tokens from a file, in shuffled batches of 32, and that of the packing plan.

Method: 50 million random tokens (95 MiB, in the page cache); 2 forked workers; loaders take turns in fresh processes. shmload
reads a TokenDataset, widened to int64. torch's DataLoader reads the dataset that users write: a slice of a numpy memmap,
`astype`, and a tensor per window. Packed windows are made of documents of 200 tokens on average. A plain thread pool fills
batches with `read_batch_into`. Plans are made in this process, with 1 million documents of 1 to 2,000 tokens.

How to read: The figures are CPU microseconds per window over all processes, trainer and workers.

Predicted: shmload 2 us (0.25 to widen 1,025 tokens, 8 KiB written, page faults for 2 new pages, the engine's 40 us per batch),
packed 5 (three fields, 16 KiB), torch 30; a plan of a million documents 0.1 s.

Result (2 cores shared with other programs, 2 workers, 2 rounds, load 7): shmload 2.9 us, packed 5.8, torch 38, threads 1.7; a
plan of a million documents 0.05 s, density 0.998.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.common import THREADS, Result, Row, Settings, cpu_us, in_turn, main, plain, ways
from shmload.formats import TokenDataset

NUM_TOKENS, WINDOW, BATCH_SIZE = 50_000_000, 1025, 32


@contextmanager
def token_file() -> Iterator[str]:
    """Writes the tokens to a file, and yields its path."""
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(2).integers(0, 50257, NUM_TOKENS, np.uint16).tofile(path)
        yield str(path)


def windows(path: str) -> TokenDataset:
    return TokenDataset(path, WINDOW, dtype="uint16")


def packed(path: str) -> TokenDataset:
    ends = np.sort(np.random.default_rng(3).integers(0, NUM_TOKENS, NUM_TOKENS // 200))
    return TokenDataset(path, WINDOW, dtype="uint16", document_index=np.concatenate([[0], ends]), pack=True, seed=1)


class Slices(torch.utils.data.Dataset[Any]):
    """The dataset that users write over a memmap."""

    def __init__(self, path: str) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return len(self.tokens) // WINDOW

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.from_numpy(self.tokens[index * WINDOW : (index + 1) * WINDOW].astype(np.int64))}


def _plan_s() -> tuple[float, float]:
    """Returns the CPU seconds to plan a million documents, and the resulting density."""
    offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(4).integers(1, 2001, 1_000_000))])
    tokens = np.zeros(offsets[-1], np.uint8)
    begin = process_time()
    dataset = TokenDataset(tokens, 2048, document_index=offsets, pack=True, seed=1)
    return process_time() - begin, dataset.density


def measure(settings: Settings) -> Result:
    """Measures the loaders and the plan."""
    cases = {
        "shmload": ("shmload", "windows"),
        "packed": ("shmload", "packed"),
        "torch": ("torch", "Slices"),
        "threads": (THREADS, "windows"),
    }
    with token_file() as path:
        found = in_turn(ways("tokens", cases, settings, BATCH_SIZE, path=path), settings)
    cost, beside = cpu_us(found)
    plan_s, density = _plan_s()
    rows = [
        Row("windows of 1,025 tokens, CPU a window", cost["shmload"], "us", beside, "<= 3", cost["shmload"] <= 3),
        Row("plan of 1 million documents, CPU", plan_s, "s", f"density {density:.4f}", "<= 0.5", plan_s <= 0.5),
    ]
    return Result(rows, {"cases": plain(found), "density": density})


if __name__ == "__main__":
    main("tokens", __doc__, measure)
