"""Values sent to other machines arrive as from a plain pickle, with large arrays in the received memory."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shmload.shm import pickling
from tests.shm.travel_kit import parcel_of, received


class Shared:
    """An object with memory that a pickle for this machine would only name."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getstate__(self) -> Any:
        return pickling.out_of_band(self.memory) if pickling.is_for_another_machine() else "where it is"

    def __setstate__(self, state: Any) -> None:
        self.memory = state


class ContainsShared(Shared):
    """An object that names its memory before that of an object it contains, but comes before that object in the pickle."""

    def __getstate__(self) -> Any:
        memory = super().__getstate__()
        return Shared(b"within"), memory

    def __setstate__(self, state: Any) -> None:
        self.within, self.memory = state


class ArraySubclass(np.ndarray[Any, Any]):
    """An ndarray subclass."""


VIEWS: list[Callable[[Any], Any]] = [
    lambda array: array,
    lambda array: array.T,
    lambda array: array[::2] if array.ndim else array,
    lambda array: array[..., ::-1] if array.ndim else array,
    np.asfortranarray,
    lambda array: array.view(ArraySubclass),
    lambda array: np.broadcast_to(array, (2, *array.shape)),
    lambda array: torch.arange(array.size, dtype=torch.int16).reshape(array.shape),
]
DTYPES = ["i1", "<f8", ">i4", "?", "c16", "S3", "U2", "M8[s]", "m8[D]", "O", "i2,S3", "i1,(2,)f4"]


@st.composite
def values(draw: st.DrawFn) -> Any:
    """Draws arrays and tensors of all kinds in a structure in which leaves may be the same object."""
    leaves = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(arrays.array_shapes(min_dims=0, max_side=6, min_side=0))
        array = np.zeros(shape, draw(st.sampled_from(DTYPES)))
        array[...] = np.arange(array.size).reshape(shape)
        leaves.append(draw(st.sampled_from(VIEWS))(array) if array.dtype.names is None else array)
    return draw(st.lists(st.sampled_from(leaves) | st.dictionaries(st.text(max_size=2), st.sampled_from(leaves)), max_size=8))


def described(value: Any) -> Any:
    """Returns everything observable of a value except whether it is writable."""
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.flags.f_contiguous, str(value.tolist())
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.tolist()
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    return [described(part) for part in value]


def leaves_of(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in (part.values() if isinstance(part, dict) else [part])]


@given(values(), st.sampled_from([0, 16, 1 << 20]))
def test_value_equals_that_of_a_plain_pickle(value: Any, least_nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickling, "LEAST_NBYTES", least_nbytes)
        arrived = pickling.loads(received(value))
    plain = pickle.loads(pickle.dumps(value, protocol=5))
    assert described(arrived) == described(plain)
    one, other = ([[a is b for b in leaves_of(what)] for a in leaves_of(what)] for what in (arrived, value))
    assert one == other  # identical objects stay identical
    for leaf in leaves_of(arrived):
        if isinstance(leaf, torch.Tensor):
            leaf += 1


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers())
def test_carried_memory_arrives_with_the_pickle(pieces: list[bytes], number: int) -> None:
    arrived, also = pickling.loads(received(([Shared(piece) for piece in pieces], number)))
    assert pieces == [bytes(one.memory) for one in arrived]
    assert number == also


def test_each_object_gets_its_own_memory_in_any_order() -> None:
    arrived = pickling.loads(received([ContainsShared(b"around"), np.ones(pickling.LEAST_NBYTES, np.uint8)]))
    assert [bytes(arrived[0].memory), bytes(arrived[0].within.memory)] == [b"around", b"within"]
    assert arrived[1].all()


def test_large_arrays_alias_the_parcel_at_cache_lines_and_small_ones_are_writable_copies() -> None:
    large, small = np.arange(pickling.LEAST_NBYTES, dtype=np.uint8), np.zeros(pickling.LEAST_NBYTES - 1, np.uint8)
    parcel = received((Shared(np.arange(40, dtype=np.uint8)), Shared(b"abc"), large, small))
    first, second, whole, copied = pickling.loads(parcel)
    for arrived in (np.frombuffer(first.memory, np.uint8), np.frombuffer(second.memory, np.uint8), whole):
        assert np.shares_memory(arrived, parcel)
        assert (arrived.ctypes.data - parcel.ctypes.data) % 64 == 0
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        whole[0] = 7
    copied[0] = 7
    assert not np.shares_memory(pickling.loads(parcel)[3], copied)


def test_tensor_is_a_copy() -> None:
    parcel = received(torch.zeros(pickling.LEAST_NBYTES, dtype=torch.int8))
    first, second = pickling.loads(parcel), pickling.loads(parcel)
    first += 1
    assert not second.any()
    assert not pickling.loads(parcel).any()
    assert not np.shares_memory(first.numpy(), parcel)


def test_large_arrays_and_tensors_are_not_copied_before_writing() -> None:
    value = np.zeros(pickling.LEAST_NBYTES, np.uint8), torch.zeros(pickling.LEAST_NBYTES)
    parcel = parcel_of(value)
    value[0][5], value[1][5] = 9, 9
    fd = os.memfd_create("shmload-test")
    os.ftruncate(fd, parcel.nbytes)
    parcel.write(fd)
    array, tensor = pickling.loads(os.pread(fd, parcel.nbytes, 0))
    os.close(fd)
    assert (array[5], tensor[5]) == (9, 9)
    assert len(parcel._pieces[0]) < 2000


def test_missing_room_is_an_error() -> None:
    parcel = parcel_of(b"value")
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ESPIPE) + "|" + os.strerror(errno.ENOSPC)):
            parcel.write(fd)
    finally:
        os.close(fd)


def test_nothing_is_carried_on_this_machine_even_after_a_failed_pickle() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        received((Shared(b"abc"), (one for one in "generators do not pickle")))
    assert not pickling.is_for_another_machine()
    assert pickle.loads(pickle.dumps(Shared(b"abc"))).memory == "where it is"


@pytest.mark.parametrize("text", [b"", b"no job", b"\xff" * 8, b"\1" + b"\0" * 7, b"no pickle"])
def test_invalid_parcel_is_an_error(text: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match=rf"{len(text)} bytes are not a parcel: "):
        pickling.loads(text)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2, torch.float32, torch.complex64])
@pytest.mark.parametrize("num_values", [0, 6, pickling.LEAST_NBYTES])
@pytest.mark.parametrize(
    "pickled_and_back", [lambda value: pickle.loads(pickling.dumps(value)), lambda value: pickling.loads(received(value))]
)
def test_tensors_of_every_dtype_are_sent(dtype: torch.dtype, num_values: int, pickled_and_back: Callable[[Any], Any]) -> None:
    """Torch's own pickles of tensors of some dtypes cannot be read."""
    value = (torch.arange(num_values) % 7).to(dtype)
    whole, part = pickled_and_back((value, value[num_values // 2 :]))
    assert (whole.dtype, part.dtype) == (dtype, dtype)
    assert torch.equal(whole.to(torch.complex64), value.to(torch.complex64))
    assert torch.equal(part.to(torch.complex64), value[num_values // 2 :].to(torch.complex64))
    whole[:] = 1  # it is writable


def test_array_keeps_its_byte_order() -> None:
    assert pickle.loads(pickling.dumps(np.arange(2, dtype=">i4"))).dtype.str == ">i4"
