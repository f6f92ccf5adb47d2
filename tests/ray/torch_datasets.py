"""Datasets for tests of Ray actors as workers in torch mode: random numbers come from the worker's stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import shmload
from shmload.formats import CenterCrop, ImageDecoder, ImageFolder


class Drawing(Dataset[Any]):
    """Samples drawn from the worker's random stream, with the worker's id, number of workers and seed."""

    def __init__(self, n: int = 31) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        assert info is not None
        return torch.full((3,), float(index)), torch.rand(2), np.random.rand(), info.id, info.num_workers, info.seed


class FailingAfterDraw(Drawing):
    """Some samples draw random numbers and then raise."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index in (1, 4, 5, 6, 7):
            raise ValueError(f"sample {index} is torn")
        return sample


class Counting(IterableDataset[Any]):
    """An iterable dataset that divides its samples by get_worker_info and saves its iterator's position."""

    def __iter__(self) -> Iterator[Any]:
        return _Counter()


class _Counter:
    def __init__(self) -> None:
        info = get_worker_info()
        self.at, self.step = (0, 1) if info is None else (info.id, info.num_workers)

    def __iter__(self) -> _Counter:
        return self

    def __next__(self) -> Any:
        if self.at >= 29:
            raise StopIteration
        self.at += self.step
        return torch.tensor([self.at]), torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def seed_worker(worker: int) -> None:
    """Sets a seed that changes what is drawn: a worker_init_fn."""
    torch.manual_seed(1000 + worker)


def listed(samples: list[Any]) -> dict[str, Any]:
    """Stacks the samples and counts them: a collate_fn."""
    return {"number": len(samples), "x": torch.stack([sample[0] for sample in samples])}


class Crops(Dataset[Any]):
    """Crops of the photographs in the package, and which photograph each one shows."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.photographs: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.photographs:  # each worker decodes them itself
            paths = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
            folder = ImageFolder(paths, ImageDecoder(CenterCrop(224)))
            self.photographs = [torch.from_numpy(folder[number]["image"] / np.float32(255)) for number in range(len(paths))]
        label = index % len(self.photographs)
        top, left = torch.randint(224 - 32, (2,)).tolist()
        return self.photographs[label][:, top : top + 32, left : left + 32], label
