"""Datasets for seed mode, at module level so that every start method can pickle them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from shmload import sample_info, sample_rng


class Noisy:
    """Samples augmented with every kind of generator."""

    def __init__(self, n: int = 50) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        assert sample_info().index == index
        return {
            "index": index,
            "own": sample_rng().random(3),
            "torch": torch.rand(2),
            "numpy": np.random.rand(2),
            "python": random.random(),
        }


class Ragged(Noisy):
    """Samples of different lengths, with text."""

    def __getitem__(self, index: int) -> Any:
        return f"{index}-{random.randrange(1000)}", [index] * 2


class EveryTenthLonger(Noisy):
    """Samples of which every tenth is longer, so batches without one have fixed rows and others cannot be stacked."""

    def __getitem__(self, index: int) -> Any:
        return np.full(3 + (index % 10 == 9), index)


class Point(NamedTuple):
    image: Any
    label: Any


class InPlace:
    """A dataset that decodes into rows."""

    schema = {"image": ("uint8", (3, 4)), "label": "int64", "brain": (torch.bfloat16, (2,))}

    def __init__(self, n: int = 50) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def read_into(self, index: int, out: Any) -> None:
        out["image"][...] = sample_rng().integers(0, 256, (3, 4))
        out["label"] = index
        out["brain"][...] = index / 2


class InBatches(InPlace):
    """A dataset that decodes whole ranges of rows."""

    schema = {"image": ("uint8", (3, 4)), "label": "int64"}
    batch_type = Point
    read_into = None

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["image"][...] = (indices % 256)[:, None, None]
        out["label"] = indices


class ZeroFilled(dict):
    """A schema whose rows are set to zero first."""

    zero_fill = True


class PartialRows(InPlace):
    """A dataset that writes only a part of its rows."""

    schema = ZeroFilled(image=("uint8", (3, 4)))

    def read_into(self, index: int, out: Any) -> None:
        out["image"][0, 0] = index + 1
