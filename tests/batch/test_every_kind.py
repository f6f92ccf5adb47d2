"""Samples of every kind give the batch of the reference, with and without workers and in every mode of ragged fields."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserList, deque
from collections.abc import Iterator
from enum import IntEnum
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import default_collate

from shmload import ShmLoader
from shmload.batch import batch_memory, fixed_rows
from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.packed_batch import Packer, pack
from shmload.batch.ragged import ragged_of
from shmload.batch.unpacking import unpack
from shmload.modes.default_collate import collated
from shmload.torch_names import from_dlpack
from tests.batch.ragged_kit import Encoding, Frozen, Opaque, Pair, Record, Samples, assert_same, reference
from tests.matrix.versions import TORCH

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # there may be fewer cores than workers
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
TORCH_DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *([torch.float8_e8m0fnu] if TORCH >= (2, 7) else []),
]
NUMPY_DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?", "c8", "c16"]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> torch.Tensor:
    """Returns a tensor of any dtype whose bytes are all determined by `fill`."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    numel = int(np.prod(shape))
    raw = (torch.arange(numel * itemsize) * 7 + fill).to(torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


SAMPLES: dict[str, list[Any]] = {
    "str": ["", "a", "grüße", "日本語", "\udcff", "x" * 70000],
    "bytes": [b"", b"\0", b"abc"],
    "int": [1, -5, 2**62],
    "float": [0.5, float("inf"), -0.0],
    "bool": [True, False, True],
    "none": [None, None, None],
    "none or text": [None, "a", None],
    "none or array": [None, np.arange(3), np.arange(2)],
    "int too large": [1, 2**70, 3],
    "mixed": ["a", 1, 2.5],
    "even arrays": [np.full((2, 3), i) for i in range(3)],
    "ragged arrays": [np.arange(i, dtype=np.float32) for i in (3, 0, 2)],
    "ragged in two dimensions": [np.ones((i, 4 - i)) for i in (1, 2, 3)],
    "another number of dimensions": [np.ones(2), np.ones((2, 2)), np.ones(())],
    "other dtypes": [np.ones(2), np.ones(2, np.float32), np.ones(1, np.int8)],
    "all empty": [np.empty(0), np.empty(0), np.empty(0)],
    "empty rows": [np.empty((0, 3)), np.empty((0, 3)), np.ones((2, 3))],
    "strided": [np.arange(12).reshape(3, 4).T[i:, ::2] for i in (0, 1, 2)],
    "reversed": [np.arange(i)[::-1] for i in (3, 4, 5)],
    "0-d arrays": [np.array(1.5), np.array(2.5), np.array(0.5)],
    "numpy scalars": [np.float32(1), np.float32(2), np.float32(3)],
    "object arrays": [np.array([{}, 1], object)] * 3,
    "ragged tensors": [torch.arange(i) for i in (3, 1, 0)],
    "0-d tensors": [torch.tensor(i) for i in range(3)],
    "transposed tensors": [torch.arange(12).view(3, 4).t()[: i + 1] for i in range(3)],
    "lists of numbers": [[1, 2], [3], []],
    "lists with floats": [[1, 2.5], [3], []],
    "even lists": [[1, 2], [3, 4], [5, 6]],
    "lists of text": [["a"], ["b", "c"], []],
    "lists and tuples": [[1, "a"], (2, "b"), [3, "c"]],
    "tuples": [(1, "a", b"b"), (2, "c", b"d"), (3, "e", b"f")],
    "named tuples": [Pair(np.arange(i), "x" * i) for i in range(3)],
    "dataclasses": [Record(np.arange(i), "x" * i) for i in range(3)],
    "frozen dataclasses": [Frozen(torch.ones(i + 1)) for i in range(3)],
    "nested dicts": [{"a": {"b": [np.arange(i), str(i)]}, "c": i} for i in range(3)],
    "number keys": [{1: i, None: "x"} for i in range(3)],
    "ordered dicts": [OrderedDict(b=np.ones(2), a=np.arange(i)) for i in range(3)],
    "mappings": [Encoding({"ids": np.arange(4) + i, "text": str(i)}, "here") for i in range(3)],
    "opaque": [Opaque(i) for i in range(3)],
    "sets": [{1}, {2, 3}, set()],
}
ONLY_IN_FIELDS = {"lists of text"}  # samples that are lists of different lengths are refused
ONLY_AS_LISTS = {"ragged in two dimensions", "another number of dimensions", "none or array"}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (kind, mode)
        for kind in SAMPLES
        for mode in ("list", "pad", "nested", "jagged")
        if kind not in ONLY_IN_FIELDS and (mode == "list" or kind not in ONLY_AS_LISTS)
    ],
)
def test_batch_equals_the_reference(kind: str, mode: str) -> None:
    rule = ragged_of(mode, None, is_torch_mode=False)
    assert_same(reference(SAMPLES[kind], mode), collated(SAMPLES[kind], rule))


