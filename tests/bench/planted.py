"""Datasets and loaders with planted faults, named by the tests as `planted:name`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from shmload.observe.bench.contestants import LoaderOptions, torch_inline


class Good:
    """Four numbers and their index."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(4, index, np.float32), index


good = Good()


class Unrepeatable(Good):
    """Draws from an unseeded generator: no two passes are alike."""

    draw = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.draw.random(4), index


class Empty(Good):
    def __len__(self) -> int:
        return 0


class Unreadable(Good):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise KeyError("image")


class Deadly(Good):
    """Ends the process that reads it."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise SystemExit(3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def raises() -> Good:
    raise FileNotFoundError("no folder train/")


def needs_path(path: str) -> Good:
    return Good()


number = 7


def torch_like(dataset: Any, options: LoaderOptions) -> Any:
    """A loader that is right."""
    return torch_inline(dataset, options)


class OneWrongByte:
    """torch's batches, but in the second one byte differs."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.loader = torch_inline(dataset, options)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number == 1:
                first = batch[0] if isinstance(batch, list) else next(iter(batch.values()))
                first.reshape(-1).view(torch.uint8)[-1] ^= 1
            yield batch


def raises_at_once(dataset: Any, options: LoaderOptions) -> Iterator[Any]:
    raise RuntimeError("no batch today")


def delivers_nothing(dataset: Any, options: LoaderOptions) -> "DataLoader[Any]":
    """Delivers nothing at all."""
    return DataLoader([], batch_size=1)  # type: ignore[arg-type]  # an empty list is a dataset
