"""Datasets that own random generators, at module level so that every start method can pickle them."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch


class OwnsGenerators:
    """Draws from generators of every kind, stored where users store them."""

    of_class = np.random.RandomState(1)

    def __init__(self, n: int = 24) -> None:
        self.n = n
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator()
        self.transforms = [Jitter(bits) for bits in (np.random.Philox(1), np.random.SFC64(1), np.random.PCG64DXSM(1))]
        self.legacy = {"train": np.random.RandomState(1), 3: np.random.RandomState(np.random.PCG64(1))}
        self.partial = functools.partial(_drawn, np.random.Generator(np.random.MT19937(1)), again=random.Random(2))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        """Draws an odd number of gaussians and half words, so that the generators keep a remainder."""
        pythons = [self.python.gauss(), self.python.random()]
        numpys = [self.numpy.random(), self.numpy.integers(1 << 20, dtype=np.uint32), self.of_class.standard_normal()]
        torchs = torch.randn(1, generator=self.torch, dtype=torch.float64).tolist()
        others = [transform.draw() for transform in self.transforms]
        legacies = [each.standard_normal() for each in self.legacy.values()]
        return torch.tensor([index, *pythons, *numpys, *torchs, *others, *legacies, *self.partial()], dtype=torch.float64)


def _drawn(generator: np.random.Generator, again: random.Random) -> list[float]:
    return [generator.random(), again.random()]


class Jitter:
    """A transform with `__slots__`."""

    __slots__ = ("rng",)

    def __init__(self, bits: np.random.BitGenerator) -> None:
        self.rng = np.random.Generator(bits)

    def draw(self) -> float:
        """Draws one number and leaves half a word."""
        self.rng.integers(1 << 20, dtype=np.uint32)
        return self.rng.random()


class ReplacesGenerators(OwnsGenerators):
    """A dataset that sometimes replaces one of its generators."""

    def __getitem__(self, index: int) -> Any:
        drawn = super().__getitem__(index)
        if index % 3 == 0:
            self.numpy = np.random.default_rng()
            self.python = random.Random()
        return drawn


class ReadsSeveral(OwnsGenerators):
    """A dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class DrawingCollate:
    """A collate_fn that draws."""

    def __init__(self) -> None:
        self.rng = random.Random()

    def __call__(self, samples: list[Any]) -> Any:
        return torch.stack(samples) + self.rng.random()
