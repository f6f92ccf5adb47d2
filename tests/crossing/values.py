"""The fields of a sample, each a pure function of (case, index). No engine and no files, because the oracle reads these, too."""

from __future__ import annotations

import copy
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.crossing.cases import Case

RAGGED_WIDTH = 2
ROWS_PER_FOLDER = 11  # rows of a partitioned dataset


class Pair(NamedTuple):
    """A sample of two named fields."""

    first: Any
    second: Any


@dataclass
class Record:
    """A sample of a type that torch's collate refuses."""

    first: Any
    second: Any


class Encoding(UserDict[str, Any]):
    """A sample of fields that is not a dict and has another attribute."""

    def __init__(self, fields: dict[str, Any], origin: str) -> None:
        super().__init__(fields)
        self.origin = origin


class TensorSubclass(torch.Tensor):
    """A tensor subclass, as libraries make them."""


def length(case: Case, index: int, size: int | None = None) -> int:
    """Returns the length of a field of variable length."""
    size = case.size if size is None else size
    if case.sizes == "even":
        return size
    mixed = (index * 2654435761 + case.seed) >> 3
    if case.sizes == "random":
        return mixed % (2 * size + 1)
    if case.sizes == "growing":
        return size * (1 + index) // max(case.n, 1)
    return size * 40 + 1000 if mixed % 11 == 3 else size


def row(size: int, index: int) -> Any:
    """Returns numbers that identify the sample; exact in float32."""
    return (np.arange(size) % 97 + 100 * index).astype(np.float32)


class OwnGenerators:
    """Random generators that a dataset owns."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.Random(), np.random.default_rng(), torch.Generator()


def noise(own: OwnGenerators | None = None) -> list[float]:
    """Draws from every global generator, or from all of the dataset's own."""
    if own is None:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]
    return [own.python.random(), float(own.numpy.random()), float(torch.rand((), generator=own.torch))]


class Shallow:
    """An object whose copies share its array."""

    def __init__(self, i: int) -> None:
        self.inside = np.arange(3) + i

    def __deepcopy__(self, memo: Any) -> Shallow:
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shallow) and self.inside.tolist() == other.inside.tolist()

    def __hash__(self) -> int:
        return hash(self.inside.tobytes())

    def __repr__(self) -> str:
        return f"Shallow({self.inside[0]})"


VALUES: dict[str, Callable[[Case, int], Any]] = {
    "i": lambda case, i: i,
    "H": lambda case, i: np.int32(i // ROWS_PER_FOLDER),
    "a": lambda case, i: row(case.size, i),
    "t": lambda case, i: torch.from_numpy(row(case.size, i + 1)),
    "u": lambda case, i: np.int16(i),
    "r": lambda case, i: i / 7,
    "b": lambda case, i: i % 3 == 0,
    "s": lambda case, i: f"ü{i} " + "x" * length(case, i, case.text),
    "y": lambda case, i: bytes([i % 256]) * length(case, i, case.text),
    "v": lambda case, i: (np.arange(length(case, i)) % 1000 + i).astype(np.int64),
    "w": lambda case, i: torch.full((length(case, i),), float(i)),
    "e": lambda case, i: np.empty((0, 3), np.float32),
    "h": lambda case, i: torch.full((3,), float(i)).to(torch.bfloat16),
    "x": lambda case, i: np.arange(12, dtype=np.int32).reshape(3, 4).T + i,
    "k": lambda case, i: row(case.size * 16, i + 2),
    "d": lambda case, i: {"a": row(case.size, i + 3), "pair": (i, f"s{i}")},
    "l": lambda case, i: [i, i + 1, i + 2],
    "L": lambda case, i: [i] * length(case, i, min(case.size, 50)),
    "c": lambda case, i: complex(i, 1) if False else torch.tensor([complex(i, 1)]),
    "N": lambda case, i: noise(),
    "o": lambda case, i: None,
    "q": lambda case, i: {i, i + 1} if case.seed % 2 else {Shallow(i)},
    "S": lambda case, i: torch.sparse_coo_tensor([[i % 4]], [float(i + 1)], (4,), check_invariants=False),
    "C": lambda case, i: torch.from_numpy(row(case.size, i)).as_subclass(TensorSubclass),
    "P": lambda case, i: torch.nn.Parameter(torch.from_numpy(row(case.size, i))),
    "g": lambda case, i: torch.from_numpy(row(case.size, i)).requires_grad_(),
}


def schema_of(case: Case) -> dict[str, Any]:
    """Returns the schema of a dataset that decodes these fields in place, in their order."""
    specs: dict[str, Any] = {
        "i": "int64",
        "a": ("float32", (case.size,)),
        "u": "int16",
        "r": "float64",
        "s": str,
        "y": bytes,
        "v": ("int64", (None,)),
        "h": (torch.bfloat16, (3,)),
        "e": ("float32", (0, 3)),
        "k": ("float32", (case.size * 16,)),
        "N": ("float64", (3,)),
    }
    return {name: specs[name] for name in case.fields}


def sample(case: Case, index: int, drawn: list[float] | None = None) -> Any:
    """Returns the sample at an index, with `drawn` in place of its random numbers if given."""
    values = [drawn if name == "N" and drawn is not None else VALUES[name](case, index) for name in case.fields]
    if case.kind == "bare":
        return values[0]
    if case.kind == "tuple":
        return tuple(values)
    if case.kind == "namedtuple":
        return Pair(*values)
    if case.kind == "dataclass":
        return Record(*values)
    whole = dict(zip(case.fields, values, strict=True))
    if case.kind == "mapping":
        return Encoding(whole, "here")
    if case.kind == "nested":
        return {"outer": [whole, (values[0], index)], "index": index}
    return whole
