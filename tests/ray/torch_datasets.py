"""Datasets for tests of a worker pool of Ray actors, in torch's way: what is drawn is the worker's."""

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
    """torch's way: what is drawn is the worker's, which says who it is."""

    def __init__(self, n: int = 31) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        assert info is not None
        return torch.full((3,), float(index)), torch.rand(2), np.random.rand(), info.id, info.num_workers, info.seed


class Torn(Drawing):
    """Some of its samples draw, and then cannot be read."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index in (1, 4, 5, 6, 7):
            raise ValueError(f"sample {index} is torn")
        return sample


class Counting(IterableDataset[Any]):
    """An iterable dataset that divides its samples by get_worker_info, and says where its iterator stands."""

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
    """A worker_init_fn whose doing is seen in what is drawn."""
    torch.manual_seed(1000 + worker)


def listed(samples: list[Any]) -> dict[str, Any]:
    """A collate_fn."""
    return {"number": len(samples), "x": torch.stack([sample[0] for sample in samples])}


class Crops(Dataset[Any]):
    """Crops of the photographs that come with the package, and which photograph each is of."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.photographs: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.photographs:  # decoded by each worker, where it is
            paths = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
            folder = ImageFolder(paths, ImageDecoder(CenterCrop(224)))
            self.photographs = [torch.from_numpy(folder[number]["image"] / np.float32(255)) for number in range(len(paths))]
        label = index % len(self.photographs)
        top, left = torch.randint(224 - 32, (2,)).tolist()
        return self.photographs[label][:, top : top + 32, left : left + 32], label
