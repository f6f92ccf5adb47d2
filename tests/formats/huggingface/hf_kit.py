"""Tables with every kind of column for the tests of Hugging Face datasets, and their batches from both loaders."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Array2D, Array3D, ClassLabel, Dataset, Features, LargeList, Sequence, Value
from torch.utils.data import DataLoader

from shmload import ShmLoader

N = 11
# torch before 2.10 needs this to collate
NUMPYS_BOOLEANS = pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float32", "float64")
RNG = np.random.default_rng(7)
TEXT = ["", "a", "grüße", "日本語", "nul\0inside", "x" * 3000, "tab\t", "🦆", "end", "b", "c"]


def filled(dtype: str, *shape: int) -> list[Any]:
    """Returns values over the whole range of a type, one row per sample."""
    if dtype.startswith("float"):
        return (RNG.standard_normal((N, *shape)) * 1e3).astype(dtype).tolist()
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, (N, *shape), dtype, endpoint=True).tolist()


SCALARS: dict[str, tuple[Any, list[Any]]] = {
    **{dtype: (Value(dtype), filled(dtype)) for dtype in (*INTS, *FLOATS)},
    "bool": (Value("bool"), [i % 3 == 0 for i in range(N)]),
    "label": (ClassLabel(names=["cat", "dog", "fox"]), [i % 3 for i in range(N)]),
}
TEXTS: dict[str, tuple[Any, list[Any]]] = {
    "string": (Value("string"), TEXT),
    "large_string": (Value("large_string"), TEXT[::-1]),
    "binary": (Value("binary"), [t.encode() for t in TEXT]),
}
LISTS: dict[str, tuple[Any, list[Any]]] = {
    "fixed": (Sequence(Value("float32"), length=4), filled("float32", 4)),
    "fixed_int8": (Sequence(Value("int8"), length=3), filled("int8", 3)),
    "even": (Sequence(Value("int64")), filled("int64", 5)),
    "large_even": (LargeList(Value("float64")), filled("float64", 2)),
    "fixed_fixed": (Sequence(Sequence(Value("int16"), length=2), length=3), filled("int16", 3, 2)),
    "even_even": (Sequence(Sequence(Value("int32"))), filled("int32", 2, 3)),
    "even_fixed": (Sequence(Sequence(Value("uint8"), length=2)), filled("uint8", 4, 2)),
}
ARRAYS: dict[str, tuple[Any, list[Any]]] = {
    "array2d": (Array2D((2, 3), "float32"), filled("float32", 2, 3)),
    "array3d": (Array3D((2, 1, 3), "uint8"), filled("uint8", 2, 1, 3)),
    "array2d_even": (Array2D((None, 3), "int32"), filled("int32", 2, 3)),
}
RAGGED: dict[str, tuple[Any, list[Any]]] = {
    "ragged": (Sequence(Value("int64")), [list(range(i % 4)) for i in range(N)]),
    "large_ragged": (LargeList(Value("float32")), [[i / 2] * (i % 3 + 1) for i in range(N)]),
    "ragged_int8": (Sequence(Value("int8")), [[i] * (i % 5) for i in range(N)]),
}


def dataset_of(columns: dict[str, tuple[Any, list[Any]]]) -> Dataset:
    features = Features({name: feature for name, (feature, _) in columns.items()})
    return Dataset.from_dict({name: values for name, (_, values) in columns.items()}, features=features)


def chunked(dataset: Dataset) -> Dataset:
    """Returns the same rows as a dataset of three tables, one of them a slice."""
    cut = dataset.select(range(3, 9))
    return datasets.concatenate_datasets([dataset.select(range(3)), cut, dataset.select(range(9, len(dataset)))])


ARRANGED: dict[str, Any] = {
    "plain": lambda d: d,
    "shuffled": lambda d: d.shuffle(seed=3),
    "selected": lambda d: d.select([7, 2, 2, 9, 0]),
    "a slice": lambda d: d.select(range(2, 9)),
    "concatenated": chunked,
    "concatenated and shuffled": lambda d: chunked(d).shuffle(seed=5),
    "a shard of a shuffle": lambda d: d.shuffle(seed=1).shard(2, 1),
}


def batches_of(loader: Any) -> list[Any]:
    """Copies all batches, so that the loader's slots are released."""
    return [copy.deepcopy(batch) for batch in loader]


def torch_batches(dataset: Any, batch_size: int = 4, **options: Any) -> list[Any]:
    return batches_of(DataLoader(dataset, batch_size, **options))


def shmload_batches(dataset: Any, batch_size: int = 4, *, path: str = "read_batch_into", **options: Any) -> list[Any]:
    """Returns the batches of a ShmLoader that must read with the method `path`."""
    with ShmLoader(dataset, batch_size, **options) as loader:
        assert f"read by {path}" in repr(loader)
        return batches_of(loader)


def assert_same(expected: Any, got: Any) -> None:
    """Asserts equal types, keys and their order, dtypes, shapes and bytes."""
    assert type(expected) is type(got)
    if isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        assert torch.equal(expected.nan_to_num(), got.nan_to_num())
        assert torch.equal(expected.isnan(), got.isnan())
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        for name, value in expected.items():
            assert_same(value, got[name])
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same(one, other)
    else:
        assert expected == got
