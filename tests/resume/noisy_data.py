"""Datasets whose samples contain their index and draws from their worker's generators. Module level, so that spawned workers find
them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def noise() -> list[float]:
    return [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(1)), random.random()]


def rows(batches: Any) -> list[int]:
    """Returns the index of each row of these batches."""
    return [int(row) for batch in batches for row in batch[:, 0]]


def seed_all(seed: int) -> None:
    """Seeds the global generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy(Dataset):
    """`n` samples: the index, then four draws. Some draws leave half of a pair of gaussians in the generator."""

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *noise()])


class Reseeding(Noisy):
    """Seeds its generators with the index, as some datasets do."""

    def __getitem__(self, index: int) -> torch.Tensor:
        random.seed(index * 3 + random.getrandbits(3))
        torch.manual_seed(index)
        return super().__getitem__(index)


class Counting(Noisy):
    """Counts the samples it has read: a stateful dataset."""

    def __init__(self, n: int = 40, size: int = 0) -> None:
        super().__init__(n)
        self.num_read = 0
        self.ballast = bytes(size)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        return torch.tensor([float(index), float(self.num_read)])

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]
        self.ballast = state["ballast"]


class Lines(IterableDataset):
    """Numbers, divided among the workers; without a state."""

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def mine(self) -> range:
        info = get_worker_info()
        return range(self.n) if info is None else range(info.id, self.n, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        for i in self.mine():
            yield torch.tensor([float(i), *noise()])


class _LineIterator:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> _LineIterator:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.numbers[self.at - 1]), *noise()])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulIteratorLines(Lines):
    """Lines whose iterator saves its position."""

    def __iter__(self) -> Iterator[Any]:
        return _LineIterator(self.mine())


class StatefulLines(Lines):
    """Lines whose dataset saves the position."""

    def __init__(self, n: int = 40) -> None:
        super().__init__(n)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.mine()
        while self.at < len(numbers):
            self.at += 1
            yield torch.tensor([float(numbers[self.at - 1]), *noise()])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class GlobalSampler(Sampler):
    """Draws its order from the global generators of random and numpy when iteration begins."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.shuffle(order)
        return iter([order[i] for i in np.random.permutation(self.n)])


class StatefulSampler(Sampler):
    """Saves its position and its own generator."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.seed = n, 0, 1

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        if self.at == self.n:
            self.at, self.seed = 0, self.seed + 1
        order = random.Random(self.seed).sample(range(self.n), self.n)
        while self.at < self.n:
            self.at += 1
            yield order[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.seed = state["at"], state["seed"]
