"""All private names of torch that shmload uses, looked up in one place: a release that lacks one fails here and nowhere else.

torch 2.6 and newer is supported; docs/versions.md lists the tested combinations of Python, torch and numpy. A comment gives the
first release that has a name if 2.6 does not. No name has been removed so far. Where a name may be missing, its replacement keeps
the same promise.

Importing this module imports torch, so a worker whose dataset does not need torch never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.utils.data import _utils as _data
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseIterator
from torch.utils.data.dataloader import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler
from torch.utils.data.dataloader import _sharding_worker_init_fn as sharding_worker_init_fn
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessIterator

__all__ = [
    "DLPACK_HAS_FLOAT8",
    "BaseIterator",
    "DatasetKind",
    "InfiniteConstantSampler",
    "NestedTensor",
    "SingleProcessIterator",
    "collate_module",
    "default_store",
    "from_dlpack",
    "has_cuda_context",
    "numpy_seed",
    "pin_memory",
    "profiler_enabled",
    "rank_processes",
    "sample_dirichlet",
    "set_thread_name",
    "sharding_worker_init_fn",
    "standard_gamma",
    "worker_module",
]

# Parts of torch's loader. BaseIterator also has private attributes: `_sampler_iter`, `_base_seed`, `_shared_seed`, `_num_yielded`.
worker_module = _data.worker  # get_worker_info() returns its `_worker_info`, an instance of `WorkerInfo`
collate_module = _data.collate  # `collate_tensor_fn` stacks tensors
numpy_seed: Callable[[int, int], list[int]] = _data.worker._generate_state
pin_memory: Callable[..., Any] = _data.pin_memory.pin_memory

standard_gamma = torch._standard_gamma  # draws for the distribution Gamma
sample_dirichlet = torch._sample_dirichlet  # draws for Dirichlet and Beta


def default_store() -> Any:
    """Return the key-value store shared by all ranks, or None without a process group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


# Tensors over memory that torch did not allocate
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def _has_float8() -> bool:
    try:
        from_dlpack(torch.empty(1, dtype=torch.float8_e5m2).__dlpack__())
    except (RuntimeError, BufferError):  # the type depends on the release
        return False
    return True


DLPACK_HAS_FLOAT8 = _has_float8()  # 2.10

# The process
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
has_cuda_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)  # only with CUDA
set_thread_name: Callable[[str], None] = torch.multiprocessing._set_thread_name


def rank_processes(agent: Any) -> Any:
    """Return the SubprocessContext of the processes that a torch.distributed.elastic LocalElasticAgent started last."""
    return agent._pcontext
