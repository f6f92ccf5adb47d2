"""The digest is XXH64 of a batch's content, independent of the kind of memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.digest import hash_at, hash_bytes
from shmload.audit.batch_digest import digest_of
from shmload.batch.mapped_batch import mapped

P1, P2, P3, P4, P5 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MASK = 2**64 - 1


def rotated(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & MASK


def stirred(lane: int, x: int) -> int:
    return rotated((lane + x * P2) & MASK, 31) * P1 & MASK


def xxh64(data: bytes) -> int:
    """Computes XXH64 as in its specification, ignoring speed."""
    at, size = 0, len(data)
    if size >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while size - at >= 32:
            lanes = [stirred(lane, int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little")) for i, lane in enumerate(lanes)]
            at += 32
        total = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            total = ((total ^ stirred(0, lane)) * P1 + P4) & MASK
    else:
        total = P5
    total = (total + size) & MASK
    while size - at >= 8:
        total = (rotated(total ^ stirred(0, int.from_bytes(data[at : at + 8], "little")), 27) * P1 + P4) & MASK
        at += 8
    if size - at >= 4:
        total = (rotated(total ^ int.from_bytes(data[at : at + 4], "little") * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        total = rotated(total ^ byte * P5 & MASK, 11) * P1 & MASK
    total = (total ^ total >> 33) * P2 & MASK
    total = (total ^ total >> 29) * P3 & MASK
    return total ^ total >> 32


@pytest.mark.parametrize(
    ("data", "expected"), [(b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)]
)
def test_reference_has_the_published_values(data: bytes, expected: int) -> None:
    assert expected == hash_bytes(data) == xxh64(data)


@given(st.binary(max_size=200))
def test_any_bytes_hash_as_specified(data: bytes) -> None:
    assert xxh64(data) == hash_bytes(data)


def test_long_memory_has_the_same_hash_by_address_and_by_buffer() -> None:
    data = np.arange(5003, dtype=np.int64)
    assert xxh64(data.tobytes()) == hash_bytes(data) == hash_at(data.ctypes.data, data.nbytes)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Both:
    left: Any
    right: Any


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value


class Key(str):
    """A str subclass with attributes."""


class Table(dict[str, Any]):
    """A dict subclass with attributes."""


class Color(IntEnum):
    RED = 1
    BLUE = 2


def with_attribute(value: Any, number: int) -> Any:
    value.number = number
    return value


class Slotted:
    __slots__ = ("value",)


class Deque(deque[int]):
    """A deque subclass with attributes."""


class Dozens(int):
    """An int subclass."""


class Picture(torch.Tensor):
    """A tensor subclass, like torchvision's."""


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
RECORD = np.array([(1, 2.0)], np.dtype([("a", "i4"), ("b", "f8")], align=True))
DIFFERENT = {
    "none": None,
    "true": True,
    "false": False,
    "one": 1,
    "one as float": 1.0,
    "one as text": "1",
    "one as bytes": b"1",
    "huge": 10**30,
    "complex": 1j,
    "key": Key("1"),
    "other key": Key("2"),
    "dozens": Dozens(1),
    "other dozens": Dozens(2),
    "nan": float("nan"),
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "nested": [[1], [2]],
    "nested otherwise": [[1, 2]],
    "texts": ["ab", "c"],
    "texts cut otherwise": ["a", "bc"],
    "dict": {"a": 1},
    "dict of other key": {"b": 1},
    "named": Pair(1, 2),
    "tuple": (1, 2),
    "dataclass": Both(1, 2),
    "object": Thing([1, 2]),
    "set": {1, 2, 3},
    "tensor": base,
    "tensor of other shape": base.reshape(3, 8),
    "tensor of other type": base.double(),
    "same bytes as int": base.view(torch.int32),
    "array": base.numpy(),
    "masked": np.ma.masked_array([1, 2], [False, True]),
    "masked otherwise": np.ma.masked_array([1, 2], [True, False]),
    "transposed": base.mT,
    "bf16": base.bfloat16(),
    "bool": base > 3,
    "complex tensor": torch.tensor([1 + 2j]),
    "its conjugate": torch.tensor([1 + 2j]).conj(),
    "0-d": torch.tensor(3.0),
    "0-d otherwise": torch.tensor(4.0),
    "empty": torch.empty(0, 3),
    "empty of other shape": torch.empty(3, 0),
    "strided": base[:, ::2],
    "jagged": jagged([1.0], [2.0, 3.0]),
    "jagged otherwise": jagged([1.0, 2.0], [3.0]),
    "sparse": torch.eye(3).to_sparse(),
    "record array": RECORD,
    "text array": np.array(["a", "b"]),
    "big-endian": np.arange(3, dtype=">i4"),
    "object array": np.array([None, "x"], object),
    "numpy scalar": np.float32(1.5),
    "subclass": torch.ones(2).as_subclass(Picture),
    "subclass with an attribute": with_attribute(torch.ones(2).as_subclass(Picture), 1),
    "subclass with another attribute": with_attribute(torch.ones(2).as_subclass(Picture), 2),
    "key with an attribute": with_attribute(Key("1"), 1),
    "table with an attribute": with_attribute(Table(), 1),
    "table with another attribute": with_attribute(Table(), 2),
    "member": Color.RED,
    "other member": Color.BLUE,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_different_values_have_different_complete_digests() -> None:
    digests = {name: digest_of(value) for name, value in DIFFERENT.items()}
    assert len(DIFFERENT) == len({digest for digest, _ in digests.values()})
    assert not [name for name, (_, is_partial) in digests.items() if is_partial]


SAME = {
    "strides": (base.mT.contiguous().mT, base.clone()),
    "channels_last": (base[None].to(memory_format=torch.channels_last), base[None].clone()),
    "an expanded tensor": (torch.ones(1, 3).expand(2, 3), torch.ones(2, 3)),
    "a view in the middle": (base[1], base[1].clone()),
    "Fortran order": (np.asfortranarray(base.numpy()), base.numpy().copy()),
    "a resolved conjugate": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    "gradients": (torch.ones(2, requires_grad=True), torch.ones(2)),
    "sets built in another order": ({"a", "b", "c"}, {"c", "b", "a"}),
    "texts that are one object": (["xy" * 2] * 2, ["xyxy", "xy" + "xy"]),
    "objects": (Thing(base), Thing(base.clone())),
    "nested tensors": (jagged([1.0], [2.0, 3.0]), jagged([1.0], [2.0, 3.0])),
    "an uncoalesced sparse tensor": (
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
        torch.sparse_coo_tensor([[0]], [3.0], (3,), check_invariants=True),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_values_have_the_same_digest(name: str) -> None:
    one, other = SAME[name]
    assert digest_of(one) == digest_of(other)


def test_copied_out_batch_keeps_its_digest() -> None:
    batch = {"x": base.mT, "y": [base.numpy(), "text"], "z": Pair(torch.ones(3).bfloat16(), 2)}
    assert digest_of(batch) == digest_of(mapped(batch, torch.Tensor.clone))


def test_digest_depends_on_every_element() -> None:
    changed = base.clone()
    changed[1, 2, 3] += 1
    assert digest_of({"x": base}) != digest_of({"x": changed})


def test_digest_of_values_without_bytes_is_partial() -> None:
    slotted = type("Slotted", (Slotted,), {})()
    slotted.value = 1
    for value in (object(), [lambda: 1], {"f": iter([])}, {object()}, slotted, Deque([1])):
        assert digest_of(value)[1]


def test_digest_of_a_reference_cycle_terminates() -> None:
    thing = Thing(None)
    thing.value = thing
    assert digest_of(thing) == digest_of(thing)


def test_digest_of_a_subclass_that_refers_to_itself_terminates() -> None:
    table = Table(a=1)
    with_attribute(table, 1).table = table
    assert digest_of(table) == digest_of(table)


def test_digest_depends_on_the_order_of_keys() -> None:
    assert digest_of(OrderedDict(a=1, b=2)) != digest_of(OrderedDict(b=2, a=1))
