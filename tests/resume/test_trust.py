"""A state runs no code: users' own states are stored without pickle, and a pickle is only opened if the program allows it."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from shmload import ShmLoader, StateMismatch
from shmload.schedule.state_checksum import with_checksum
from shmload.schedule.state_codec import MAX_DEPTH, UsersOwn, opened, sealed
from tests.resume import noisy_data as data


def round_trip(value: Any) -> Any:
    return opened(json.loads(json.dumps(sealed(UsersOwn(value)))), is_trusted=False)


def same(a: Any, b: Any) -> bool:
    """Returns whether the values are equal bit for bit, including all types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, complex):
        return np.complex128(a).tobytes() == np.complex128(b).tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(m, n) and same(x, y) for (m, x), (n, y) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
ARRAYS = st_np.arrays(
    st.one_of(st_np.scalar_dtypes(), st_np.unicode_string_dtypes(), st_np.byte_string_dtypes(), st_np.array_dtypes()),
    st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    ARRAYS,
    ARRAYS.map(lambda array: array[..., ::2].T if array.ndim else array),
    st_np.arrays(st_np.scalar_dtypes(), ()).map(lambda array: array[()]),
    st.frozensets(KEYS),
    st.sets(KEYS),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.sampled_from(["$own", "$tuple", "$pickle", "own", "a"]), inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_user_state_is_restored_bit_for_bit(value: Any) -> None:
    assert same(round_trip(value), value)


def test_records_of_any_width_and_empty_ones_are_restored() -> None:
    wide = np.zeros(3, [(f"a_field_with_a_long_name_{i}", "<f8") for i in range(600)])
    wide["a_field_with_a_long_name_599"] = (1, 2, 3)
    assert same(round_trip(wide), wide)
    assert same(round_trip(wide[0]), wide[0])


@pytest.mark.parametrize("raw", [b"", b"PK\x05\x06" + bytes(18)], ids=["nothing", "a zip file"])
def test_invalid_array_is_a_value_error(raw: bytes) -> None:
    text = json.dumps({"$own": {"$array": base64.b64encode(raw).decode()}})
    with pytest.raises(ValueError, match="magic string"):
        opened(text, is_trusted=False)


def nested(kind: Any, key: Any, depth: int) -> Any:
    value: Any = 7
    for _ in range(depth):
        value = kind([(key, value)])
    return value


@pytest.mark.parametrize(("kind", "key"), [(dict, 3), (dict, ("a", 1)), (OrderedDict, "a"), (dict, "a"), (dict, "$a")])
def test_containers_of_every_kind_have_the_same_depth_limit(kind: Any, key: Any) -> None:
    value = nested(kind, key, MAX_DEPTH)
    assert same(round_trip(value), value)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_restored(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 5).to(dtype).reshape(shape)
    for told in (tensor, tensor.T if tensor.ndim == 2 else tensor, tensor[:1] if tensor.ndim else tensor):
        assert same(round_trip(told), told)
    again = round_trip(tensor)
    again.zero_()  # the user may write to it


def test_large_numbers_and_generator_states_are_restored() -> None:
    for value in (10**6000, -(1 << 63), 1 << 63, np.random.get_state(), torch.get_rng_state()):
        assert same(round_trip(value), value)


# ------------------------------------------------------------ pickles


class Point:
    """An object that only pickle can represent."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


class CreatesFolderWhenUnpickled:
    """An object whose pickle creates a folder when it is opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class StateNeedsPickle(data.Counting):
    """A stateful dataset whose state contains such an object."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "deep": [Point(3)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["deep"] == [Point(3)]


class SamplerStateNeedsPickle(data.StatefulSampler):
    """A stateful sampler whose state contains such an object."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "deep": Point(3)}


MAKE = {
    "dataset": lambda **k: ShmLoader(StateNeedsPickle(), 6, **k),
    "sampler": lambda **k: ShmLoader(data.Noisy(), 6, sampler=SamplerStateNeedsPickle(40), **k),
    "sampler, seed": lambda **k: ShmLoader(data.Noisy(), 6, sampler=SamplerStateNeedsPickle(40), seed=3, **k),
}


@pytest.mark.parametrize("kind", MAKE)
def test_state_with_pickles_needs_trust_state(kind: str) -> None:
    loader = MAKE[kind]()
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [batch[:, 0].tolist() for batch in iterator]
    refusing = MAKE[kind]()
    before = refusing.state_dict()
    with pytest.raises(StateMismatch, match=r"holds an object of tests\.resume\.test_trust\.Point .* trust_state=True"):
        refusing.load_state_dict(state)
    assert refusing.state_dict() == before
    trusting = MAKE[kind](trust_state=True)
    assert trusting.trust_state
    trusting.load_state_dict(state)
    assert [batch[:, 0].tolist() for batch in trusting] == expected


PICKLED = {
    "containers too deep": nested(dict, "a", MAX_DEPTH + 2),
    "an array of objects": np.array([None, {1: 2}, "a"], object),
    "a tensor with a gradient": torch.tensor([1.0, 2.0], requires_grad=True),
    "a conjugated tensor": torch.tensor([1 + 2j]).conj(),
    "a sparse tensor": torch.tensor([[0, 3]]).to_sparse(),
}


@pytest.mark.parametrize("value", PICKLED.values(), ids=PICKLED)
def test_other_values_are_restored_by_pickle_if_trusted(value: Any) -> None:
    text = sealed(UsersOwn(value))
    with pytest.raises(StateMismatch, match=r"that only pickle can read"):
        opened(text, is_trusted=False)
    again = opened(text, is_trusted=True)
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@pytest.mark.slow(reason="starts a worker for each of two loaders")
def test_workers_states_with_pickles_need_trust_state() -> None:
    with ShmLoader(StateNeedsPickle(), 6, num_workers=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(StateMismatch, match="trust_state=True"):
            loader.load_state_dict(state)
    with ShmLoader(StateNeedsPickle(), 6, num_workers=1, trust_state=True) as loader:
        loader.load_state_dict(state)
        assert sum(1 for _ in loader) == 6


def test_copy_of_a_loader_needs_no_trust_state() -> None:
    loader = MAKE["sampler, seed"]()
    next(iter(loader))
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict()["step"] == 1


# Tensors that others have unpickled in this process.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
def test_state_that_torch_load_accepts_runs_no_code(tmp_path: Path) -> None:
    loader = ShmLoader(data.Counting(), 6)
    next(iter(loader))
    state = loader.state_dict()
    inside = json.loads(state["details"])
    target = str(tmp_path / "made by a state")
    harm = json.loads(sealed(UsersOwn(CreatesFolderWhenUnpickled(target))))["$own"]
    for place in (harm, {"$own": harm}, {"$own": [{"a": harm}]}, {"pickled": harm["$pickle"][1]}):
        inside["workers"][0]["dataset"] = place
        file = io.BytesIO()
        torch.save(with_checksum({**state, "details": json.dumps(inside)}), file)
        file.seek(0)
        hostile = torch.load(file, weights_only=True)
        other = ShmLoader(data.Counting(), 6)
        try:
            other.load_state_dict(hostile)
            next(iter(other), None)
        except (StateMismatch, KeyError, TypeError):  # raised by the dataset, which is given nonsense
            pass
        assert not Path(target).exists()
