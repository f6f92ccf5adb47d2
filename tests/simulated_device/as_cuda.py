"""Runs programs written for CUDA on a simulated device: their requests to torch go to it.

Only what copies batches is supported: `tensor.to("cuda")`, `tensor.cuda()`, `copy_` into tensors from these, `record_stream`, and
the streams and graphs of `torch.cuda`. A graph is not replayed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.simulated_device.device import SimulatedDevice


class _Copies(TorchFunctionMode):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = self._device
        if func is torch.Tensor.cuda or (func is torch.Tensor.to and str((*args[1:2], kwargs.get("device"))[0]).startswith("cuda")):
            made = device.copy(args[0])
        elif func is torch.Tensor.copy_ and device.stream_for(args[0]) is not None:
            made = device.copy(args[1], args[0])
        else:
            return func(*args, **kwargs)
        if not kwargs.get("non_blocking", False):
            device.wait_on_host(device.record(device.current_stream()))
        return made


@contextlib.contextmanager
def _capturing(device: SimulatedDevice, graph: object) -> Iterator[None]:
    device.is_graph = True
    try:
        yield
    finally:
        device.is_graph = False


@contextlib.contextmanager
def as_cuda(device: SimulatedDevice) -> Iterator[None]:
    """Replaces CUDA by a simulated device in this thread until the block ends."""
    with (
        mock.patch.object(torch.cuda, "Stream", device.side_stream),
        mock.patch.object(torch.cuda, "stream", device.using),
        mock.patch.object(torch.cuda, "current_stream", device.current_stream),
        mock.patch.object(torch.cuda, "CUDAGraph", object),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: device.keep_for(tensor, stream)),
        mock.patch.object(torch.cuda, "graph", functools.partial(_capturing, device)),
        _Copies(device),
    ):
        yield
