"""What can be done with a batch made by workers, and what profilers and thread names show."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.behaviour.behaviour_kit import Numbers, as_list, batches, raised, same_as_torch


def differs(reason: str) -> Any:
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


class Pairs(Numbers):
    """A dataset of pairs of a tensor and an array."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), np.full((2,), index, np.int16)


def first(kind: Any, **options: Any) -> Any:
    return next(iter(kind(Pairs(4), batch_size=2, num_workers=1, **options)))


USES: dict[str, Any] = {
    "write": lambda x: x.add_(1).sum(),
    "share": lambda x: x.share_memory_().is_shared(),
    "resize": lambda x: tuple(x.resize_(3, 5).shape),
    "resize smaller": lambda x: x.resize_(2).tolist(),
    "view": lambda x: x.view(-1).tolist(),
    "view as bytes": lambda x: x.view(torch.uint8).shape[-1],
    "set": lambda x: x.set_(torch.zeros(2)).tolist(),
    "gradient": lambda x: x.requires_grad_().sum().backward() or x.grad.tolist(),
    "array": lambda x: x.numpy().flags.writeable,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "storage": lambda x: (x.untyped_storage().nbytes(), x.storage_offset(), x.is_contiguous(), x.is_leaf),
    "layout": lambda x: (x.stride(), x.layout, x.device, x.dtype),
}


@pytest.mark.parametrize("use", USES)
def test_tensor_supports_the_operations_of_torchs(use: str) -> None:
    def program(kind: Any) -> Any:
        tensor = first(kind)[0]
        found: list[Any] = []
        return raised(lambda: found.append(USES[use](tensor))) or found

    same_as_torch(program)


@differs("a tensor in the ring does not report that it is shared")
def test_tensor_from_a_worker_is_shared() -> None:
    assert same_as_torch(lambda kind: first(kind)[0].is_shared()) is True


def test_arrays_from_a_collate_fn_are_writable_and_can_be_reshaped() -> None:
    def program(kind: Any) -> Any:
        array = first(kind, collate_fn=as_list)[0][1]
        array += 1
        array.shape = (1, 2)
        return array, array.flags.writeable, array.flags.c_contiguous, type(array)

    same_as_torch(program)


def test_profiler_shows_each_batch_under_torchs_name() -> None:
    def program(kind: Any) -> Any:
        with torch.autograd.profiler.profile() as profile:
            batches(kind(Numbers(3), num_workers=1))
        return sorted({event.name for event in profile.function_events if "enumerate" in event.name})

    assert same_as_torch(program) == ["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"]


class Named(Numbers):
    def __getitem__(self, index: int) -> Any:
        return Path("/proc/self/comm").read_text().strip()


def test_thread_of_a_worker_has_torchs_name() -> None:
    found = same_as_torch(lambda kind: batches(kind(Named(2), num_workers=1, batch_size=None)))
    assert found == ["pt_data_worker"] * 2
