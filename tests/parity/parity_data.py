"""Datasets of every kind, at module level so that every start method can pickle them."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

N = 23


class Point(NamedTuple):
    x: Any
    y: Any


def numbers(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).random(5).astype(np.float32)


class SampleFunction:
    """A dataset of N samples, each returned by a function of the index."""

    def __init__(self, make: Any, n: int = N) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if not -self.n <= index < self.n:
            raise IndexError(f"index {index} of {self.n}")
        return self.make(index % self.n)


class WithGetItems(SampleFunction):
    """The same dataset with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(i) for i in indices]


class StringKeys(SampleFunction):
    """The same dataset with strings as keys."""

    def __getitem__(self, key: str) -> Any:
        return key, int(key[1:])


def tensor(i: int) -> Any:
    return torch.from_numpy(numbers(i))


def array(i: int) -> Any:
    return numbers(i)


def pair(i: int) -> Any:
    return numbers(i), i


def mapping(i: int) -> Any:
    return {"image": torch.full((2, 3), i, dtype=torch.uint8), "label": i, "weight": i / 7, "flag": i % 2 == 0}


def nested(i: int) -> Any:
    return {"a": [tensor(i), (i, {"b": np.int16(i)})], "c": Point(array(i), torch.tensor(i))}


def named(i: int) -> Any:
    return Point(tensor(i), float(i))


def text(i: int) -> Any:
    return f"sample {i}", i


def raw(i: int) -> Any:
    return {"bytes": bytes([i]), "x": tensor(i)}


def integer(i: int) -> Any:
    return i


def real(i: int) -> Any:
    return i / 3


def boolean(i: int) -> Any:
    return i % 3 == 0


def numpy_scalar(i: int) -> Any:
    return np.float32(i), np.int8(i), np.bool_(i % 2)


def zero_d(i: int) -> Any:
    return torch.tensor(float(i)), np.array(i)


def empty(i: int) -> Any:
    return torch.empty(0, 3), np.empty((2, 0), np.int32)


def strided(i: int) -> Any:
    return torch.arange(12).reshape(3, 4).t() + i, np.arange(12).reshape(3, 4).T + i


def kinds(i: int) -> Any:
    return tuple(torch.tensor([i, 1]).to(d) for d in (torch.bfloat16, torch.complex64, torch.bool, torch.float16, torch.int16))


def unsigned(i: int) -> Any:
    return np.array([i], np.uint16), np.array([i], np.uint32), np.array([i], np.uint64)


def varying(i: int) -> Any:
    """Returns a sample whose shape differs between batches of 5, but not inside one, when read in order."""
    return torch.full((1 + i // 5,), i), i


def mixed_numbers(i: int) -> Any:
    return i if i % 2 else float(i)


def mixed_dtypes(i: int) -> Any:
    return np.array([i], np.float32 if i % 2 else np.float64)


def mixed_tensors(i: int) -> Any:
    return torch.tensor([i], dtype=torch.float64 if i % 2 else torch.float32)  # torch's workers keep the first one's type


def ordered(i: int) -> Any:
    return OrderedDict(x=tensor(i), y=i)


def torch_noise(i: int) -> Any:
    return tensor(i) + torch.rand(5)


def numpy_noise(i: int) -> Any:
    return numbers(i) + np.random.rand(5), np.random.randint(10)


def python_noise(i: int) -> Any:
    return i + random.random(), random.randrange(100)


def all_noise(i: int) -> Any:
    return {"t": torch.randn(2), "n": np.random.normal(size=3), "p": random.gauss(0, 1), "i": i}


def worker_of(i: int) -> Any:
    info = torch.utils.data.get_worker_info()
    return (-1, -1, 0) if info is None else (info.id, info.num_workers, info.seed)


def big_int(i: int) -> Any:
    return 2**40 + i, -i


def gradient(i: int) -> Any:
    return tensor(i).requires_grad_()


KINDS = {
    f.__name__: f
    for f in (
        tensor, array, pair, mapping, nested, named, text, raw, integer, real, boolean, numpy_scalar, zero_d, empty, strided,
        kinds, unsigned, varying, mixed_numbers, mixed_dtypes, mixed_tensors, ordered, torch_noise, numpy_noise, python_noise, all_noise,
        worker_of, big_int,
    )
}  # fmt: skip
