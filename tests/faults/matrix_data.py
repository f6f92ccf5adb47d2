"""Datasets of the fault matrix, in a module that spawned workers import quickly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

BATCH = 4
NUM_BATCHES = 10
NUM_WORKERS = 2
NUM_BATCHES_READ = (NUM_BATCHES, 3, NUM_BATCHES)  # of each epoch; the second is abandoned


class Rows:
    """Fixed rows that contain the index, and the sample's random number where it does not depend on the worker."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        return {"x": np.arange(index, index + 200), "r": random.random() if self.draws else 0.5}


class Growing(Rows):
    """Texts that grow from batch to batch, so that slots must grow."""

    def __getitem__(self, index: int) -> Any:
        return f"{index} {random.random() if self.draws else 0.5} " * (50 << index // BATCH)


def as_list(samples: list[Any]) -> list[Any]:
    """Collates to a list, without stacking."""
    return samples
