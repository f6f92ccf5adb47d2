"""Datasets that answer any attribute, and wrappers that forward attributes: only their own attributes decide how they are read."""

from __future__ import annotations

import re
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shmload import Mix, ShmLoader
from shmload.introspect.abilities import ability_of
from shmload.worker.snapshot import is_stateful

MODES = pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


class AnswersEverything(Dataset[Any]):
    """A dataset that returns a function for every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__getitems__":
            raise AttributeError(name)
        return lambda *arguments, **options: self

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class FullProtocol:
    """A dataset that can be read in every way and has a state; `schema` is an instance attribute."""

    def __init__(self) -> None:
        self.schema = {"x": ("int64", ())}

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        return [self[index] for index in indices]

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = index

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Transformed:
    """A typical wrapper that forwards missing attributes to the inner dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # during unpickling
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.inner[index]["x"] + 100}


def epoch(dataset: Any, **options: Any) -> list[list[int]]:
    with ShmLoader(dataset, 3, shuffle=False, **options) as loader:
        return [(batch["x"] if isinstance(batch, dict) else batch).tolist() for batch in loader]


@WORKERS
@MODES
def test_dataset_that_answers_any_attribute_is_read_by_getitem(seed: int | None, num_workers: int) -> None:
    assert epoch(AnswersEverything(), seed=seed, num_workers=num_workers) == [[0, 1, 2], [3, 4, 5]]


@MODES
def test_mock_can_be_a_dataset(seed: int | None) -> None:
    mock: Any = MagicMock()
    mock.__len__.return_value = 6
    mock.__getitem__.side_effect = lambda index: index
    assert epoch(mock, seed=seed) == [[0, 1, 2], [3, 4, 5]]


@WORKERS
@MODES
def test_wrapper_is_read_by_its_own_getitem(seed: int | None, num_workers: int) -> None:
    assert epoch(Transformed(FullProtocol()), seed=seed, num_workers=num_workers) == [[100, 101, 102], [103, 104, 105]]


@WORKERS
@MODES
def test_instance_attributes_are_used(seed: int | None, num_workers: int) -> None:
    with ShmLoader(FullProtocol(), 3, num_workers=num_workers, seed=seed, shuffle=False) as loader:
        assert "read by read_into" in repr(loader)
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_attributes_are_looked_up_only_on_the_class_and_the_instance() -> None:
    assert ability_of(FullProtocol(), "schema") == {"x": ("int64", ())}
    assert ability_of(FullProtocol(), "missing") is None
    assert [ability_of(Transformed(FullProtocol()), name) for name in ("schema", "read_into", "state_dict")] == [None] * 3
    assert [is_stateful(one) for one in (FullProtocol(), Transformed(FullProtocol()), AnswersEverything(), MagicMock())] == [
        True,
        *[False] * 3,
    ]


class Plain:
    """Samples by number, and attributes that have the package's names but another meaning."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class RaisingSchema(Plain):
    @property
    def schema(self) -> Any:
        raise RuntimeError("connect to the database first")


class OwnOrder(Plain):
    def keyed_order(self) -> list[int]:
        return [5, 4]

    def epoch_schedule(self, epoch: int) -> float:
        return 1 / epoch

    def keyed_items(self) -> Any:
        raise KeyError("no key")

    def in_place(self) -> bool:
        return True

    def bytes_by_node(self) -> int:
        raise KeyError


class OwnReading(Plain):
    """A dataset whose `read_into` reads a table into a database, and whose schema happens to be valid."""

    schema: ClassVar = {"x": "int64"}

    def read_into(self, table: str) -> None:
        raise NotImplementedError

    def read_batch_into(self, table: str, rows: int, database: Any) -> None:
        raise NotImplementedError


class OwnSchema(Plain):
    """A dataset with the protocol's methods and a schema for something else."""

    schema: ClassVar = {"name": object(), "age": "years"}

    def read_into(self, index: int, out: Any) -> None:
        raise NotImplementedError


class OwnState(Plain):
    """A dataset with states of several models by name."""

    def state_dict(self, model: str) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, model: str, state: dict[str, Any]) -> None:
        raise NotImplementedError


