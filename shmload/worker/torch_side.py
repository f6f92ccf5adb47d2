"""The parts of a worker that need torch: seeds and worker info as in torch's workers, and the default collate.

It is a module of its own because a worker whose dataset never uses torch does not import it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shmload.torch_names import collate_module, numpy_seed, set_thread_name, worker_module


def prepare(dataset: Any, worker_id: int, num_workers: int, base_seed: int) -> None:
    """Seed random, torch and numpy as torch's worker does, and set the result of get_worker_info()."""
    set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    # torch.utils.data.get_worker_info() returns this
    worker_module._worker_info = worker_module.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def default_collate(samples: list[Any]) -> Any:
    """Collate samples as torch's default does, into private memory.

    In a worker, torch's own function stacks into a new shared-memory file for its queue; this one stacks into private memory,
    because the batch is then written to the slot. Both stack into an array of the first sample's dtype, which matters if dtypes
    differ.
    """
    functions = dict(collate_module.default_collate_fn_map)
    if functions.get(torch.Tensor) is collate_module.collate_tensor_fn:  # otherwise the user has registered another function
        functions[torch.Tensor] = _stack
    return collate_module.collate(samples, collate_fn_map=functions)


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or first.layout != torch.strided:
        collate_module.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # raises torch's error for a type that it refuses
    if all(tensor.dtype is first.dtype for tensor in batch):
        return torch.stack(batch, 0)  # for tensors that `out=` refuses: quantized ones, and those that require grad
    out = first.new_empty((len(batch), *first.size()))
    return torch.stack(batch, 0, out=out)