class Grade(IntEnum):
    LOW = 1
    HIGH = 2


NUMBERS_OF_SEVERAL_TYPES: dict[str, list[Any]] = {
    "int, float": [0, 0.5, 1],
    "float, int": [0.5, 1, 2],
    "bool, int": [True, 7, False],
    "numpy, python": [np.int64(1), 2, 3],
    "python, numpy": [1, np.float32(2), 3],
    "two of numpy": [np.float32(1), np.float64(2), np.float32(3)],
    "numpy bool, bool": [np.bool_(True), False, True],
    "int enum": [Grade.LOW, Grade.HIGH, Grade.LOW],
    "int enum, int": [1, Grade.HIGH, 3],
}


@pytest.mark.parametrize("kind", NUMBERS_OF_SEVERAL_TYPES)
def test_numbers_of_several_types_and_subclasses_become_torchs_tensor(kind: str) -> None:
    numbers = NUMBERS_OF_SEVERAL_TYPES[kind]
    for found, expected in (
        (collated(numbers, ragged_of("list", None, is_torch_mode=False)), default_collate(numbers)),
        (next(iter(ShmLoader([{"y": y} for y in numbers], 3, seed=0)))["y"], default_collate(numbers)),
    ):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


PLAIN: list[Any] = [3, 0.5, True, 2**70, 1j]
SCALARS: list[Any] = [np.float16(2), np.float32(0.5), np.float64(0.5), np.int16(4), np.int64(4), np.bool_(True), np.uint16(3)]
OF_NO_DIMENSION: list[Any] = [np.array(scalar) for scalar in SCALARS] + [torch.tensor(scalar) for scalar in (1.5, 3, True)]
OTHERS: list[Any] = [np.zeros(1), np.zeros(2), torch.zeros(2), np.complex64(1)]


@pytest.mark.filterwarnings("ignore")  # torch's and numpy's advice about such mixtures
def test_numbers_beside_arrays_become_what_torch_makes_of_them() -> None:
    """Where torch raises, the batch is a list of the values."""
    rule = ragged_of("list", None, is_torch_mode=False)
    num_stacked = 0
    for pair in product([*PLAIN, *SCALARS, *OF_NO_DIMENSION, *OTHERS], repeat=2):
        for numbers in (list(pair), [*pair, pair[0]]):
            found = collated(numbers, rule)
            try:
                expected = default_collate(numbers)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                assert isinstance(found, list), numbers
                continue
            num_stacked += 1
            assert isinstance(found, torch.Tensor), numbers
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), numbers
            assert found.tolist() == expected.tolist(), numbers
    assert num_stacked > 500


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")  # torch's advice
@pytest.mark.parametrize("num_workers", [0, 2])
def test_numpy_scalar_beside_a_zero_dimensional_array_is_stacked(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"y": y} for y in (np.float32(0.5), np.array(1.5, np.float32), np.array(2.5, np.float32), np.float32(3.5))]
    with ShmLoader(samples, 2, seed=0, num_workers=num_workers) as loader:
        batches = [batch["y"].tolist() for batch in loader]
    assert batches == [[0.5, 1.5], [2.5, 3.5]]
    assert "cannot be stacked" not in caplog.text