OTHER_MEANINGS = {
    "a schema that raises": RaisingSchema(),
    "text as schema": Plain(schema="public"),
    "a list as schema": Plain(schema=["name", "age"], read_into="file.csv"),
    "fields of another dataset": Plain(schema={"name": object(), "tokens": ("float64", (None, "n"))}),
    "ragged fields that samples do not have": Plain(schema={"tokens": ("float64", (None,)), "text": str}),
    "other methods for orders": OwnOrder(),
    "values for orders": Plain(keyed_order=3, epoch_schedule=[1, 2], given_rank=7, is_concatenation=True, batch_type="train"),
    "other methods for reading": OwnReading(),
    "another kind of schema": OwnSchema(),
    "another kind of batch type": Plain(schema={"x": "int64"}, read_into=lambda index, out: 1 / 0, batch_type="train"),
    "values for states": Plain(state_dict={"a": 1}, load_state_dict=False),
    "other methods for states": OwnState(),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow(reason="starts workers"))])
@MODES
@pytest.mark.parametrize("what", OTHER_MEANINGS)
def test_attributes_with_the_packages_names_but_another_meaning_are_ignored(
    what: str, seed: int | None, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset: Any = OTHER_MEANINGS[what]
    with caplog.at_level("DEBUG", "shmload"):
        assert epoch(dataset, seed=seed, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None) == [
            [0, 1, 2],
            [3, 4, 5],
        ]
        with ShmLoader(dataset, 3, seed=seed) as loader:
            assert "read by __getitem__" in repr(loader)
            next(iter(loader))
            loader.state_dict()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (RaisingSchema(), "RaisingSchema.schema is ignored: it raised RuntimeError: connect to the database first"),
        (OwnOrder(), "OwnOrder.keyed_order is ignored"),
        (OwnReading(), "OwnReading is read by its samples and does not decode in place: read_into and read_batch_into take two"),
        (OwnSchema(), "OwnSchema is read by its samples and does not decode in place: TypeError"),
    ],
)
def test_reason_for_an_ignored_attribute_is_logged(dataset: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "shmload"):
        ShmLoader(dataset, 3, seed=1).close()
    assert words in caplog.text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"x": ("int64", (-1,))}, "'x' has shape (-1,): extents are at least 0"),
        ({"x": ((2,), np.float32)}, "'x' is ((2,), <class 'numpy.float32'>): give (dtype, shape), such as ('float32', (3,"),
        ({"x": ("float33", (2,))}, "'x' is ('float33', (2,)): give (dtype, shape)"),
        ({"x": ("float32", 2)}, "'x' is ('float32', 2): give (dtype, shape)"),
        ({"x": ("float32", (2.5,))}, "'x' is ('float32', (2.5,)): give (dtype, shape)"),
        ({"x": ("float32", "2")}, "'x' is ('float32', '2'): give (dtype, shape)"),
        ({"x": ("float32", (2,), 3)}, "'x' is ('float32', (2,), 3): give (dtype, shape)"),
        ({"x": object}, "a field needs one of int8"),
        ({"x": None}, "'x' is None: give (dtype, shape)"),
        ((("x", "float32"),), "a schema is a mapping name -> (dtype, shape) with at least one field; got (('x', 'float32'),)"),
        ({}, "a schema is a mapping name -> (dtype, shape) with at least one field; got {}"),
    ],
    ids=str,
)
def test_schema_error_is_raised_if_the_dataset_cannot_be_read_otherwise(schema: Any, words: str) -> None:
    class OnlyInPlace:
        def __init__(self) -> None:
            self.schema = schema

        def __len__(self) -> int:
            return 6

        def read_into(self, index: int, out: Any) -> None:
            out["x"] = index

    for kind in (OnlyInPlace, type("OfTorch", (OnlyInPlace, Dataset), {})):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            ShmLoader(kind())


def test_subclass_of_the_packages_datasets_can_override_their_methods() -> None:
    class InOrder(Mix):
        def keyed_order(self, *, shuffle: bool, global_batch: int) -> Any:
            return super().keyed_order(shuffle=False, global_batch=global_batch)

    members: Any = [(range(6), 1), (range(6, 12), 1)]
    orders = []
    for kind, shuffle in ((InOrder, True), (Mix, False), (Mix, True)):
        with ShmLoader(kind(members), 3, shuffle=shuffle, seed=1) as loader:
            orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1] != orders[2]
