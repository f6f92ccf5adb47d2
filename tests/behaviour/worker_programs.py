"""A dataset and a worker_init_fn that workers of every start method can import."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class NotesDataset(Dataset):
    """A dataset whose samples are what `note_in_worker` recorded in this process's copy."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.notes: list[Any] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.notes[0]


def note_in_worker(worker_id: int) -> None:
    """Records the worker's number and random numbers drawn at its start, as a worker_init_fn."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    known = (info.id, info.num_workers, info.seed, torch.get_num_threads(), len(dataset.notes))
    dataset.notes.append((worker_id, known, random.random(), np.random.rand(), torch.rand(()).item()))
