"""Attributes of the dataset, or of a function, that a program sets between passes."""

from __future__ import annotations

import argparse
import types
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from shmload import ShmLoader
from shmload.formats import ParquetDataset
from shmload.introspect import attribute_values
from shmload.pipeline import Items


class Scale:
    """A transform."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.transform: Any = Scale(1)
        self.offset = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return int(self.transform(index)) + self.offset


class Plain:
    """A dataset without a base class, which contains another."""

    def __init__(self) -> None:
        self.inner = Numbers()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> int:
        return self.inner[index]


def read(loader: ShmLoader[Any]) -> list[int]:
    return [value for batch in loader for value in batch.tolist()]


def loader_of(dataset: Any, **options: Any) -> ShmLoader[Any]:
    return ShmLoader(dataset, **{"batch_size": 4, "num_workers": 2, "seed": 7, "shuffle": False, **options})


def pids_of(loader: ShmLoader[Any]) -> list[int]:
    return [worker["pid"] for worker in loader.stats()["workers"]]


CHANGES = {
    "attribute": lambda numbers: setattr(numbers, "offset", 1000),
    "transform": lambda numbers: setattr(numbers, "transform", Scale(3)),
    "within a transform": lambda numbers: setattr(numbers.transform, "factor", 3),
    "function": lambda numbers: setattr(numbers, "transform", abs),
}


@pytest.mark.parametrize(
    "wrap", [lambda numbers: numbers, lambda numbers: Subset(numbers, range(32)), lambda numbers: ConcatDataset([numbers])]
)
@pytest.mark.parametrize("options", [{}, {"backend": "thread"}, {"num_workers": 0}, {"seed": None}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_next_pass_reads_with_the_attributes_that_the_program_has_set(change: str, options: dict[str, Any], wrap: Any) -> None:
    numbers = Numbers()
    with loader_of(wrap(numbers), **options) as loader:
        assert read(loader) == list(range(32))
        CHANGES[change](numbers)
        assert read(loader) == [numbers[index] for index in range(32)]


class Holder:
    """An object of a class that is neither a transform nor a record."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_attributes_of_any_object_within_the_dataset_count() -> None:
    numbers: Any = Numbers()
    numbers.holder = Holder(Holder(1))
    before = attribute_values.attribute_values(numbers)
    for other in (2, True, 1.0):
        numbers.holder.held.held = other
        assert attribute_values.attribute_values(numbers) != before
    numbers.holder.held.held = 1
    assert attribute_values.attribute_values(numbers) == before


def test_datasets_within_a_plain_one_count() -> None:
    plain = Plain()
    with loader_of(plain) as loader:
        first = read(loader)
        plain.inner.offset = 5
        assert read(loader) == [value + 5 for value in first]


class Clip:
    """A collate_fn with attributes."""

    def __init__(self) -> None:
        self.most = 10

    def method(self, samples: list[int], more: int = 0) -> torch.Tensor:
        return torch.tensor(samples).clip(max=self.most)


class CallableClip(Clip):
    """The same as a callable object."""

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return self.method(samples)


@pytest.mark.parametrize("kind", ["object", "method", "partial", "closure", "default", "keyword"])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_collate_fn_counts(kind: str, backend: str) -> None:
    clip = CallableClip() if kind == "object" else Clip()

    def by_keyword(samples: list[int], *, clip: Any = clip) -> Any:
        return clip.method(samples)

    functions: dict[str, Any] = {
        "object": clip,
        "method": clip.method,
        "partial": partial(clip.method, more=1),
        "closure": lambda samples: clip.method(samples),
        "default": lambda samples, by=clip: by.method(samples),
        "keyword": by_keyword,
    }
    function = functions[kind]
    with loader_of(Numbers(), collate_fn=function, backend=backend) as loader:
        assert max(read(loader)) == 10
        clip.most = 20
        assert max(read(loader)) == 20