@pytest.mark.parametrize("numbers", [[1, 2.5, 2**70], [np.timedelta64(1, "s"), 1], [np.longdouble(1), 2]], ids=str)
def test_numbers_that_torch_rejects_become_a_list(numbers: list[Any]) -> None:
    found = collated(numbers, ragged_of("list", None, is_torch_mode=False))
    try:
        expected = default_collate(numbers).tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        assert isinstance(found, list)
        expected = numbers
    else:
        found = found.tolist()
    assert found == expected


@pytest.mark.parametrize("seed", [None, 3], ids=["torch mode", "seed mode"])
@pytest.mark.parametrize("mode", ["list", "pad", "nested", "jagged"])
def test_workers_make_the_same_batches(mode: str, seed: int | None) -> None:
    kinds = [kind for kind in SAMPLES if mode == "list" or kind not in ONLY_AS_LISTS]
    samples = [{kind: SAMPLES[kind][i % len(SAMPLES[kind])] for kind in kinds} for i in range(12)]
    expected = [reference(samples[i : i + 5], mode) for i in (0, 5, 10)]
    for num_workers in (0, 2):
        with ShmLoader(Samples(samples), 5, num_workers=num_workers, seed=seed, ragged=mode) as loader:
            for one, other in zip(expected, loader, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("mode", ["list", "pad", "jagged"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_of_torch_is_delivered_from_a_slot(dtype: torch.dtype, mode: str) -> None:
    samples = [
        {"even": tensor_of((2, 2), dtype, i), "ragged": tensor_of((i, 2), dtype, i), "0-d": tensor_of((), dtype, i)}
        for i in range(1, 5)
    ]
    with ShmLoader(Samples(samples), 4, num_workers=1, ragged={"ragged": mode}) as loader:
        (batch,) = loader
    for i, sample in enumerate(samples):
        assert_same(sample["even"], batch["even"][i])
        assert_same(sample["0-d"], batch["0-d"][i])
    ragged = batch["ragged"]
    rows = {
        "list": lambda: ragged,
        "pad": lambda: [row[:n] for row, n in zip(ragged.values, ragged.lengths, strict=True)],
        "jagged": lambda: ragged.values.split(ragged.lengths.tolist()),
    }[mode]()
    for sample, row in zip(samples, rows, strict=True):
        assert_same(sample["ragged"], row)


@pytest.fixture
def dlpack_of_older_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates DLPack of torch before 2.10, which has no 8-bit floats."""

    def made(capsule: Any) -> torch.Tensor:
        tensor = from_dlpack(capsule)
        if tensor.dtype.is_floating_point and tensor.element_size() == 1:
            raise RuntimeError(f"no {tensor.dtype} comes by DLPack")
        return tensor

    for module in (batch_memory, fixed_rows):
        monkeypatch.setattr(module, "from_dlpack", made)
    monkeypatch.setattr(batch_memory, "DLPACK_HAS_FLOAT8", False)
    fixed_rows._plan.cache_clear()
    yield
    fixed_rows._plan.cache_clear()


@pytest.mark.usefixtures("dlpack_of_older_torch")
@pytest.mark.parametrize("kind", ["leaf", "dict", "tuple", "with an empty field", "ragged"])
def test_eight_bit_floats_are_delivered_without_dlpack_support(kind: str) -> None:
    dtypes = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
    samples = [
        {
            "leaf": lambda i: tensor_of((3,), dtypes[0], i),
            "dict": lambda i: {str(dtype): tensor_of((3,), dtype, i) for dtype in dtypes},
            "tuple": lambda i: tuple(tensor_of((3,), dtype, i) for dtype in dtypes),
            "with an empty field": lambda i: {"none": tensor_of((0,), dtypes[0], i), "some": tensor_of((2,), dtypes[1], i)},
            "ragged": lambda i: [tensor_of((i,), dtype, i) for dtype in dtypes],
        }[kind](i)
        for i in range(1, 5)
    ]
    expected = [reference(samples[i : i + 2], "list") for i in (0, 2)]
    with ShmLoader(Samples(samples), 2, num_workers=1, seed=1) as loader:
        for one, other in zip(expected, loader, strict=True):
            assert_same(one, other)


def leaves() -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Returns strategies for the values of a field, which vary from sample to sample only where they may."""
    ragged = st.sampled_from(NUMPY_DTYPES).flatmap(
        lambda dtype: st.tuples(st.just(dtype), st.lists(st.integers(0, 3), max_size=1)).map(
            lambda fixed: st.integers(0, 4).flatmap(lambda n: hnp.arrays(fixed[0], (n, *fixed[1])))
        )
    )
    even = st.tuples(st.sampled_from(NUMPY_DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)).map(
        lambda fixed: hnp.arrays(*fixed)
    )
    tensors = st.sampled_from(TORCH_DTYPES).map(
        lambda dtype: st.tuples(st.integers(0, 4), st.integers(0, 255)).map(lambda a: tensor_of((a[0],), dtype, a[1]))
    )
    text = st.text(st.characters(exclude_categories=[]), max_size=8)
    plain = [text, st.binary(max_size=8), st.integers(), st.floats(), st.booleans(), st.none(), st.none() | text]
    numbers = [st.lists(st.integers(-9, 9), max_size=3), st.lists(st.floats() | st.integers(-9, 9), max_size=3)]
    return st.one_of(st.sampled_from([*plain, *numbers]), ragged, even, tensors)


def schemas() -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Returns strategies for samples: leaves in dicts, tuples, named tuples and dataclasses."""
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3).map(st.fixed_dictionaries),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: st.tuples(*parts)),
            st.tuples(inner, inner).map(lambda parts: st.builds(Pair, *parts)),
            inner.map(lambda part: st.builds(Frozen, part)),
        ),
        max_leaves=5,
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), mode=st.sampled_from(["list", "pad", "jagged"]))
def test_any_schema_round_trips(data: st.DataObject, mode: str) -> None:
    one = data.draw(schemas())
    samples = data.draw(st.lists(one, min_size=1, max_size=4))
    rule = ragged_of(mode, None, is_torch_mode=False)
    assert_same(reference(samples, mode), collated(samples, rule))


@pytest.mark.slow(reason="hypothesis starts a loader with a worker for each example")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), mode=st.sampled_from(["list", "pad", "nested", "jagged"]))
def test_any_schema_round_trips_through_workers(data: st.DataObject, mode: str) -> None:
    one = data.draw(schemas())
    samples = data.draw(st.lists(one, min_size=1, max_size=7))
    with ShmLoader(Samples(samples), 3, num_workers=1, seed=1, ragged=mode) as loader:
        for i, batch in enumerate(loader):
            assert_same(reference(samples[3 * i : 3 * i + 3], mode), batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_without_dimensions_beside_numbers_are_a_list(num_workers: int) -> None:
    samples: Any = [torch.tensor(4), 100, np.int64(2)]
    with ShmLoader(samples, 3, num_workers=num_workers, seed=1, shuffle=False) as loader:
        assert_same(next(iter(loader)), samples)


def test_dataclass_of_columns_is_made_without_its_init() -> None:
    with ShmLoader(Samples([Record(None, "a"), Record(None, "b")]), 2, num_workers=1, seed=1) as loader:
        (batch,) = loader
    assert isinstance(batch, Record)
    assert dataclasses.asdict(batch) == {"image": [None, None], "caption": ["a", "b"]}


def test_pickled_objects_are_counted() -> None:
    sparse = torch.eye(3).to_sparse()  # which is not pickled
    with ShmLoader(Samples([{"o": Opaque(i), "s": sparse, "t": "x"} for i in range(4)]), 2, num_workers=1, ragged="list") as loader:
        batches = list(loader)
        assert loader.stats()["num_foreign"] == 4
    assert batches[1]["o"] == [Opaque(2), Opaque(3)]
    assert all(torch.equal(one.to_dense(), torch.eye(3)) for one in batches[0]["s"])


class Shared:
    """An object that refers to data shared by all samples."""

    vocabulary = bytes(100_000)
    table = np.arange(50_000)

    def __init__(self) -> None:
        self.words, self.rows = Shared.vocabulary, Shared.table


@pytest.mark.parametrize("sequence", [list, tuple])
def test_data_shared_by_pickled_objects_is_packed_once(sequence: type) -> None:
    packed = pack({"objects": [Shared() for _ in range(16)], "also": sequence([np.array([1, "a"], dtype=object)])})
    assert packed.nbytes < 2 * (100_000 + Shared.table.nbytes)
    assert packed.num_foreign == 17
    made = unpack(PrivateBatch(packed))
    assert all(one.rows is made["objects"][0].rows and one.words is made["objects"][0].words for one in made["objects"])
    assert np.array_equal(made["objects"][15].rows, Shared.table)
    assert made["also"][0].tolist() == [1, "a"]


def test_packing_objects_calls_no_python_function_per_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Packer, "array", lambda self, value: asked.append(value))
    pack([np.array([*range(1000, 2000), "a"], dtype=object)])
    assert len(asked) < 10


class Names(list):  # type: ignore[type-arg]  # a list of anything, as in user code
    """A list with an attribute."""

    note = ""


class PlainTuple(tuple):  # type: ignore[type-arg]  # a tuple of anything, as in user code
    """A tuple subclass without field names."""


def _names(values: list[Any], note: str) -> Names:
    made = Names(values)
    made.note = note
    return made


AS_TORCH: dict[str, list[Any]] = {
    "list subclass": [_names([i, np.ones(2) * i, f"x{i}"], f"note {i}") for i in range(3)],
    "tuple subclass": [PlainTuple((i, f"x{i}")) for i in range(3)],
    "deque": [deque([i, {"a": np.float32(i)}]) for i in range(3)],
    "range": [range(i, i + 3) for i in range(3)],
    "user list": [UserList([i, "x"]) for i in range(3)],
    "torch size": [torch.Size([i, 4]) for i in range(3)],
    "list, then deque": [[1, "a"], deque([2, "b"]), (3, "c")],
    "deque, then list": [deque([1, "a"]), [2, "b"], (3, "c")],
    "named tuple, then tuple": [Pair(1, "a"), (2, "b"), [3, "c"]],
    "dict, then ordered dict": [{"a": 1}, OrderedDict(a=2), OrderedDict(a=3)],
    "sequences in a dict": [{"a": deque([i]), "b": [range(2)]} for i in range(3)],
    "no elements": [deque(), deque(), deque()],
    "float32, then float64": [np.ones(2, np.float32), np.ones(2), np.ones(2, np.float32)],
    "int64, then float32": [np.ones((2, 1), np.int64), np.full((2, 1), 0.5, np.float32)],
    "uint8, then int8": [np.full(2, 200, np.uint8), np.full(2, -1, np.int8)],
    "bool, then int": [np.ones(2, bool), np.full(2, 7)],
    "0-d arrays of two dtypes": [np.array(1), np.array(0.5)],
    "0-d array, then floats": [np.array(6), 7.5, np.array(8), np.float32(0.5)],
    "tensors of two dtypes": [torch.ones(2, dtype=torch.int32), torch.full((2,), 0.5)],
    "bfloat16, then float16": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)],
    "array, then tensor": [np.ones(2), torch.ones(2)],
    "array, then memmap": [np.ones(2), np.ones(2).view(np.matrix).A1],
    "two dtypes in a dict": [{"x": np.ones(2, np.float32)}, {"x": np.ones(2)}],
    "two dtypes in a tuple": [(np.ones(2, np.float32), 1), (np.ones(2), 2)],
}


def assert_alike(expected: Any, found: Any) -> None:
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype
        assert torch.equal(expected, found)
    elif isinstance(expected, dict):
        assert list(expected) == list(found)
        for key in expected:
            assert_alike(expected[key], found[key])
    elif isinstance(expected, list | tuple | deque | UserList):
        assert len(expected) == len(found)
        assert getattr(expected, "note", None) == getattr(found, "note", None)
        for one, other in zip(expected, found, strict=True):
            assert_alike(one, other)
    else:
        assert expected == found


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow(reason="starts a worker for each kind"))])
@pytest.mark.parametrize("kind", AS_TORCH)
def test_seed_mode_collates_sequences_and_mixed_dtypes_as_torch(kind: str, num_workers: int) -> None:
    samples = AS_TORCH[kind]
    with ShmLoader(samples, len(samples), seed=0, num_workers=num_workers) as loader:
        (batch,) = loader
        assert_alike(default_collate(samples), batch)


@pytest.mark.parametrize(
    "samples",
    [
        [range(2), 1],
        [bytearray(b"ab"), bytearray(b"cd")],  # bytes, which are not columns of numbers
        [torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.int64)],  # without a common dtype
        [np.ones(2), np.ones(3, np.float32)],
        [torch.ones(2), np.ones(2)],  # torch accepts them only in the other order
    ],
    ids=str,
)
def test_samples_that_torch_rejects_become_a_list(samples: list[Any]) -> None:
    with ShmLoader(samples, 2, seed=0) as loader:
        (batch,) = loader
        assert isinstance(batch, list)
        assert [list(one) if isinstance(one, torch.Tensor) or hasattr(one, "__len__") else one for one in batch] == [
            list(one) if hasattr(one, "__len__") else one for one in samples
        ]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("first", [np.array(1.5), np.float64(1.5), torch.tensor(1.5)], ids=["array", "scalar", "tensor"])
def test_sample_written_to_its_row_keeps_its_type_if_the_batch_is_packed_after_all(first: Any, num_workers: int) -> None:
    samples = [first, np.ones(2), first]  # the second does not fit the rows laid out for the first
    with ShmLoader(Samples(samples), 3, num_workers=num_workers, ragged="list") as loader:
        (batch,) = loader
    assert [type(value) for value in batch] == [type(value) for value in reference(samples, "list")]


class Marked(torch.Tensor):
    """A tensor subclass, which only pickle can move."""


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2, getattr(torch, "float4_e2m1fn_x2", torch.uint64)], ids=str)
def test_pickled_tensors_of_dtypes_without_a_storage_class_are_delivered(dtype: torch.dtype, seed: int | None) -> None:
    samples = [torch.arange(i, i + 4, dtype=torch.uint8).view(dtype).as_subclass(Marked) for i in range(2)]
    with ShmLoader(samples, batch_size=2, num_workers=1, collate_fn=list, seed=seed) as loader:
        (batch,) = loader
    assert [(type(row), row.dtype) for row in batch] == [(Marked, dtype)] * 2
    assert [row.view(torch.uint8).tolist() for row in batch] == [[0, 1, 2, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize("seed", [None, 3], ids=["torch mode", "seed mode"])
def test_untyped_storages_are_delivered(seed: int | None) -> None:
    samples = [{"storage": torch.arange(n, dtype=torch.uint8).untyped_storage()} for n in (3, 0)]
    with ShmLoader(Samples(samples), 2, num_workers=1, seed=seed, collate_fn=list) as loader:
        (batch,) = loader
    assert [list(sample["storage"]) for sample in batch] == [[0, 1, 2], []]


class Orders:
    """Samples whose keys come in two orders, also in a dict inside them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        pairs = [("index", index), ("row", torch.full((2,), index)), ("inner", {"x": index, "y": 1.0})]
        if index % 6 < 3:
            return dict(pairs)
        return dict(reversed(pairs)) if index < 9 else {**dict(pairs), "inner": {"y": 1.0, "x": index}}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_keys_of_a_batch_have_the_order_of_its_first_sample(seed: int | None, num_workers: int) -> None:
    expected = [default_collate([Orders()[index] for index in range(first, first + 2)]) for first in range(0, 12, 2)]
    with ShmLoader(Orders(), 2, seed=seed, shuffle=False, num_workers=num_workers) as loader:
        for wanted, batch in zip(expected, loader, strict=True):
            assert str(wanted) == str(batch)
            assert list(wanted["inner"]) == list(batch["inner"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_axis_of_one_element_may_have_a_negative_stride(num_workers: int) -> None:
    array = np.arange(3000.0).reshape(1, 3000)[::-1]  # as of the flip of an image's only channel
    assert array.strides[0] < 0
    with ShmLoader([0], 1, collate_fn=lambda _: array, num_workers=num_workers) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch, array)
