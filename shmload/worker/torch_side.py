"""The part of a worker that needs torch: torch mode's seeds and worker info, and its default collate.

Apart from the rest so that a worker whose dataset never touches torch does not import it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate, worker


def prepare(dataset: Any, worker_id: int, num_workers: int, base_seed: int) -> None:
    """Seeds random, torch and numpy as torch's worker does, and sets what get_worker_info() answers."""
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(worker._generate_state(base_seed, worker_id))
    set_worker_info(dataset, worker_id, num_workers, seed)


def set_worker_info(dataset: Any, worker_id: int, num_workers: int, seed: int) -> None:
    """Sets what get_worker_info() answers in this process."""
    worker._worker_info = worker.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def default_collate(samples: list[Any]) -> Any:
    """torch's default collate, into private memory.

    In a worker torch's own stacks into a fresh shared-memory file for its queue; our batch goes to the slot instead. Like
    torch's it stacks into an array of the first sample's dtype, which matters where dtypes differ.
    """
    functions = dict(collate.default_collate_fn_map)
    if functions.get(torch.Tensor) is collate.collate_tensor_fn:  # else the user has put in one of his own
        functions[torch.Tensor] = _stack
    return collate.collate(samples, collate_fn_map=functions)


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or first.layout != torch.strided:
        collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # raises, and says what it does not take
    if all(tensor.dtype is first.dtype for tensor in batch):
        return torch.stack(tuple(batch), 0)  # also what `out=` refuses: tensors that require grad, quantised ones
    out = first.new_empty((len(batch), *first.size()))
    return torch.stack(tuple(batch), 0, out=out)