def test_stages_of_a_pipeline_count() -> None:
    scale = Scale(2)
    pipeline = Items(range(20)).map(scale, workers=2).batch(4)
    assert [value for batch in pipeline for value in batch.tolist()] == list(range(0, 40, 2))
    scale.factor = 5
    assert [value for batch in pipeline for value in batch.tolist()] == list(range(0, 100, 5))


def test_workers_stay_if_nothing_has_changed() -> None:
    with loader_of(Numbers()) as loader:
        read(loader)
        before = pids_of(loader)
        read(loader)
        assert pids_of(loader) == before


def test_persistent_workers_keep_their_dataset_as_in_torch() -> None:
    numbers = Numbers()
    for seed in (7, None):
        numbers.offset = 0
        with loader_of(numbers, seed=seed, persistent_workers=True) as loader:
            first = read(loader)
            numbers.offset = 1
            assert read(loader) == first


@pytest.mark.parametrize("num_workers", [1, 3])
def test_persistent_workers_stay_as_many_as_in_torch(num_workers: int) -> None:
    with loader_of(Numbers(), seed=None, persistent_workers=True) as loader:
        first = read(loader)
        before = pids_of(loader)
        loader.num_workers = num_workers
        assert read(loader) == first
        assert pids_of(loader) == before


def test_attributes_of_the_packages_own_datasets_do_not_count(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(8))}), tmp_path / "a.parquet")
    dataset = ParquetDataset(tmp_path / "a.parquet")
    subset = Subset(dataset, [0])
    before = attribute_values.attribute_values(subset)
    assert dataset[3]["x"] == 3  # opens the file
    assert attribute_values.attribute_values(subset) == before


@dataclass
class Record:
    size: float = float("nan")


@dataclass(slots=True)
class Slotted:
    size: int = 1


class Numbered(list[int]):
    """A list with attributes."""

    number = 0


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Slotted, lambda value: setattr(value, "size", 2)),
        (lambda: {1, 2}, lambda value: value.add(3)),
        (lambda: deque([1]), lambda value: value.append(2)),
        (lambda: Numbered([1]), lambda value: value.append(2)),
        (lambda: types.SimpleNamespace(x=1), lambda value: setattr(value, "x", 2)),
        (lambda: argparse.Namespace(x=1), lambda value: setattr(value, "x", 2)),
        (Record, lambda value: setattr(value, "size", 1.0)),
        (lambda: [1, [2]], lambda value: value[1].append(3)),
        (lambda: {"a": (1, [2])}, lambda value: value["a"][1].clear()),
        (lambda: list(range(1000)), lambda value: value.append(3)),
    ],
)
def test_records_and_containers_count(make: Any, change: Any) -> None:
    numbers: Any = Numbers()
    numbers.value = make()
    numbers.itself = numbers
    before = attribute_values.attribute_values(numbers)
    assert attribute_values.attribute_values(numbers) == before
    change(numbers.value)
    assert attribute_values.attribute_values(numbers) != before


class Weight:
    """An object that is neither a transform nor a record."""

    def __init__(self, number: int) -> None:
        self.number = number


class Replaced(Dataset[int]):
    """A dataset whose contents are freed before others are loaded, which then often have the same address."""

    def __init__(self, make: Any) -> None:
        self.make, self.values = make, make(0)

    def load(self, number: int) -> None:
        self.values = None
        self.values = self.make(number)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if isinstance(self.values, Weight):
            return index + self.values.number
        return int((list(self.values) if isinstance(self.values, dict) else self.values)[index])


@pytest.mark.parametrize(
    "make",
    [
        lambda number: torch.arange(4) + number,
        lambda number: np.arange(4) + number,
        lambda number: [index + number for index in range(1000)],
        lambda number: dict.fromkeys(range(number, number + 1000)),
        Weight,
    ],
    ids=["tensor", "array", "list", "dict", "object"],
)
def test_what_replaces_a_freed_object_counts(make: Any) -> None:
    dataset = Replaced(make)
    with loader_of(dataset, num_workers=1) as loader:
        for number in range(0, 12_000, 2000):
            dataset.load(number)
            assert read(loader) == [number + index for index in range(4)]


