"""Datasets that answer any name, and wrappers that pass names on: what they define themselves decides how they are read."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import Dataset

from shmload import ShmLoader
from shmload.worker.snapshot import is_stateful
from shmload.world import ability_of

MODES = pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


class Anything(Dataset[Any]):
    """Whatever it is asked for, it gives a function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__getitems__":
            raise AttributeError(name)
        return lambda *arguments, **options: self

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class Able:
    """Can be read in every way, and keeps a state; `schema` is the object's own."""

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
    """A wrapper as programs have them: what it has not, the inner one has."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # while it is unpickled
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
def test_a_dataset_that_answers_any_name_is_read_by_its_items(seed: int | None, num_workers: int) -> None:
    assert epoch(Anything(), seed=seed, num_workers=num_workers) == [[0, 1, 2], [3, 4, 5]]


@MODES
def test_a_mock_is_a_dataset(seed: int | None) -> None:
    mock: Any = MagicMock()
    mock.__len__.return_value = 6
    mock.__getitem__.side_effect = lambda index: index
    assert epoch(mock, seed=seed) == [[0, 1, 2], [3, 4, 5]]


@WORKERS
@MODES
def test_a_wrapper_is_not_read_through_what_it_wraps(seed: int | None, num_workers: int) -> None:
    assert epoch(Transformed(Able()), seed=seed, num_workers=num_workers) == [[100, 101, 102], [103, 104, 105]]


@WORKERS
@MODES
def test_what_an_object_was_given_in_its_init_counts(seed: int | None, num_workers: int) -> None:
    with ShmLoader(Able(), 3, num_workers=num_workers, seed=seed, shuffle=False) as loader:
        assert "read by read_into" in repr(loader)
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_a_name_is_found_on_the_class_or_the_object_and_nowhere_else() -> None:
    assert ability_of(Able(), "schema") == {"x": ("int64", ())}
    assert ability_of(Able(), "missing") is None
    assert [ability_of(Transformed(Able()), name) for name in ("schema", "read_into", "state_dict")] == [None] * 3
    assert [is_stateful(one) for one in (Able(), Transformed(Able()), Anything(), MagicMock())] == [True, *[False] * 3]
