from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.shm import owners


class Shared:
    """Holds memory that a pickle for this machine would only name."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getstate__(self) -> Any:
        return owners.carried(self.memory) if owners.is_abroad() else "where it is"

    def __setstate__(self, state: Any) -> None:
        self.memory = state


def dumped(value: Any) -> bytearray:
    return owners.dumps(value, lambda value, take: pickle.dumps(value, protocol=5, buffer_callback=take))


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers())
def test_what_is_carried_arrives_beside_what_is_pickled(pieces: list[bytes], number: int) -> None:
    arrived, also = owners.loads(dumped(([Shared(piece) for piece in pieces], number)))
    assert pieces == [bytes(one.memory) for one in arrived]
    assert number == also


def test_it_aliases_the_parcel_at_whole_cache_lines_and_an_array_is_a_copy_that_can_be_written_to() -> None:
    parcel = np.frombuffer(dumped((Shared(np.arange(40, dtype=np.uint8)), Shared(b"abc"), np.zeros(3))), np.uint8)
    first, second, array = owners.loads(parcel)
    for one in (first, second):
        arrived = np.frombuffer(one.memory, np.uint8)
        assert np.shares_memory(arrived, parcel)
        assert (arrived.ctypes.data - parcel.ctypes.data) % 64 == 0
    array[0] = 7


def test_for_this_machine_nothing_is_carried_also_after_a_pickle_that_failed() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dumped((Shared(b"abc"), (one for one in "generators do not pickle")))
    assert not owners.is_abroad()
    assert pickle.loads(pickle.dumps(Shared(b"abc"))).memory == "where it is"


@pytest.mark.parametrize("text", [b"", b"no job", b"\xff" * 8, b"\1" + b"\0" * 7, b"no pickle"])
def test_what_is_no_parcel_is_an_error(text: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match=rf"{len(text)} bytes are no job for other machines: "):
        owners.loads(text)