def test_transform_counts_beside_a_long_table() -> None:
    numbers: Any = Numbers()
    numbers.table = [{"name": str(row), "box": [row, row + 1, row + 2, row + 3], "crowd": row % 2} for row in range(250)]
    numbers.tables = [dict(row) for row in numbers.table]
    before = attribute_values.attribute_values(numbers)
    assert len(before) >= attribute_values._MAX_VALUES
    numbers.transform = Scale(3)
    assert attribute_values.attribute_values(numbers) != before


class Squares:
    """A dataset that decodes in place."""

    def __init__(self, kind: str = "int64") -> None:
        self.schema = {"data": kind}

    def __len__(self) -> int:
        return 32

    def read_into(self, index: int, out: Any) -> None:
        out["data"] = index**2 + 0.5


class Doubles(Squares):
    def read_into(self, index: int, out: Any) -> None:
        out["data"] = 2 * index


IN_PLACE: dict[str, tuple[Any, Any]] = {
    "indices": (lambda: Subset(Squares(), range(32)), lambda subset: setattr(subset, "indices", range(31, -1, -1))),
    "dataset": (lambda: Subset(Squares(), range(32)), lambda subset: setattr(subset, "dataset", Doubles())),
    "member": (lambda: ConcatDataset([Squares()]), lambda both: both.datasets.__setitem__(0, Doubles())),
    "schema": (Squares, lambda squares: setattr(squares, "schema", {"data": "float64"})),
}


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 0, "seed": None}], ids=str)
@pytest.mark.parametrize("change", IN_PLACE)
def test_next_pass_decodes_in_place_as_the_program_has_set_it(change: str, options: dict[str, Any]) -> None:
    make, set_other = IN_PLACE[change]
    dataset = make()
    with loader_of(dataset, **options) as loader, loader_of(make(), **options) as other:
        assert values_of(loader) == values_of(other)
        set_other(dataset)
        expected = make()
        set_other(expected)
        with loader_of(expected, **options) as new:
            found = values_of(loader)
            assert found == values_of(new) != values_of(other)


def values_of(loader: ShmLoader[Any]) -> list[Any]:
    return [value for batch in loader for value in batch["data"].tolist()]


class Noisy(Dataset[float]):
    """A dataset with a transform that has a generator of its own."""

    def __init__(self) -> None:
        self.transform: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return index if self.transform is None else float(self.transform(index))


class Noise:
    def __init__(self, scale: float) -> None:
        self.scale, self.rng = scale, np.random.default_rng(5)

    def __call__(self, value: int) -> float:
        return float(value + self.scale * self.rng.random())


@pytest.mark.parametrize("first", [None, Noise(1)], ids=["without", "with"])
def test_generators_of_a_transform_set_between_passes_are_keyed(first: Any) -> None:
    found = []
    for num_workers in (0, 2):
        noisy = Noisy()
        noisy.transform = first
        with loader_of(noisy, num_workers=num_workers) as loader:
            read(loader)
            noisy.transform = Noise(100)
            found.append(read(loader))
    assert found[0] == found[1]


def test_many_and_deep_values_are_not_all_visited() -> None:
    numbers: Any = Numbers()
    numbers.tables = [[[float(i) for i in range(200)] for _ in range(200)] for _ in range(200)]
    numbers.array, numbers.tensor = np.zeros(10), torch.zeros(10)
    assert len(attribute_values.attribute_values(numbers)) <= attribute_values._MAX_VALUES + 1
    numbers.tables = []
    for _ in range(10_000):
        numbers.tables = [numbers.tables]
    assert attribute_values.attribute_values(numbers)
