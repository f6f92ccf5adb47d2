"""torch's private names, all of them, looked up in one place: a new release that lacks one fails here and nowhere else.

Supported are torch 2.6 to the newest; docs/versions.md has the pairs of Python, torch and numpy that were tried, and when. Beside
each name stands since when a release has it, if 2.6 does not; none of them has gone yet. Where one may be missing, what stands in
for it keeps the promise.

Nothing here is needed by a worker whose dataset does without torch: who imports this imports torch.
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
    "set_thread_name",
    "sharding_worker_init_fn",
    "without_torch_function",
    "worker_module",
]

# The loader's own parts. BaseIterator's attributes are private, too: `_sampler_iter`, `_base_seed`, `_shared_seed`, `_num_yielded`.
worker_module = _data.worker  # `_worker_info` is what get_worker_info() answers, `WorkerInfo` its class
collate_module = _data.collate  # `collate_tensor_fn` is torch's own way to stack
numpy_seed: Callable[[int, int], list[int]] = _data.worker._generate_state
pin_memory: Callable[..., Any] = _data.pin_memory.pin_memory


def default_store() -> Any:
    """What all ranks of the job write to and read from; None: there is no process group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


# Tensors over memory that is not torch's
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def _has_float8() -> bool:
    try:
        from_dlpack(torch.empty(1, dtype=torch.float8_e5m2).__dlpack__())
    except (RuntimeError, BufferError):  # which of them, depends on the release
        return False
    return True


DLPACK_HAS_FLOAT8 = _has_float8()  # 2.10
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass

# The process
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
has_cuda_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)  # in builds with CUDA
set_thread_name: Callable[[str], None] = torch.multiprocessing._set_thread_name


def rank_processes(agent: Any) -> Any:
    """The processes that torch.distributed.elastic's LocalElasticAgent has started last: a SubprocessContext."""
    return agent._pcontext
