"""Every alias of a batch's memory keeps its slot leased, and the slot is returned when the last alias dies."""

from __future__ import annotations

import ctypes
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack


class _ArrayInterface:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {**tensor.numpy().__array_interface__}


def _saved_by_autograd(tensor: torch.Tensor) -> Any:
    weight = torch.ones_like(tensor, requires_grad=True)
    loss = (weight * tensor).sum()
    return lambda: torch.autograd.grad(loss, weight, retain_graph=True)[0]


def _saved_by_a_layer(tensor: torch.Tensor) -> Any:
    layer = torch.nn.Linear(8, 2, bias=False)
    out = layer(tensor).sum()
    return lambda: torch.autograd.grad(out, layer.weight, retain_graph=True)[0]


def _as_grad(tensor: torch.Tensor) -> Any:
    parameter = torch.zeros(tensor.shape, requires_grad=True)
    parameter.grad = tensor
    return lambda: parameter.grad


def _as_buffer_of_module(tensor: torch.Tensor) -> Any:
    module = torch.nn.Module()
    module.register_buffer("held", tensor)
    return module.state_dict


def _in_generator(tensor: torch.Tensor) -> Iterator[Any]:
    kept = tensor
    while True:
        yield kept


def _started(generator: Iterator[Any]) -> Callable[[], Any]:
    next(generator)
    return generator.__next__


def _fail(kept: torch.Tensor) -> None:
    raise ValueError("holds its frame")


def _in_traceback(tensor: torch.Tensor) -> Any:
    try:
        _fail(tensor)
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next)


def _with_hook(tensor: torch.Tensor) -> Any:
    other = torch.zeros(1, requires_grad=True)
    other.register_hook(lambda grad, kept=tensor: kept)
    return lambda: next(iter(other._backward_hooks.values())).__defaults__[0]


def _as_ctypes(tensor: torch.Tensor) -> Any:
    return (ctypes.c_char * tensor.nbytes).from_buffer(tensor.numpy())


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[1:3],
    "row": lambda t: t[-1],
    "element": lambda t: t[0, 0, 0],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "view": lambda t: t.view(12, 8),
    "view_dtype": lambda t: t.view(torch.int16),
    "view_as": lambda t: t.view_as(torch.empty(96)),
    "reshape": lambda t: t.reshape(-1),
    "flatten": lambda t: t.flatten(),
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: t[:, :, :1].expand(4, 3, 5),
    "as_strided": lambda t: t.as_strided((5,), (2,), 3),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(2, 3, 2),
    "unbind": lambda t: t.unbind()[1:],
    "chunk": lambda t: t.chunk(2)[1],
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "untyped_storage": lambda t: t.untyped_storage(),
    "set_tensor": lambda t: torch.empty(0).set_(t),
    "set_storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 4, (3,), (2,)),
    "data_assigned": lambda t: _data_assigned(t),
    "parameter": lambda t: torch.nn.Parameter(t),
    "buffer_of_module": _as_buffer_of_module,
    "grad": _as_grad,
    "autograd_saved": _saved_by_autograd,
    "autograd_saved_by_layer": _saved_by_a_layer,
    "hook": _with_hook,
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "numpy_slice": lambda t: t.numpy()[1:, ::2],
    "numpy_view": lambda t: t.numpy().view(np.uint8),
    "from_numpy": lambda t: torch.from_numpy(t.numpy()),
    "as_tensor": lambda t: torch.as_tensor(t.numpy()),
    "frombuffer": lambda t: torch.frombuffer(t.numpy(), dtype=torch.float32),
    "dlpack_torch": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "dlpack_numpy": lambda t: np.from_dlpack(t),
    "dlpack_unconsumed": lambda t: functools.partial(torch.utils.dlpack.from_dlpack, t.__dlpack__()),
    "memoryview": lambda t: memoryview(t.numpy()),
    "pickle_buffer": lambda t: pickle.PickleBuffer(t.numpy()),
    "ctypes": _as_ctypes,
    "array_interface": lambda t: np.asarray(_ArrayInterface(t)),
    "list": lambda t: [t],
    "dict": lambda t: {"kept": t},
    "closure": lambda t: lambda: t,
    "partial": lambda t: functools.partial(torch.Tensor.add, t, 1),
    "generator_frame": lambda t: _started(_in_generator(t)),
    "traceback": _in_traceback,
}


def _data_assigned(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.empty(0)
    other.data = tensor
    return other


@pytest.mark.parametrize("name", ALIASES)
def test_alias_keeps_its_slot_until_it_dies(name: str, stream: Any, raw: Any) -> None:
    alias = ALIASES[name](stream.next()["x"])
    expected = raw(ALIASES["data" if name == "autograd_saved" else name](stream.expected()["x"]))
    if name == "autograd_saved_by_layer":  # its gradient is the sum over rows, whatever the weights are
        expected = raw(stream.expected()["x"].sum((0, 1)).expand(2, 8))
    assert stream.num_leased == 1
    stream.run_on()
    assert stream.num_leased == 1
    assert raw(alias) == expected
    del alias
    assert stream.num_leased == 0


@pytest.mark.parametrize("name", ["x", "bfloat16", "bool", "complex64", "label"])
def test_field_of_any_dtype_keeps_its_slot(name: str, stream: Any, raw: Any) -> None:
    field = stream.next()[name][1:]
    expected = stream.expected()[name][1:]
    assert expected.dtype == field.dtype
    stream.run_on()
    assert raw(field) == raw(expected)
    assert stream.num_leased == 1
    del field
    assert stream.num_leased == 0


@pytest.mark.parametrize("name", ["view_as_real", "real", "imag"])
def test_part_of_a_complex_field_keeps_its_slot(name: str, stream: Any, raw: Any) -> None:
    part = getattr(torch, name)(stream.next()["complex64"])
    expected = getattr(torch, name)(stream.expected()["complex64"])
    stream.run_on()
    assert raw(part) == raw(expected)
    del part
    assert stream.num_leased == 0


@pytest.mark.parametrize("take", [lambda b: b[0]["x"], lambda b: b[2], lambda b: b[0]["complex64"]])
def test_packed_batch_keeps_its_slot(take: Callable[[Any], Any], packed_stream: Any, raw: Any) -> None:
    stream = packed_stream
    kept = take(stream.next())
    fields = stream.expected()
    expected = take([fields, "text", fields["x"].numpy()])
    stream.run_on()
    assert raw(kept) == raw(expected)
    assert stream.num_leased == 1
    del kept
    assert stream.num_leased == 0


def test_text_of_a_packed_batch_does_not_keep_its_slot(packed_stream: Any) -> None:
    text = packed_stream.next()[1]
    assert packed_stream.num_leased == 0
    assert text == "text"


def test_write_through_an_alias_is_seen_by_the_others(stream: Any) -> None:
    batch = stream.next()["x"]
    array = batch.numpy()
    batch.fill_(-1)
    array[0] = -2
    stream.run_on()
    assert torch.all(batch[0] == -2)
    assert np.all(array[1:] == -1)


def test_alias_in_another_thread_keeps_its_slot_until_the_thread_ends(stream: Any, raw: Any) -> None:
    may_end, seen = threading.Event(), []

    def hold(tensor: torch.Tensor) -> None:
        view = tensor[1:]
        del tensor
        may_end.wait()
        seen.append(raw(view))

    thread = threading.Thread(target=hold, args=(stream.next()["x"],))
    expected = raw(stream.expected()["x"][1:])
    thread.start()
    stream.run_on()
    assert stream.num_leased == 1
    may_end.set()
    thread.join()
    assert seen == [expected]
    assert stream.num_leased == 0


def test_slots_released_by_many_threads_at_once_are_all_returned(make_stream: Any) -> None:
    stream = make_stream(prefetch_factor=8)
    for _ in range(20):
        batches = [stream.next() for _ in range(8)]
        gate = threading.Barrier(8)
        threads = [threading.Thread(target=_drop_at, args=(gate, batches.pop())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads, thread
        assert stream.num_leased == 0


def _drop_at(gate: threading.Barrier, batch: dict[str, Any]) -> None:
    gate.wait()
    batch.clear()


def test_reference_cycle_keeps_its_slot_until_it_is_collected(stream: Any, raw: Any) -> None:
    gc.disable()
    try:
        cycle: dict[str, Any] = {"tensor": stream.next()["x"]}
        cycle["self"] = cycle
        address = cycle["tensor"].numpy()
        expected = raw(stream.expected()["x"])
        del cycle
        stream.run_on()
        assert raw(address) == expected
        del address
        assert stream.num_leased == 1
    finally:
        gc.enable()
    gc.collect()
    assert stream.num_leased == 0


def test_last_of_several_aliases_returns_the_slot(stream: Any) -> None:
    batch = stream.next()
    aliases = [batch["x"][0], batch["label"].numpy(), batch["bool"].untyped_storage()]
    del batch
    while aliases:
        assert stream.num_leased == 1
        aliases.pop()
    assert stream.num_leased == 0


def test_returned_slot_is_overwritten_at_once(stream: Any) -> None:
    """Checks the poison, without which no test in this file could fail."""
    batch = stream.next()["x"]
    bytes_at = (ctypes.c_uint8 * batch.nbytes).from_address(batch.data_ptr())
    assert bytes(bytes_at) != b"\xa5" * batch.nbytes
    del batch
    assert bytes(bytes_at) == b"\xa5" * len(bytes_at)
